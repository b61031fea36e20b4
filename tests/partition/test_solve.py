"""Whatever solver is chosen: models with branches, constraints, unequal devices and replicas, against brute force."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from gplan.core.errors import UsageError
from gplan.partition import solve as choose_module
from gplan.partition.batch_simulation import goal_s
from gplan.partition.problem import Problem
from gplan.partition.solve import solve, with_down_sets
from tests.partition.graphs import best_goal_s, every_partition, graph_problems, is_allowed
from tests.partition.problems import SHARED, make_problem


@settings(max_examples=120, deadline=None)
@given(graph_problems())
def test_equals_brute_force_over_every_chain_of_down_sets(problem: Problem) -> None:
    expected_s, solution = best_goal_s(problem), solve(problem)
    if expected_s is None:
        assert solution is None
        return
    assert solution is not None
    assert goal_s(problem, solution.stages) == pytest.approx(expected_s, rel=1e-9)
    assert solution.lower_bound_s == pytest.approx(expected_s, rel=1e-9)
    assert solution.stages in list(every_partition(problem))
    assert is_allowed(problem, solution.stages)


@settings(max_examples=60, deadline=None)
@given(graph_problems(minimize=["step-time", "max-stage"], schedules=SHARED))
def test_devices_with_several_stages_are_served_as_well_by_graphs(problem: Problem) -> None:
    expected_s, solution = best_goal_s(problem), solve(problem)
    assert (solution is None) == (expected_s is None)
    if solution is not None:
        assert goal_s(problem, solution.stages) == pytest.approx(expected_s, rel=1e-9)
        assert solution.lower_bound_s == pytest.approx(expected_s, rel=1e-9)
        assert is_allowed(problem, solution.stages)


@settings(max_examples=25, deadline=None)
@given(graph_problems(minimize=["max-stage", "step-time"]))
def test_with_more_down_sets_than_are_listed_the_integer_program_finds_the_same(problem: Problem) -> None:
    expected_s = best_goal_s(problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose_module, "MOST_DOWN_SETS", 1)
        solution = solve(problem)
    assert (solution is None) == (expected_s is None)
    if solution is not None:
        assert goal_s(problem, solution.stages) == pytest.approx(expected_s, rel=1e-9)
        assert solution.lower_bound_s == pytest.approx(expected_s, rel=1e-9)


def test_the_dynamic_program_refuses_what_it_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose_module, "smallest_largest", _too_many)
    problem = make_problem([1, 2, 3], num_stages=2, minimize="max-stage", memory_bytes=100)
    with pytest.raises(UsageError, match="--solver auto"):
        solve(problem, solver="dp")


def _too_many(_problem: Problem) -> None:
    raise choose_module.TooManyCandidates


def test_a_chain_is_not_taken_for_a_graph() -> None:
    problem = make_problem([1, 2, 3], num_stages=2)
    assert with_down_sets(problem) is problem
