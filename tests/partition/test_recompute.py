"""Layers selected to be recomputed: every partition and every subset of layers, priced by the formulas written out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

import gplan
from gplan.core import Constraints, LayerCost, Profile, Stage, Value, ValueCost
from gplan.core.errors import NoPlanError, UsageError
from gplan.cost.part_table import rows_of
from gplan.cost.stage_table import StageTable
from gplan.partition import recompute, solve
from gplan.partition.batch_simulation import goal_s
from gplan.partition.diagnosis import feasibility_by_num_devices, is_feasible, no_plan_error, tightest_device
from gplan.partition.minimax import smallest_largest
from gplan.partition.plan_evaluation import in_stage_order, objective_s, stages_of
from gplan.partition.problem import Problem, nothing_recomputed, num_recomputed, peak_moments_of, without_memory
from gplan.partition.recompute import RecomputeSelector
from gplan.partition.solve import smallest
from tests.made import make_profile
from tests.partition.graphs import every_partition, graph_problems
from tests.partition.problems import all_cuts, make_problem, problems

SELECTING = ("gpipe", "1f1b", "eager-1f1b")
"""Schedules with which layers can be selected."""


@st.composite
def selecting(draw: st.DrawFn, *, minimize: Sequence[str], max_layers: int = 5) -> Problem:
    """A problem over a chain that selects what to recompute, with outputs that are saved in part, and a limit."""
    problem = replace(
        draw(problems(max_layers=max_layers, minimize=minimize, schedules=SELECTING)), recompute="selected"
    )
    profile = problem.costs.profile
    unsaved = draw(st.lists(st.integers(0, 4), min_size=len(profile.layers), max_size=len(profile.layers)))
    profile = replace(_with_unsaved(profile, unsaved), versions=())  # outputs stay until the backward
    problem = replace(problem, costs=replace(problem.costs, profile=profile))
    every = [
        peak for cuts in all_cuts(problem) for stage in _stages(problem, cuts) for _, peak in _ways(problem, stage)
    ]
    return replace(problem, memory_bytes=max(1, draw(st.sampled_from(every)) - draw(st.integers(0, 1))))


def _with_unsaved(profile: Profile, unsaved: Sequence[int]) -> Profile:
    def cost(found: LayerCost, num_bytes: int) -> LayerCost:
        return replace(found, output_unsaved_bytes=min(num_bytes, found.output_bytes))

    layers = [
        replace(layer, costs=tuple(cost(x, num_bytes) for x in layer.costs))
        for layer, num_bytes in zip(profile.layers, unsaved, strict=True)
    ]
    return replace(profile, layers=tuple(layers))


def _stages(problem: Problem, cuts: Sequence[int]) -> tuple[Stage, ...]:
    return stages_of(nothing_recomputed(without_memory(problem)), cuts)


def _ways(problem: Problem, stage: Stage) -> Iterator[tuple[float, int]]:
    """Seconds added and peak of every subset of the stage's layers."""
    layers = range(stage.first_layer, stage.end_layer)
    for chosen in chain.from_iterable(combinations(layers, n) for n in range(len(layers) + 1)):
        costs = [problem.costs.sums.costs[v] for v in chosen]
        seconds = sum(max(x.last_recompute_s, x.on_host.last_recompute_s) for x in costs)  # by the slower clock
        yield seconds, _peak_bytes(problem, stage, set(chosen)) if chosen else stage.memory.peak_bytes


def _peak_bytes(problem: Problem, stage: Stage, chosen: set[int]) -> int:
    """The peak where these layers are recomputed, none of them no layer: each beside all that the stage keeps."""
    costs, loss = problem.costs, problem.costs.sums.loss
    at_loss = loss if stage.end_layer == costs.num_layers else None
    layers = range(stage.first_layer, stage.end_layer)
    running = max(_running_bytes(costs.sums.costs[v]) for v in chosen)
    forward = [running, *(costs.sums.costs[v].forward_workspace_bytes for v in layers)]
    backward = [running + max(_waiting_bytes(costs, v, stage) for v in layers)]
    backward += [_backward_bytes(costs, v, stage) for v in layers]
    if at_loss:
        forward.append(at_loss.forward_workspace_bytes)
        backward.append(at_loss.backward_workspace_bytes)
    return _peak_with(problem, stage, chosen, forward=max(forward), backward=max(backward))


