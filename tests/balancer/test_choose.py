"""Models with branches, wishes, unequal devices and replicas, against brute force."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from gplan.balancer.choose import solve
from gplan.balancer.price import Problem
from tests.balancer.branched import best_s, branched_problems, chains, fits, goal_s


@settings(max_examples=300, deadline=None)
@given(branched_problems())
def test_equals_brute_force_over_every_chain_of_down_sets(problem: Problem) -> None:
    expected_s, solution = best_s(problem), solve(problem)
    if expected_s is None:
        assert solution is None
        return
    assert solution is not None
    assert goal_s(problem, solution.stages) == pytest.approx(expected_s, rel=1e-9)
    assert solution.lower_bound_s == pytest.approx(expected_s, rel=1e-9)
    assert solution.stages in list(chains(problem))
    assert fits(problem, solution.stages)
