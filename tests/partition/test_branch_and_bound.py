"""The smallest simulated step, against brute force; and honest bounds where the search is cut short."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from gplan.core import SharedWeight
from gplan.partition.batch_simulation import goal_s, steps_s
from gplan.partition.branch_and_bound import Incumbent, Search, SearchSpace, sweep
from gplan.partition.candidates import CandidateLimit, candidates_within
from gplan.partition.goals import StepGoal
from gplan.partition.lagrangian import first_weighted_bounds
from gplan.partition.minimax import smallest_largest
from gplan.partition.plan_evaluation import objective_s, stages_of
from gplan.partition.problem import Problem
from gplan.partition.solve import smallest, solve
from tests.partition.problems import (
    EVERY,
    all_cuts,
    best_objective_s,
    every_candidate,
    make_problem,
    paths,
    peak_bytes,
    plans,
    problems,
)


@settings(max_examples=250, deadline=None)
@given(problems(minimize=["step-time"]))
def test_equals_brute_force_and_is_proven(problem: Problem) -> None:
    best_s, solution = best_objective_s(problem), smallest(problem)
    if best_s is None:
        assert solution is None
        return
    assert solution is not None
    stages = stages_of(problem, solution.cuts)
    assert objective_s(problem, stages) == pytest.approx(best_s, rel=1e-9)
    assert solution.lower_bound_s == pytest.approx(objective_s(problem, stages), rel=1e-12)  # other orders of addition
    assert problem.memory_bytes is None or peak_bytes(problem, stages) <= problem.memory_bytes
    assert solution.solver == "branch-and-bound"


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "looped-bfs:2"])
def test_a_step_that_ends_with_a_tied_update_is_longer_than_its_paths(schedule: str) -> None:
    """The last device waits for the first one, and has the longer update."""
    tied = SharedWeight(name="w", layers=(0, 7), num_parameters=2, weight_bytes=8, gradient_bytes=8)
    problem = make_problem(
        [3, 1, 2, 1, 3, 1, 2, 4], num_stages=4, schedule=schedule, minimize="step-time", shared_weights=(tied,),
        weight_bytes=[4, 9, 6, 8, 7, 30, 20, 40], optimizer_s=200.0,
    )  # fmt: skip
    best_s, solution = best_objective_s(problem), solve(problem)
    assert solution is not None and solution.notes == ()
    assert goal_s(problem, solution.stages) == pytest.approx(best_s, rel=1e-9)
    assert solution.lower_bound_s == pytest.approx(best_s, rel=1e-9)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("seed", range(6))
def test_equals_brute_force_on_chains_with_thousands_of_partitions(schedule: str, seed: int) -> None:
    forward_s, backward_s = np.random.default_rng(seed).integers(1, 30, (2, 16)).tolist()
    problem = make_problem(
        forward_s, backward_s, num_stages=6, num_microbatches=12, schedule=schedule, minimize="step-time"
    )
    candidates = every_candidate(problem)
    every = steps_s(problem, candidates, paths(problem, candidates, all_cuts(problem)))
    solution = smallest(problem)
    assert solution is not None
    assert objective_s(problem, stages_of(problem, solution.cuts)) == solution.lower_bound_s == every.min()


@pytest.mark.parametrize("width", [1, 2])
@settings(max_examples=150, deadline=None)
@given(problem=problems(minimize=["step-time"], max_layers=7))
def test_a_search_that_leaves_prefixes_out_never_claims_too_much(problem: Problem, width: int) -> None:
    best_s = best_objective_s(problem)
    worst = max(plans(problem), key=lambda plan: objective_s(problem, plan[1]), default=None)
    if best_s is None or worst is None:
        return
    space = space_of(problem)
    ends = np.array([*worst[0], problem.num_layers])
    known = Incumbent(ends=ends, value=objective_s(problem, worst[1]), lower_bound=space.whole)
    found = sweep(space, known, width=width, deadline_s=time.perf_counter() + 60)
    assert found.lower_bound <= best_s * (1 + 1e-9)
    assert best_s <= found.value <= known.value
    path = paths(problem, space.candidates, [tuple(found.ends[:-1])])
    assert found.value == steps_s(problem, space.candidates, path).item()


def space_of(problem: Problem) -> SearchSpace:
    """All partitions that fit."""
    candidates = candidates_within(problem, CandidateLimit.of_load(float("inf"), num_stages=problem.num_stages))
    assert candidates is not None
    return SearchSpace(
        search=Search(problem=problem, goal=StepGoal), bounds=first_weighted_bounds(StepGoal(problem, candidates))
    )


@settings(max_examples=150, deadline=None)
@given(problems(minimize=["step-time"], max_layers=6, schedules=EVERY))
def test_no_plan_takes_less_than_the_bound_of_any_prefix(problem: Problem) -> None:
    problem = replace(problem, memory_bytes=None)
    space = space_of(problem)
    for cuts, stages in plans(problem):
        step_s, nodes = objective_s(problem, stages), space.root()
        for taken in paths(problem, space.candidates, [cuts])[0]:
            nodes = space.grow(nodes, np.array([taken]))
            assert nodes.bounds.item() <= step_s * (1 + 1e-9)


def test_without_time_the_best_known_plan_comes_with_its_gap_and_a_note() -> None:
    forward_s = np.random.default_rng(0).integers(1, 30, 40).tolist()
    problem = make_problem(forward_s, num_stages=8, schedule="1f1b", minimize="step-time")
    hasty, patient = smallest(problem, time_limit_s=0.0), smallest(problem)
    assert hasty is not None
    assert patient is not None
    assert hasty.lower_bound_s <= patient.lower_bound_s < objective_s(problem, stages_of(problem, hasty.cuts))
    assert hasty.notes == ("the search for a shorter step was stopped after 0 s",)
    assert patient.notes == ()


def test_under_1f1b_the_slow_stage_comes_first_where_it_may() -> None:
    problem = make_problem([1] * 9, num_stages=4, num_microbatches=8, schedule="1f1b", minimize="step-time")
    solution = smallest(problem)
    assert solution is not None
    assert solution.cuts == (3, 5, 7)


def test_a_step_decides_before_the_largest_stage_does() -> None:
    problem = make_problem([3, 2, 2, 3], [4, 1, 1, 1], num_stages=2, num_microbatches=8, minimize="step-time")
    by_load, by_step = smallest_largest(problem), smallest(problem)
    assert by_load is not None
    assert by_step is not None
    assert (by_load.cuts, by_step.cuts) == ((1,), (2,))  # loads 7 and 10 against 10 and 7; 7 max f + 7 max b decide
    assert objective_s(problem, stages_of(problem, by_load.cuts)) == 94
    assert objective_s(problem, stages_of(problem, by_step.cuts)) == 87


def test_equal_steps_are_told_apart_by_the_largest_load() -> None:
    problem = make_problem([1, 1, 1, 1], num_stages=2, num_microbatches=1, minimize="step-time")
    solution = smallest(problem)  # with one micro-batch every partition takes 12 s
    assert solution is not None
    assert solution.cuts == (2,)


def test_hundred_layers_are_proven_optimal() -> None:
    forward_s, backward_s = np.random.default_rng(1).integers(1, 50, (2, 100)).tolist()
    for schedule in ("gpipe", "1f1b"):
        problem = make_problem(
            forward_s, backward_s, num_stages=8, num_microbatches=16, schedule=schedule, minimize="step-time"
        )
        solution = smallest(problem)
        assert solution is not None
        assert solution.lower_bound_s == pytest.approx(
            objective_s(problem, stages_of(problem, solution.cuts)), rel=1e-12
        )