def _told_bytes(problem: Problem, stage: Stage, chosen: set[int]) -> int:
    """The same layer by layer: what a layer needs beside what those before it keep."""
    costs, loss = problem.costs, problem.costs.sums.loss
    layers, is_last = range(stage.first_layer, stage.end_layer), stage.end_layer == costs.num_layers
    kept = {v: _kept_of(problem, stage, chosen, v) for v in layers}

    def most(needs: Iterable[int], loss_bytes: int) -> int:
        above = max(need - sum(kept[u] for u in layers if u > v) for v, need in zip(layers, needs, strict=True))
        return max(0, max(above - loss.stash_bytes, loss_bytes) if loss and is_last else above)

    def forward_bytes(v: int) -> int:
        cost = costs.sums.costs[v]
        return cost.forward_workspace_bytes + (cost.stash_bytes - kept[v] if v in chosen else 0)

    def backward_bytes(v: int) -> int:
        sent = (
            num_bytes
            for (made, readers), num_bytes in costs.workspaces.held_outputs
            if made in layers and made is not None and made > v and not is_last and max(readers) >= stage.end_layer
        )
        if v not in chosen:
            return _backward_bytes(costs, v, stage) + sum(sent)
        return _running_bytes(costs.sums.costs[v]) - kept[v] + _waiting_bytes(costs, v, stage) + sum(sent)

    forward = most(map(forward_bytes, layers), loss.forward_workspace_bytes if loss else 0)
    backward = most(map(backward_bytes, layers), loss.backward_workspace_bytes if loss else 0)
    return _peak_with(problem, stage, chosen, forward=forward, backward=backward)


def _peak_with(problem: Problem, stage: Stage, chosen: set[int], *, forward: int, backward: int) -> int:
    """The peak with these workspaces."""
    costs, at_loss = problem.costs, problem.costs.sums.loss if stage.end_layer == problem.costs.num_layers else None
    kept = _kept_bytes(problem, stage, chosen) + (at_loss.stash_bytes if at_loss else 0)
    parts = structs.replace(
        costs.row_parts(stage.first_layer, stage.end_layer),
        stash=0,
        pending=0,
        checkpoint=kept,
        recomputed_stash=kept,
        forward_workspace=forward,
        recompute_workspace=forward,
        recomputing_workspace=backward,
        backward_workspace=backward,
    )
    return int(peak_moments_of(problem, stage.index).selecting.peak([rows_of(parts, (1,))])[0])


def _running_bytes(cost: LayerCost) -> int:
    """What a layer needs while it is recomputed and then runs backward: its parameters are gathered once for both."""
    backward_bytes = cost.backward_workspace_bytes - cost.gathering_bytes
    return cost.stash_bytes + max(cost.forward_workspace_bytes, backward_bytes)


def _backward_bytes(costs: StageTable, layer: int, stage: Stage) -> int:
    """A layer's workspace without what layers behind its stage did before, with the gradients that wait meanwhile."""
    cost, end = costs.sums.costs[layer], stage.end_layer
    beyond = [x for x in cost.leftovers if layer + x.num_later >= end and end < costs.num_layers]
    return max(0, cost.backward_workspace_bytes - sum(x.num_bytes for x in beyond)) + _waiting_bytes(
        costs, layer, stage
    )


def _waiting_bytes(costs: StageTable, layer: int, stage: Stage) -> int:
    """The gradients of shared weights that wait while the layer's backward runs."""
    inside = {*range(stage.first_layer, stage.end_layer)}
    users = [(x.gradient_bytes, inside & {*x.layers}) for x in costs.profile.shared_weights]
    return sum(num_bytes for num_bytes, used in users if used and min(used) <= layer < max(used))


def _kept_bytes(problem: Problem, stage: Stage, chosen: set[int]) -> int:
    """What stays of a micro-batch, layer by layer along a chain, and what crosses the cut behind the stage."""
    costs, end = problem.costs.sums.costs, stage.end_layer
    total = sum(_kept_of(problem, stage, chosen, v) for v in range(stage.first_layer, end))
    return total + (costs[end - 1].output_unsaved_bytes if end < len(costs) else 0)


def _kept_of(problem: Problem, stage: Stage, chosen: set[int], v: int) -> int:
    """Its stash, or of a recomputed layer its outputs that are kept, and its inputs that are not."""
    cost, loss = problem.costs.sums.costs[v], problem.costs.sums.loss
    if v not in chosen:
        return cost.stash_bytes
    made = cost.output_bytes - cost.output_unsaved_bytes
    if loss and v == problem.costs.num_layers - 1:
        made = max(0, made - loss.unkept_output_bytes)
    return made + (problem.costs.sums.costs[v - 1].output_unsaved_bytes if v > stage.first_layer else 0)


