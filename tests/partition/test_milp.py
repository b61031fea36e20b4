"""The integer program on chains: an independent check of the other solvers, honest about its time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from gplan.core import Link, LinkPoint, MachineDevice, SharedWeight
from gplan.core.errors import NoPlanError, UsageError
from gplan.partition.batch_simulation import goal_s
from gplan.partition.milp import smallest_by_milp
from gplan.partition.plan_evaluation import objective_s, stages_of
from gplan.partition.problem import Problem, Solution
from tests.partition.graphs import OBJECTIVES, every_partition
from tests.partition.problems import EVERY, best_objective_s, make_problem, peak_bytes, problems

UNEVEN = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]
MANY = [1 + 7 * i % 13 for i in range(40)]


@settings(max_examples=100, deadline=None)
@given(problems(max_layers=6, max_stages=4, minimize=["step-time", "max-stage"], schedules=EVERY))
def test_equals_brute_force(problem: Problem) -> None:
    best_s, found = best_objective_s(problem), smallest_by_milp(problem)
    if best_s is None:
        assert found is None
        return
    assert found is not None
    stages = stages_of(problem, found.cuts)
    assert objective_s(problem, stages) == pytest.approx(best_s, rel=1e-6)
    assert found.lower_bound_s == objective_s(problem, stages)
    assert problem.memory_bytes is None or peak_bytes(problem, stages) <= problem.memory_bytes
    assert found.solver == "milp/HiGHS"


def test_a_shared_weight_is_held_by_every_stage_that_uses_it() -> None:
    shared = SharedWeight(name="tied", layers=(0, 3), num_parameters=25, weight_bytes=1000, gradient_bytes=0)
    needed = 1000 + 40 + 40 + 80  # the tied one, then weights, gradients and optimizer states of two layers
    problem = make_problem([1] * 4, num_stages=2, weight_bytes=20, shared_weights=(shared,), memory_bytes=needed - 1)
    assert smallest_by_milp(problem) is None
    assert smallest_by_milp(replace(problem, memory_bytes=needed)) is not None


@pytest.mark.parametrize("excess_bytes", [-1, 0])
def test_replicas_average_in_one_bucket(excess_bytes: int) -> None:
    """Two layers of 20 MiB each: beside weights, gradients and states, twice as many, 25 MiB for a copy."""
    problem = make_problem([1] * 4, num_stages=2, weight_bytes=20 * 2**20)
    problem = replace(problem, costs=replace(problem.costs, num_replicas=2), memory_bytes=185 * 2**20 + excess_bytes)
    assert (smallest_by_milp(problem) is not None) == (excess_bytes == 0)


@pytest.mark.parametrize("memory_bytes", [400 * 10**9, 400 * 10**9 - 1])
def test_a_plan_that_is_one_byte_too_large_does_not_pass_by_tolerance(memory_bytes: int) -> None:
    problem = make_problem([1] * 4, num_stages=2, num_microbatches=2, stash_bytes=10**11, memory_bytes=memory_bytes)
    assert (smallest_by_milp(problem) is not None) == (memory_bytes == 400 * 10**9)


def test_more_stages_than_layers_are_impossible() -> None:
    assert smallest_by_milp(make_problem([1, 1], num_stages=3)) is None


def test_a_slow_device_gets_less_to_do() -> None:
    places = (MachineDevice(name="fast", host="h", speed=3.0), MachineDevice(name="slow", host="h"))
    found = smallest_by_milp(replace(make_problem([1] * 4, num_stages=2), machine_devices=places))
    assert found is not None
    assert found.stages == ((0, 1, 2), (3,))


def test_a_measured_link_is_priced_point_by_point() -> None:
    points = (LinkPoint(num_bytes=10, seconds=1.0), LinkPoint(num_bytes=20, seconds=90.0))
    link = Link(latency_s=0.0, bytes_per_s=1e9, points=points)
    found = smallest_by_milp(make_problem([1] * 4, num_stages=2, output_bytes=[15, 20, 10, 0], link=link))
    assert found is not None
    assert found.cuts == (3,)
    assert found.lower_bound_s == 9 + 1  # three layers and a gradient that comes back


@pytest.mark.parametrize("minimize", OBJECTIVES)
@pytest.mark.parametrize("solver", ["HiGHS", "CBC"])
def test_both_solvers_find_the_best_of_ten_layers(minimize: str, solver: str) -> None:
    link = Link(latency_s=0.5, bytes_per_s=4.0)
    problem = make_problem(UNEVEN[:10], num_stages=3, minimize=minimize, output_bytes=4, stash_bytes=9, link=link)
    found = smallest_by_milp(problem, solver=solver)
    assert found is not None
    best_s = min(goal_s(problem, stages) for stages in every_partition(problem))
    assert goal_s(problem, found.stages) == pytest.approx(best_s)
    assert found.lower_bound_s == goal_s(problem, found.stages)
    assert (found.solver, found.notes) == (f"milp/{solver}", ())


def test_cbc_finds_out_that_nothing_fits() -> None:
    problem = make_problem([1] * 4, num_stages=2, stash_bytes=100, memory_bytes=399, num_microbatches=2)
    assert smallest_by_milp(problem, solver="CBC") is None


@pytest.mark.parametrize("solver", ["HiGHS", "CBC"])
def test_the_best_plan_as_a_start_stays_the_best(solver: str) -> None:
    problem = make_problem(UNEVEN, num_stages=4, schedule="1f1b", minimize="step-time")
    best = smallest_by_milp(problem)
    assert best is not None
    again = smallest_by_milp(problem, start=best, solver=solver)
    assert again is not None
    assert again.lower_bound_s == pytest.approx(best.lower_bound_s)


@pytest.mark.parametrize("solver", ["HiGHS", "CBC"])
def test_without_time_the_start_is_the_answer(solver: str) -> None:
    problem = make_problem(MANY, num_stages=8, num_microbatches=16, schedule="1f1b", minimize="step-time")
    stages = tuple(tuple(range(5 * k, 5 * k + 5)) for k in range(8))
    start = Solution(stages=stages, lower_bound_s=0.0, solver="by hand")
    found = smallest_by_milp(problem, start=start, solver=solver, time_limit_s=0.01)
    assert found is not None
    assert goal_s(problem, found.stages) <= goal_s(problem, stages)
    assert 0 < found.lower_bound_s < goal_s(problem, found.stages)
    assert found.notes == ("the MILP was stopped after 10.0 ms",)


def test_no_plan_in_time_is_not_called_impossible() -> None:
    problem = make_problem(MANY, num_stages=8, num_microbatches=16, schedule="1f1b", minimize="step-time")
    with pytest.raises(NoPlanError, match="in 10.0 ms the MILP found no plan, nor that there is none"):
        smallest_by_milp(problem, time_limit_s=0.01)


@pytest.mark.parametrize("time_limit_s", [0.0, -1.0, float("nan")])
def test_a_time_limit_of_nothing_is_refused(time_limit_s: float) -> None:
    with pytest.raises(UsageError, match="expected more than 0"):
        smallest_by_milp(make_problem([1, 1], num_stages=2), time_limit_s=time_limit_s)


def test_layers_to_recompute_are_not_chosen() -> None:
    with pytest.raises(UsageError, match="expected recompute never, always or except-last"):
        smallest_by_milp(make_problem([1, 1], num_stages=2, recompute="selected"))
