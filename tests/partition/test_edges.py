"""Problems at the edge, under every schedule, against brute force: what fits to the byte, what weighs nothing,
what is huge."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gplan.core import Profile
from gplan.core.errors import NoPlanError
from gplan.partition.batch_simulation import goal_s
from gplan.partition.diagnosis import no_plan_error
from gplan.partition.plan_evaluation import objective_s, stages_of
from gplan.partition.problem import Problem
from gplan.partition.solve import solve
from gplan.schedules.registry import num_stages_of, schedule_info
from tests.partition.problems import (
    ALL_BOUNDARIES,
    SHARED,
    all_cuts,
    best_objective_s,
    in_halves,
    make_problem,
    peak_bytes,
)

NUM_LAYERS = 8
EVERY = (*ALL_BOUNDARIES, *(x for x in SHARED if not schedule_info(x).num_devices))
FORWARDS_S = {
    "all equal": [4] * NUM_LAYERS,
    "one giant layer": [1, 1, 1, 900, 1, 1, 1, 1],
    "nothing but one layer": [0, 0, 0, 0, 0, 8, 0, 0],
    "nothing at both ends": [0, 0, 4, 4, 4, 4, 0, 0],
}
BYTES = {
    "all equal": {"stash_bytes": 16, "weight_bytes": 8},
    "one giant layer": {"weight_bytes": [1, 1, 900, 1, 1, 1, 1, 1]},
    "huge activations at one cut": {"output_bytes": [1, 1, 1, 4000, 1, 1, 1, 1], "stash_bytes": 3},
    "nothing but outputs": {"output_bytes": 5},
}


def edge(schedule: str, forwards: str, held: str, *, num_devices: int, recompute: str = "never") -> Problem:
    problem = make_problem(
        FORWARDS_S[forwards], num_stages=num_stages_of(schedule, num_devices), schedule=schedule,
        recompute=recompute, minimize="step-time", **BYTES[held],
    )  # fmt: skip
    profile: Profile = in_halves(problem.costs.profile)
    return replace(problem, costs=replace(problem.costs, profile=profile))


def peaks(problem: Problem) -> list[int]:
    """Of every partition, rising."""
    return sorted(peak_bytes(problem, stages_of(problem, cuts)) for cuts in all_cuts(problem))


def assert_best(problem: Problem) -> None:
    solution, best_s = solve(problem), best_objective_s(problem)
    assert solution is not None
    assert goal_s(problem, solution.stages) == pytest.approx(best_s, rel=1e-9)
    assert solution.lower_bound_s <= best_s * (1 + 1e-9)  # type: ignore[operator]


@pytest.mark.parametrize("schedule", EVERY)
@pytest.mark.parametrize("held", BYTES)
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_memory_exactly_at_the_least_peak_is_enough_and_one_byte_less_is_not(
    schedule: str, held: str, recompute: str
) -> None:
    problem = edge(schedule, "all equal", held, num_devices=2, recompute=recompute)
    least = peaks(problem)[0]
    assert_best(replace(problem, memory_bytes=least))
    too_small = replace(problem, memory_bytes=least - 1)
    assert solve(too_small) is None
    error = no_plan_error(too_small)
    assert isinstance(error, NoPlanError)
    assert f"--memory {least}B" in str(error)


@pytest.mark.parametrize("schedule", EVERY)
@pytest.mark.parametrize("forwards", FORWARDS_S)
def test_times_at_the_edge_have_the_plan_of_brute_force(schedule: str, forwards: str) -> None:
    problem = edge(schedule, forwards, "all equal", num_devices=2)
    assert_best(problem)
    assert_best(replace(problem, memory_bytes=peaks(problem)[1]))


@pytest.mark.parametrize("schedule", EVERY)
def test_one_device_has_everything_and_as_many_as_there_are_layers_for_have_one_each(schedule: str) -> None:
    most = NUM_LAYERS // schedule_info(schedule).num_chunks
    for num_devices in (1, most):
        problem = edge(schedule, "one giant layer", "one giant layer", num_devices=num_devices)
        assert_best(replace(problem, memory_bytes=peaks(problem)[0]))
        assert solve(replace(problem, memory_bytes=peaks(problem)[0] - 1)) is None


@pytest.mark.parametrize("schedule", EVERY)
def test_bounds_hold_where_the_objective_is_the_largest_load(schedule: str) -> None:
    problem = replace(edge(schedule, "nothing but one layer", "all equal", num_devices=2), minimize="max-stage")
    solution = solve(problem)
    assert solution is not None
    least_s = min(objective_s(problem, stages_of(problem, cuts)) for cuts in all_cuts(problem))
    assert goal_s(problem, solution.stages) == least_s == solution.lower_bound_s
