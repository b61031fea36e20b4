"""Limits that rise until a plan is within one: the same optimum as looking at everything."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from gplan.core import Value, ValueCost
from gplan.partition import step_time as step_module
from gplan.partition.bounds import least_step_s
from gplan.partition.plan_evaluation import goal_s, objective_s, stages_of
from gplan.partition.problem import Problem
from gplan.partition.solve import solve, with_down_sets
from gplan.partition.step_time import smallest_step
from tests.partition.graphs import best_goal_s, graph_problems
from tests.partition.problems import EVERY, best_objective_s, make_problem, problems


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problem=graph_problems(minimize=["step-time"]))
def test_rising_limits_find_the_optimum_of_graphs(monkeypatch: pytest.MonkeyPatch, problem: Problem) -> None:
    monkeypatch.setattr(step_module, "_FEW_CANDIDATES", 0)
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


def test_where_a_limit_has_too_many_candidates_the_bound_stays_below_the_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_module, "_FEW_CANDIDATES", 0)
    monkeypatch.setattr(step_module, "_MANY_CANDIDATES", 0)
    problem = make_problem([3, 1, 4, 1, 5, 9, 2, 6], num_stages=3, minimize="step-time")
    solution = smallest_step(problem)
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
    solution = smallest_step(towers)
    assert solution is not None
    assert solution.lower_bound_s == pytest.approx(goal_s(towers, solution.stages))
