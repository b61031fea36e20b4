"""Devices that hold several stages: the smallest step and the smallest largest load, against brute force;
honest bounds."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gplan.core import Constraints, Pin, RecomputeMode, Value, ValueCost
from gplan.core.errors import NoPlanError
from gplan.partition import branch_and_bound
from gplan.partition.batch_simulation import goal_s
from gplan.partition.bounds import least_step_s
from gplan.partition.branch_and_bound import Search
from gplan.partition.goals import StepGoal
from gplan.partition.minimax import stages_between
from gplan.partition.plan_evaluation import objective_s, stages_of
from gplan.partition.problem import Problem, Solution
from gplan.partition.solve import smallest, smallest_peak, solve, with_down_sets
from gplan.partition.validation import why_not_selected
from tests.partition.graphs import best_goal_s, graph_problems
from tests.partition.problems import (
    EVERY,
    SHARED,
    all_cuts,
    best_objective_s,
    in_halves,
    make_problem,
    peak_bytes,
    problems,
)


@settings(max_examples=150, deadline=None)
@given(problems(minimize=["step-time", "max-stage"], schedules=SHARED, max_layers=8, max_stages=8))
def test_equals_brute_force_and_is_proven(problem: Problem) -> None:
    best_s, solution = best_objective_s(problem), smallest(problem)
    if best_s is None:
        assert solution is None
        return
    assert solution is not None
    stages = stages_of(problem, solution.cuts)
    assert objective_s(problem, stages) == pytest.approx(best_s, rel=1e-9)
    assert solution.lower_bound_s == pytest.approx(best_s, rel=1e-9)
    assert problem.memory_bytes is None or peak_bytes(problem, stages) <= problem.memory_bytes
    assert (solution.solver, solution.notes) == ("branch-and-bound", ())


def chain(schedule: str, num_layers: int, num_stages: int, *, seed: int = 0) -> Problem:
    """A chain of layers that differ."""
    forward_s, backward_s = np.random.default_rng(seed).integers(1, 30, (2, num_layers)).tolist()
    problem = make_problem(
        forward_s, backward_s, num_stages=num_stages, num_microbatches=8, schedule=schedule, minimize="step-time",
        stash_bytes=[1 + 7 * i % 11 for i in range(num_layers)], weight_bytes=5,
    )  # fmt: skip
    return replace(problem, costs=replace(problem.costs, profile=in_halves(problem.costs.profile)))


@pytest.mark.parametrize("schedule", SHARED[:-1])
def test_without_time_the_best_known_plan_comes_with_its_gap_and_a_note(schedule: str) -> None:
    problem = chain(schedule, 60, 12)
    hasty = smallest(problem, time_limit_s=1e-3)
    patient = smallest(problem, time_limit_s=0.5)
    assert hasty is not None
    assert patient is not None
    hasty_s, patient_s = (objective_s(problem, stages_of(problem, x.cuts)) for x in (hasty, patient))
    assert 0 < hasty.lower_bound_s <= patient.lower_bound_s <= patient_s <= hasty_s
    assert hasty.notes == ("the search for a shorter step was stopped after 1.00 ms",)


def test_where_the_candidates_are_too_many_the_longest_are_left_out_and_the_bound_stays_that_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = chain("looped-bfs:2", 20, 6)
    exact = smallest(problem)
    monkeypatch.setattr(branch_and_bound, "_FEW_CANDIDATES", 0)
    monkeypatch.setattr(branch_and_bound, "_MANY_CANDIDATES", 200)
    narrow = smallest(problem)
    assert exact is not None
    assert narrow is not None
    narrow_s = objective_s(problem, stages_of(problem, narrow.cuts))
    assert narrow.lower_bound_s < exact.lower_bound_s <= narrow_s < 1.1 * exact.lower_bound_s
    assert narrow.notes


@pytest.mark.parametrize("schedule", ["interleaved-1f1b:2", "zb-v"])
def test_the_smallest_peak_is_found_and_one_byte_less_is_known_to_be_too_little(schedule: str) -> None:
    problem = chain(schedule, 9, 4)
    known = smallest_peak(problem, deadline_s=time.perf_counter() + 60)
    assert known is not None
    least = min(peak_bytes(problem, stages_of(problem, cuts)) for cuts in all_cuts(problem))
    assert (known.value, known.proven) == (least, True)
    assert smallest(replace(problem, memory_bytes=least)) is not None
    assert smallest(replace(problem, memory_bytes=least - 1)) is None


def test_whether_anything_fits_may_be_left_open_but_not_unsaid() -> None:
    problem = chain("interleaved-1f1b:2", 40, 8)
    known = smallest_peak(problem, deadline_s=time.perf_counter() + 0.2)
    assert known is not None
    assert not known.proven
    between = int(0.5 * (known.lower_bound + known.value))
    with pytest.raises(NoPlanError, match="nor that there is none; the smallest memory that was found to fit is"):
        smallest(replace(problem, memory_bytes=between), time_limit_s=1e-3)


def uneven(num_layers: int, num_stages: int, schedule: str) -> Problem:
    """A chain whose weights and stashes have nothing to do with its times."""
    rng = np.random.default_rng(num_layers)
    weights, stashes, outputs = (rng.integers(1, most, num_layers).tolist() for most in (32, 40, 16))
    return make_problem(
        rng.integers(1, 12, num_layers).tolist(), num_stages=num_stages, num_microbatches=num_stages, schedule=schedule,
        minimize="step-time", weight_bytes=weights, stash_bytes=stashes, output_bytes=outputs,
    )  # fmt: skip


@pytest.mark.parametrize(("schedule", "enough"), [("interleaved-1f1b:4", 3200), ("looped-bfs:4", 5700), ("zb-v", 1900)])
def test_a_plan_that_fits_is_not_missed_where_moves_from_even_times_find_none(schedule: str, enough: int) -> None:
    known = smallest_peak(uneven(60, 16, schedule), enough=enough, deadline_s=time.perf_counter() + 600)
    assert known is not None
    assert known.value <= enough


@pytest.mark.parametrize("schedule", ["interleaved-1f1b:4", "looped-bfs:4"])
def test_the_least_memory_that_is_found_is_enough_for_a_plan(schedule: str) -> None:
    problem = uneven(60, 16, schedule)
    least = smallest_peak(problem, deadline_s=time.perf_counter() + 1.0)
    assert least is not None
    known = smallest_peak(problem, enough=least.value, deadline_s=time.perf_counter() + 600)
    assert known is not None
    assert known.value <= least.value


def test_a_plan_that_fits_is_where_the_search_begins_and_one_that_does_not_is_not() -> None:
    problem = uneven(24, 8, "interleaved-1f1b:2")
    least = smallest_peak(problem, deadline_s=time.perf_counter() + 1.0)
    assert least is not None
    start = Solution(stages=stages_between(problem, least.ends.tolist()), lower_bound_s=0.0, solver="given")
    tight = replace(problem, memory_bytes=int(least.value))
    found = smallest(tight, start=start, time_limit_s=1e-9)  # no time to find any
    assert found is not None
    assert found.cuts == start.cuts
    with pytest.raises(NoPlanError):
        smallest(replace(problem, memory_bytes=int(least.value) - 1), start=start, time_limit_s=1e-9)


def test_constraints_are_satisfied_by_stage() -> None:
    problem = chain("looped-bfs:2", 8, 4)
    constrained = replace(problem, constraints=Constraints(pins=(Pin(layer="b", stage=2),)))
    solution = smallest(constrained)
    assert solution is None  # two stages lie before it, and one layer
    constrained = replace(problem, constraints=Constraints(pins=(Pin(layer="c", stage=2),)))
    solution = smallest(constrained)
    assert solution is not None
    assert solution.cuts[:2] == (1, 2)


def test_devices_that_cannot_hold_the_weights_have_no_plan() -> None:
    problem = make_problem([1] * 24, num_stages=8, schedule="looped-bfs:2", weight_bytes=1000, memory_bytes=5_000)
    assert smallest(problem) is None


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problem=graph_problems(minimize=["step-time"]))
def test_rising_limits_find_the_optimum_of_graphs(monkeypatch: pytest.MonkeyPatch, problem: Problem) -> None:
    monkeypatch.setattr(branch_and_bound, "_FEW_CANDIDATES", 0)
    expected_s, solution = best_goal_s(problem), solve(problem)
    assert (solution is None) == (expected_s is None)
    if solution is not None:
        assert goal_s(problem, solution.stages) == pytest.approx(expected_s, rel=1e-9)
        assert solution.lower_bound_s == pytest.approx(expected_s, rel=1e-9)


@settings(max_examples=200, deadline=None)
@given(problems(minimize=["step-time"], schedules=EVERY))
def test_no_step_is_below_the_least(problem: Problem) -> None:
    expected_s = best_objective_s(problem)
    if expected_s is not None:
        assert least_step_s(problem) <= expected_s * (1 + 1e-9)


@settings(max_examples=120, deadline=None)
@given(
    problems(minimize=["step-time"], schedules=EVERY),
    st.sampled_from(["never", "always", "except-last", "selected"]),
    st.sampled_from([0.7, 1.0, 1.3]),
)
def test_a_cutoff_hides_no_better_plan(problem: Problem, recompute: RecomputeMode, share: float) -> None:
    if recompute == "selected" and why_not_selected(problem.schedule):
        return
    problem = replace(problem, recompute=recompute)
    best_s = best_objective_s(problem)
    if best_s is None:
        return
    cutoff_s = share * best_s
    assert Search(problem=problem, goal=StepGoal).bound_up_to(cutoff_s) <= min(best_s, cutoff_s) * (1 + 1e-9)
    found = solve(problem, cutoff_s=cutoff_s)
    assert found is not None
    found_s = objective_s(problem, stages_of(problem, found.cuts))
    assert min(best_s, cutoff_s) * (1 - 1e-9) <= found.lower_bound_s <= best_s * (1 + 1e-9)
    assert share <= 1 or found_s == pytest.approx(best_s, rel=1e-9)  # a plan as long as the cutoff is no better


def test_where_a_limit_has_too_many_candidates_the_bound_stays_below_the_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(branch_and_bound, "_FEW_CANDIDATES", 0)
    monkeypatch.setattr(branch_and_bound, "_MANY_CANDIDATES", 0)
    problem = make_problem([3, 1, 4, 1, 5, 9, 2, 6], num_stages=3, minimize="step-time")
    solution = smallest(problem)
    assert solution is not None
    assert least_step_s(problem) <= solution.lower_bound_s < objective_s(problem, stages_of(problem, solution.cuts))
    assert solution.notes == ("the search for a shorter step was stopped after 10.0 s",)


def test_two_towers_with_thousands_of_down_sets_are_proven() -> None:
    times = np.random.default_rng(0).integers(1, 30, 100).tolist()
    problem = make_problem(times, num_stages=8, num_microbatches=32, minimize="step-time")
    cost = ValueCost(microbatch_size=1, num_bytes=1)
    values = [Value(producer=i, consumers=(i + 1,), costs=(cost,)) for i in range(99) if i != 49]
    towers = with_down_sets(
        replace(problem, costs=replace(problem.costs, profile=replace(problem.costs.profile, values=tuple(values))))
    )
    assert towers.costs.num_positions == 51 * 51
    solution = smallest(towers)
    assert solution is not None
    assert solution.lower_bound_s == pytest.approx(goal_s(towers, solution.stages))
