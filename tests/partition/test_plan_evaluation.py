"""What a partition costs, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gplan.core import ActionKind, Link, SharedWeight, Timing
from gplan.corrections import planned
from gplan.partition.plan_evaluation import device_loads_s, objective_s, price, stage_loads_s, stages_of
from gplan.partition.problem import Solution, num_recomputed
from gplan.simulation.simulator import simulate_schedule
from tests.partition.problems import make_problem

LINK = Link(latency_s=0.0, bytes_per_s=1.0)


def test_a_load_counts_compute_and_what_is_received_over_both_cuts() -> None:
    problem = make_problem([1, 2, 3], num_stages=3, output_bytes=[5, 7, 0], link=LINK)
    loads = stage_loads_s(problem, stages_of(problem, (1, 2)))
    assert loads == (3 + 5, 6 + 5 + 7, 9 + 7)


@pytest.mark.parametrize(("recompute", "count"), [("never", 0), ("except-last", 3), ("always", 4)])
def test_recompute_adds_its_share_of_a_forward_to_the_load(recompute: str, count: int) -> None:
    problem = make_problem([4, 8], num_stages=2, num_microbatches=4, recompute=recompute)
    assert num_recomputed(problem) == count
    assert stage_loads_s(problem, stages_of(problem, (1,))) == (12 + count, 24 + 2 * count)


def test_the_load_of_a_device_is_that_of_all_its_stages() -> None:
    problem = make_problem([1, 2, 3, 4], num_stages=4, schedule="looped-bfs:2")
    stages = stages_of(problem, (1, 2, 3))
    assert device_loads_s(problem, stages) == (3 + 9, 6 + 12)
    assert objective_s(problem, stages) == 18


def test_halves_that_do_not_add_up_count_as_they_are_but_on_the_first_stage() -> None:
    problem = make_problem([1, 2], num_stages=2, schedule="zb-h1", overhead_s=0.5)
    costs = [
        replace(x.costs[0], input_gradient=Timing.exactly(3.0), weight_gradient=Timing.exactly(4.0))
        for x in problem.costs.profile.layers
    ]
    layers = tuple(replace(x, costs=(cost,)) for x, cost in zip(problem.costs.profile.layers, costs, strict=True))
    problem = replace(problem, costs=replace(problem.costs, profile=replace(problem.costs.profile, layers=layers)))
    assert stage_loads_s(problem, stages_of(problem, (1,))) == (1.5 + 2.5, 2.5 + 3.5 + 4.5)
    whole = replace(problem, schedule="1f1b")
    assert stage_loads_s(whole, stages_of(whole, (1,))) == (1.5 + 2.5, 2.5 + 4.5)


def test_stages_hold_what_they_do_when_their_device_holds_most() -> None:
    problem = make_problem(
        [1] * 4, num_stages=4, schedule="looped-bfs:2", num_microbatches=2, stash_bytes=[10, 0, 30, 1]
    )
    memory = [stage.memory for stage in stages_of(problem, (1, 2, 3))]
    assert [x.peak_bytes for x in memory] == [20, 0, 60, 2]
    assert [x.moment for x in memory] == ["2F1", "3F1", "2F1", "3F1"]


def test_the_step_of_equal_gpipe_stages_is_the_textbook_one() -> None:
    problem = make_problem([1] * 6, num_stages=3, num_microbatches=5, minimize="step-time")
    assert objective_s(problem, stages_of(problem, (2, 4))) == (5 + 3 - 1) * 6


def test_the_optimizer_of_the_last_device_to_finish_ends_the_step() -> None:
    problem = make_problem(
        [1, 1], num_stages=2, num_microbatches=1, minimize="step-time", weight_bytes=[4, 12], optimizer_s=8.0
    )
    assert objective_s(problem, stages_of(problem, (1,))) == max(6 + 2, 4 + 6)


TIED = {"shared_weights": (SharedWeight(name="w", layers=(0, 3), num_parameters=2, weight_bytes=8, gradient_bytes=8),)}
SLOW = Link(latency_s=0.5, bytes_per_s=1.0)


def test_stages_that_hold_the_same_weight_add_up_its_gradients_once_a_step() -> None:
    problem = make_problem([1] * 4, num_stages=3, minimize="step-time", link=SLOW, **TIED)
    boundaries = make_problem([1] * 4, num_stages=3, minimize="step-time", link=SLOW)
    there_and_back_s = 2 * (0.5 + 8 / 2)
    assert [x.cost.all_reduce_s for x in stages_of(problem, (1, 2))] == [there_and_back_s, 0, there_and_back_s]
    assert (
        objective_s(problem, stages_of(problem, (1, 2))) == objective_s(boundaries, stages_of(boundaries, (1, 2))) + 9
    )


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "looped-bfs:2"])
def test_a_tied_weight_is_updated_when_its_first_stage_is_done_too(schedule: str) -> None:
    """The other device needs the first one's gradient, though it has done all its own actions earlier."""
    num_stages = 4 if schedule == "looped-bfs:2" else 3
    problem = make_problem(
        [1] * 4, num_stages=num_stages, schedule=schedule, minimize="step-time", link=SLOW, weight_bytes=[4, 4, 4, 40],
        optimizer_s=200.0, **TIED,
    )  # fmt: skip
    stages = stages_of(problem, range(1, num_stages))
    timeline = simulate_schedule(problem.made_schedule, [x.cost for x in stages], recompute="never")
    last_end_s = max(x.end_s for x in timeline.loop_spans if x.device == 0)
    begins = {x.action.stage: x.start_s for x in timeline.spans if x.action.kind is ActionKind.OPTIMIZER}
    assert begins[0] == pytest.approx(last_end_s + stages[0].cost.all_reduce_s)
    own = problem.stages_by_device[problem.devices[-1]]
    assert begins[own[0]] == pytest.approx(last_end_s + stages[own[0]].cost.before_update_s)
    assert begins[1] < last_end_s or problem.devices[1] == problem.devices[-1], "a device without it waits for none"
    updates_s = sum(stages[x].cost.before_update_s + stages[x].cost.optimizer_s for x in own)
    assert timeline.step_s == pytest.approx(last_end_s + updates_s) == objective_s(problem, stages)