def brute_force_s(problem: Problem) -> float | None:
    """The smallest objective over all partitions and subsets;
    a stage's cheapest subset that fits is the best for it."""
    found = []
    for cuts in all_cuts(problem):
        stages = []
        for stage in _stages(problem, cuts):
            cheapest = min(
                (s for s, peak in _ways(problem, stage) if peak <= (problem.memory_bytes or 0)), default=None
            )
            if cheapest is None:
                break
            stages.append(replace(stage, cost=replace(stage.cost, recompute_s=cheapest)))
        else:
            found.append(objective_s(problem, stages))
    return min(found, default=None)


@settings(max_examples=70, deadline=None)
@given(selecting(minimize=["max-stage"]))
def test_the_smallest_largest_stage_equals_brute_force(problem: Problem) -> None:
    best_s, solution = brute_force_s(problem), smallest_largest(problem)
    assert (best_s is None) == (solution is None)
    if solution is not None:
        objective = objective_s(problem, stages_of(problem, solution.cuts))
        assert (objective, solution.lower_bound_s) == pytest.approx((best_s, best_s), rel=1e-12)


@settings(max_examples=70, deadline=None)
@given(selecting(minimize=["step-time"]))
def test_the_smallest_step_equals_brute_force_and_is_proven(problem: Problem) -> None:
    best_s, solution = brute_force_s(problem), smallest(problem)
    assert (best_s is None) == (solution is None)
    if solution is not None and best_s is not None:
        stages = stages_of(problem, solution.cuts)
        assert solution.lower_bound_s == pytest.approx(objective_s(problem, stages), rel=1e-12)
        assert solution.lower_bound_s == pytest.approx(best_s, rel=1e-9)
        assert max(stage.memory.peak_bytes for stage in stages) <= (problem.memory_bytes or 0)


@settings(max_examples=30, deadline=None)
@given(selecting(minimize=["step-time"]))
def test_a_stage_names_layers_whose_peak_and_seconds_are_its_own(problem: Problem) -> None:
    names = [layer.name for layer in problem.costs.profile.layers]
    for stage in stages_of(problem, all_cuts(problem)[-1]):
        chosen = {names.index(x) for x in stage.recompute_layers}
        kept = _stages(problem, all_cuts(problem)[-1])[stage.index]
        searched = _peak_bytes(problem, kept, chosen) if chosen else kept.memory.peak_bytes
        fits = searched <= (problem.memory_of(stage.index) or searched)
        told = _told_bytes(problem, kept, chosen) if chosen and fits else searched
        assert stage.memory.peak_bytes == told <= searched
        assert stage.cost.recompute_s == sum(
            np.maximum.reduce(problem.costs.sums.clocks_s("last_recompute"))[list(chosen)]
        )


@settings(max_examples=30, deadline=None)
@given(selecting(minimize=["step-time"]))
def test_the_smallest_memory_and_the_smallest_k_are_those_of_brute_force(problem: Problem) -> None:
    least = min(
        max(min(peak for _, peak in _ways(problem, stage)) for stage in _stages(problem, cuts))
        for cuts in all_cuts(problem)
    )
    assert tightest_device(problem).peak_bytes == least
    assert is_feasible(replace(problem, memory_bytes=least))
    assert not is_feasible(replace(problem, memory_bytes=least - 1))
    expected = [is_feasible(replace(problem, num_stages=k + 1)) for k in range(problem.num_layers)]
    assert list(feasibility_by_num_devices(problem)) == expected


@settings(max_examples=30, deadline=None)
@given(graph_problems(max_layers=5, max_stages=3, minimize=["max-stage", "step-time"], schedules=SELECTING))
def test_with_branches_no_partition_is_better(problem: Problem) -> None:
    """Each partition selects by itself here; what it selects is checked above, on chains."""
    problem = replace(problem, recompute="selected", constraints=Constraints())
    found = []
    for stages in every_partition(problem):
        laid, cuts = in_stage_order(problem, stages)
        priced = stages_of(laid, cuts)
        limits = [problem.memory_of(stage.index) for stage in priced]
        if all(x is None or stage.memory.peak_bytes <= x for stage, x in zip(priced, limits, strict=True)):
            found.append(objective_s(laid, priced))
    solution = solve.solve(problem)
    assert (solution is None) == (not found)
    if solution is not None:
        assert goal_s(problem, solution.stages) == pytest.approx(min(found), rel=1e-9)


