"""1F1B with a cap: planned like any schedule, it needs no more memory than 1F1B and takes no less time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from gplan.partition.problem import Problem
from gplan.partition.solve import solve
from gplan.simulation.simulator import simulate
from gplan.strategy_search.planner import balance
from tests.made import make_profile
from tests.partition.problems import best_objective_s, problems


@settings(max_examples=25)
@given(problems(schedules=("1f1b-cap:1", "1f1b-cap:2")))
def test_the_plan_is_the_best_of_all(problem: Problem) -> None:
    solution, expected_s = solve(problem), best_objective_s(problem)
    assert (solution is None) == (expected_s is None)
    if solution is not None:
        assert solution.lower_bound_s == pytest.approx(expected_s)


def test_a_cap_saves_memory_and_costs_time() -> None:
    profile = make_profile([1.0] * 8, stash_bytes=100, weight_bytes=1)
    plans = [
        balance(profile, num_devices=4, num_microbatches=8, schedule=x)
        for x in ("1f1b", "1f1b-cap:4", "1f1b-cap:2", "1f1b-cap:1")
    ]
    assert plans[0].prediction == plans[1].prediction
    peaks, steps = [x.peak_bytes for x in plans[1:]], [x.prediction.step_s for x in plans[1:]]
    assert peaks == sorted(peaks, reverse=True) and peaks[0] > peaks[-1]
    assert steps == sorted(steps) and steps[0] < steps[-1]
    assert all(simulate(x).step_s == x.prediction.step_s and x.proof.is_proven for x in plans)