def test_stages_that_hold_the_same_weight_update_at_the_same_time() -> None:
    """Both wait until its gradients are added up; a stage without it updates while the first still trains."""
    problem = make_problem([1] * 4, num_stages=3, weight_bytes=[4, 4, 4, 4], optimizer_s=12.0, **TIED)
    profile = problem.costs.profile
    step = replace(profile.step, slow_down=1.5, update_slow_down=3.0)
    contended = replace(profile, step=step, num_neighbours=1)
    problem = replace(problem, costs=replace(problem.costs, profile=planned(contended, num_devices=3)))
    costs = [x.cost for x in stages_of(problem, (1, 2))]
    an_equal_share_s = (6 + 2 + 8) / 3
    longer_s = (3 - 1) * an_equal_share_s
    assert [x.optimizer_s for x in costs] == pytest.approx([6 + longer_s, 1.5 * 2, 8 + longer_s])
    of_replica = planned(contended, num_devices=3, num_replicas=2, sharding="optimizer")
    assert of_replica.step.tied_update_s == pytest.approx(longer_s / 2)


def test_over_links_of_their_own_the_gradients_of_tied_weights_take_as_long_as_over_the_slowest() -> None:
    problem = replace(make_problem([1] * 4, num_stages=3, link=LINK, **TIED), links=(LINK, SLOW))
    assert [x.cost.all_reduce_s for x in stages_of(problem, (1, 2))] == [9, 0, 9]


def test_a_weight_whose_users_are_together_or_frozen_is_not_added_up() -> None:
    together = make_problem([1] * 5, num_stages=2, link=SLOW, **TIED)
    assert [x.cost.all_reduce_s for x in stages_of(together, (4,))] == [0, 0]
    (weight,) = TIED["shared_weights"]
    frozen = make_problem([1] * 4, num_stages=2, link=SLOW, shared_weights=(replace(weight, gradient_bytes=0),))
    assert [x.cost.all_reduce_s for x in stages_of(frozen, (2,))] == [0, 0]


@pytest.mark.parametrize(("schedule", "seconds"), [("zb-v", [0, 0, 0, 0]), ("looped-bfs:2", [9, 0, 0, 9])])
def test_of_chunks_a_tied_weight_is_added_up_unless_the_first_and_the_last_share_a_device(
    schedule: str, seconds: list[float]
) -> None:
    problem = make_problem([1] * 4, num_stages=4, schedule=schedule, link=SLOW, **TIED)
    assert [x.cost.all_reduce_s for x in stages_of(problem, (1, 2, 3))] == seconds


def test_replicas_add_up_all_gradients_and_those_of_tied_weights_before() -> None:
    problem = make_problem([1] * 4, num_stages=2, link=SLOW, weight_bytes=[4, 4, 4, 4], **TIED)
    problem = replace(problem, costs=replace(problem.costs, num_replicas=2))
    assert [x.cost.all_reduce_s for x in stages_of(problem, (2,))] == [9 + 2 * (0.5 + (8 + 8) / 2)] * 2


def test_a_priced_plan_says_what_was_asked_and_how_well_it_is_proven() -> None:
    problem = make_problem([1, 2, 3], num_stages=2, num_microbatches=2, memory_bytes=1000, schedule="1f1b")
    plan = price(
        problem, Solution(stages=((0, 1), (2,)), lower_bound_s=8.1, solver="dp", notes=("a note",)), solve_s=0.5
    )
    assert plan.cuts == (2,)
    assert (plan.schedule, plan.num_microbatches, plan.memory_limit_bytes) == ("1f1b", 2, 1000)
    assert plan.proof.objective_s == 9
    assert plan.proof.gap == pytest.approx(0.1)
    assert plan.prediction.ideal_bubble == pytest.approx(1 / 3)
    assert plan.notes == ("a note",)


def test_a_bound_above_the_objective_by_rounding_is_not_reported_as_such() -> None:
    problem = make_problem([1, 2, 3], num_stages=2)
    plan = price(problem, Solution(stages=((0, 1), (2,)), lower_bound_s=9.0 + 1e-12, solver="dp"), solve_s=0.0)
    assert plan.proof.lower_bound_s == plan.proof.objective_s == 9
