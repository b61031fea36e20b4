"""The simulator against closed forms, and the bubble's pieces against the idle time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gplan
from gplan.bubble import idle_by_cause, idle_pieces
from gplan.nouns import Action, ActionKind, IdleCause, Schedule, StageCost
from gplan.schedules import make_schedule, needs_of
from gplan.simulator import dependency_order, simulate, simulate_schedule, step_and_bubble
from tests.made import make_profile

seconds = st.integers(1, 20).map(float)


def stage_cost(forward_s: float, backward_s: float, hop_s: float = 0.0, optimizer_s: float = 0.0) -> StageCost:
    return StageCost(
        forward_s=forward_s, backward_s=backward_s, recompute_s=forward_s, optimizer_s=optimizer_s,
        activation_bytes=1, gradient_bytes=1, activation_s=hop_s, gradient_s=hop_s,
    )  # fmt: skip


stage_costs = st.lists(st.builds(stage_cost, seconds, seconds, st.integers(0, 5).map(float)), min_size=1, max_size=6)
microbatches = st.integers(1, 12)


@given(stage_costs, microbatches)
def test_gpipe_equals_its_closed_form(costs: list[StageCost], m: int) -> None:
    schedule = make_schedule("gpipe", num_devices=len(costs), num_microbatches=m)
    forward, backward = [x.forward_s for x in costs], [x.backward_s for x in costs]
    hops = sum(x.activation_s + x.gradient_s for x in costs[:-1])
    expected = sum(forward) + (m - 1) * max(forward) + sum(backward) + (m - 1) * max(backward) + hops
    assert simulate_schedule(schedule, costs, recompute="never").step_s == pytest.approx(expected)


@given(stage_costs, microbatches)
def test_gpipe_with_recompute_is_gpipe_with_longer_backwards(costs: list[StageCost], m: int) -> None:
    schedule = make_schedule("gpipe", num_devices=len(costs), num_microbatches=m)
    longer = [stage_cost(x.forward_s, x.backward_s + x.forward_s, x.activation_s) for x in costs]
    found = simulate_schedule(schedule, costs, recompute="always").step_s
    assert found == pytest.approx(simulate_schedule(schedule, longer, recompute="never").step_s)


@given(stage_costs, microbatches)
def test_1f1b_takes_at_least_what_each_stage_and_its_way_there_take(costs: list[StageCost], m: int) -> None:
    total, hop = totals(costs)
    lower = max(m * total[s] + sum(total[:s]) + sum(hop[:s]) for s in range(len(costs)))
    assert step_of_1f1b(costs, m) >= lower - 1e-9


@given(stage_costs, st.sampled_from([1, 2, 5, 12, 60, 200]))
def test_1f1b_goes_at_the_pace_of_its_slowest_run_of_stages(costs: list[StageCost], m: int) -> None:
    """Stages i to j that wait for each other need all their time once in j - i + 1 micro-batches; K of them to settle."""
    total, hop = totals(costs)
    k = len(costs)
    period = max((sum(total[i : j + 1]) + sum(hop[i:j])) / (j - i + 1) for i in range(k) for j in range(i, k))
    step_s = step_of_1f1b(costs, m)
    assert (m - k) * period - 1e-9 <= step_s <= sum(total) + sum(hop) + (m - 1 + k) * period + 1e-9


def totals(costs: list[StageCost]) -> tuple[list[float], list[float]]:
    """Forward and backward of each stage, and of each hop."""
    return [x.forward_s + x.backward_s for x in costs], [x.activation_s + x.gradient_s for x in costs[:-1]]


def step_of_1f1b(costs: list[StageCost], m: int) -> float:
    schedule = make_schedule("1f1b", num_devices=len(costs), num_microbatches=m)
    return simulate_schedule(schedule, costs, recompute="never").step_s


def test_in_1f1b_the_place_of_the_bottleneck_matters() -> None:
    schedule = make_schedule("1f1b", num_devices=4, num_microbatches=8)
    steps = []
    for slow in range(4):
        costs = [stage_cost(1.0, 2.0) if s != slow else stage_cost(1.5, 3.0) for s in range(4)]
        steps.append(simulate_schedule(schedule, costs, recompute="never").step_s)
    assert steps == [40.5, 42.0, 43.5, 45.0]


def test_the_step_ends_with_the_slowest_optimizer() -> None:
    costs = [stage_cost(1.0, 1.0, optimizer_s=5.0), stage_cost(1.0, 1.0, optimizer_s=0.0)]
    timeline = simulate_schedule(make_schedule("gpipe", num_devices=2, num_microbatches=1), costs, recompute="never")
    assert (timeline.loop_end_s, timeline.step_s) == (4.0, 9.0)


@given(st.sampled_from(["gpipe", "1f1b"]), stage_costs, microbatches)
def test_no_action_starts_before_its_input_has_arrived(name: str, costs: list[StageCost], m: int) -> None:
    schedule = make_schedule(name, num_devices=len(costs), num_microbatches=m)
    timeline = simulate_schedule(schedule, costs, recompute="except-last")
    starts = {x.action: x.start_s for x in timeline.spans}
    ends = {x.action: x.end_s for x in timeline.spans}
    arrivals = {x.action: x.end_s for x in timeline.transfers}
    needs = needs_of([x.action for x in timeline.loop_spans], len(costs))
    for action, needed in needs.items():
        assert starts[action] >= arrivals.get(needed, ends[needed])


@given(st.sampled_from(["gpipe", "1f1b"]), stage_costs, microbatches)
def test_the_pieces_of_the_bubble_add_up_to_the_idle_time(name: str, costs: list[StageCost], m: int) -> None:
    schedule = make_schedule(name, num_devices=len(costs), num_microbatches=m)
    timeline = simulate_schedule(schedule, costs, recompute="never")
    idle_s = timeline.bubble * len(costs) * (timeline.loop_end_s - timeline.loop_start_s)
    assert sum(idle_by_cause(timeline).values()) == pytest.approx(idle_s, abs=1e-6)
    for piece in idle_pieces(timeline):
        busy = [x for x in timeline.loop_spans if x.device == piece.device]
        assert not any(x.start_s < piece.end_s - 1e-9 and piece.start_s < x.end_s - 1e-9 for x in busy)


@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 6), microbatches)
def test_equal_stages_and_free_transfers_leave_no_imbalance(name: str, k: int, m: int) -> None:
    schedule = make_schedule(name, num_devices=k, num_microbatches=m)
    found = idle_by_cause(simulate_schedule(schedule, [stage_cost(1.0, 2.0)] * k, recompute="never"))
    assert found[IdleCause.IMBALANCE] == found[IdleCause.COMMUNICATION] == 0.0


def test_waiting_for_a_transfer_is_told_from_waiting_for_a_neighbour() -> None:
    costs = [stage_cost(1.0, 1.0, hop_s=3.0), stage_cost(1.0, 1.0)]
    schedule = make_schedule("gpipe", num_devices=2, num_microbatches=1)
    found = idle_by_cause(simulate_schedule(schedule, costs, recompute="never"))
    assert found[IdleCause.COMMUNICATION] == 3.0


@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 6), microbatches)
def test_one_device_can_run_the_dependency_order(name: str, k: int, m: int) -> None:
    schedule = make_schedule(name, num_devices=k, num_microbatches=m)
    done: set[Action] = set()
    order = dependency_order(schedule)
    needs = needs_of(order, k)
    for action in order:
        assert action not in needs or needs[action] in done
        done.add(action)
    assert len(done) == 2 * k * m


def test_an_order_that_deadlocks_is_named() -> None:
    backward_first = (Action(0, ActionKind.BACKWARD, 0), Action(0, ActionKind.FORWARD, 0))
    schedule = Schedule(name="mine", num_stages=1, num_microbatches=1, orders=(backward_first,))
    with pytest.raises(ValueError, match="mine can never finish: devices wait forever at 0B0"):
        simulate_schedule(schedule, [stage_cost(1.0, 1.0)], recompute="never")


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("recompute", ["never", "always", "except-last"])
def test_step_and_bubble_without_the_timeline_are_those_of_the_timeline(schedule: str, recompute: str) -> None:
    plan = gplan.balance(
        make_profile([1.1, 2.3, 0.7, 3.1], optimizer_s=0.3, overhead_s=0.05, output_bytes=3, weight_bytes=7),
        num_stages=3, num_microbatches=5, schedule=schedule, recompute=recompute,
    )  # fmt: skip
    timeline = simulate(plan)
    made = make_schedule(schedule, num_devices=3, num_microbatches=5)
    found = step_and_bubble(made, [stage.cost for stage in plan.stages], recompute=plan.recompute)
    assert found == (timeline.step_s, pytest.approx(timeline.bubble, abs=1e-15))