def test_nothing_is_recomputed_where_everything_fits() -> None:
    profile = make_profile([1.0] * 6, stash_bytes=100)
    kept = gplan.balance(profile, num_devices=2, num_microbatches=4)
    plan = gplan.balance(profile, num_devices=2, num_microbatches=4, recompute="selected", memory_bytes=kept.peak_bytes)
    assert [stage.recompute_layers for stage in plan.stages] == [(), ()]
    assert (plan.prediction.step_s, plan.peak_bytes) == (kept.prediction.step_s, kept.peak_bytes)


def test_the_layers_with_the_largest_stash_for_their_time_are_recomputed() -> None:
    profile = make_profile([1.0, 8.0, 1.0, 8.0], stash_bytes=[100, 100, 100, 100])
    plan = gplan.balance(profile, num_devices=1, num_microbatches=4, recompute="selected", memory_bytes=1000)
    assert plan.stages[0].recompute_layers == ("a", "c")
    assert plan.stages[0].cost.recompute_s == 2.0
    assert plan.prediction.step_s == 4 * (54 + 2)


def test_fronts_that_are_thinned_out_keep_an_honest_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(3)
    stash, forward_s = generator.integers(100, 10_000, 24).tolist(), generator.integers(100, 10_000, 24).tolist()
    problem = make_problem(
        forward_s, num_stages=2, num_microbatches=4, stash_bytes=stash, recompute="selected", minimize="max-stage",
        memory_bytes=5 * max(sum(stash) // 4, 1),
    )  # fmt: skip
    exact = smallest_largest(problem)
    monkeypatch.setattr(recompute, "MOST_LABELS", 16)
    rough = smallest_largest(replace(problem))
    assert exact is not None and rough is not None
    exact_s, rough_s = (goal_s(problem, x.stages) for x in (exact, rough))
    assert rough.lower_bound_s < exact_s <= rough_s
    assert not exact.notes and "the bound allows for it" in rough.notes[0]


def test_equal_layers_make_one_front_whatever_their_order() -> None:
    costs = make_problem([1.0] * 40, num_stages=4, stash_bytes=100).costs
    selector = RecomputeSelector(costs)
    peak_moments = peak_moments_of(make_problem([1.0] * 40, num_stages=4, stash_bytes=100, recompute="selected"), 0)
    every = np.array([(i, i + 10) for i in range(30)])
    seconds = selector.seconds(every[:, 0], every[:, 1], peak_moments, limit_bytes=2500)
    assert len(set(seconds.tolist())) == 1 and 0 < seconds[0] < np.inf


def test_a_limit_that_nothing_meets_names_the_least_memory() -> None:
    problem = make_problem([1.0] * 4, num_stages=2, stash_bytes=100, num_microbatches=4, recompute="selected",
                           memory_bytes=50, minimize="step-time")  # fmt: skip
    error = no_plan_error(problem)
    assert isinstance(error, NoPlanError)
    assert "the smallest memory that fits is --memory 100B" in str(error)


def test_milp_refuses_to_select_layers() -> None:
    profile = make_profile([1.0] * 4)
    with pytest.raises(UsageError, match="never, always or except-last"):
        gplan.balance(profile, num_devices=2, num_microbatches=2, recompute="selected", solver="milp")


def test_the_share_of_micro_batches_that_recompute_is_all_of_them() -> None:
    assert num_recomputed(make_problem([1.0], num_stages=1, recompute="selected")) == 4


def test_with_too_many_branches_layers_are_selected_in_the_profiles_order_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = make_profile([1.0] * 4, stash_bytes=100, weight_bytes=10)
    cost = (ValueCost(microbatch_size=1, num_bytes=1),)
    values = tuple(Value(producer=i, consumers=(3,), costs=cost) for i in range(3))
    profile = replace(made, values=values)
    monkeypatch.setattr(solve, "MOST_DOWN_SETS", 2)
    plan = gplan.balance(profile, num_devices=2, num_microbatches=4, recompute="selected", memory_bytes=700)
    assert any(stage.recompute_layers for stage in plan.stages)
    assert not plan.proof.is_proven
    assert any("nothing is proven" in note for note in plan.notes)
