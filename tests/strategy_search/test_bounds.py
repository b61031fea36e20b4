"""Closed-form bounds against brute force: no step is shorter, and no plan needs less memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gplan.core import Constraints, Link, LinkPoint
from gplan.core.errors import UsageError
from gplan.cost.memory_moments import device_moments
from gplan.cost.part_table import PARTS
from gplan.partition.batch_simulation import goal_s
from gplan.partition.diagnosis import is_feasible
from gplan.partition.problem import Problem
from gplan.partition.solve import solve, with_down_sets
from gplan.partition.validation import why_not_selected
from gplan.schedules.registry import make_schedule
from gplan.strategy_search.bounds import SettingBounds, least_in_flight
from gplan.strategy_search.space import AUTO_SCHEDULES
from tests.partition.graphs import best_goal_s, graph_problems
from tests.partition.problems import EVERY, best_objective_s, make_problem, problems


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(problems(minimize=["step-time"], schedules=EVERY))
def test_bound(problem: Problem) -> None:
    problem = replace(problem, memory_bytes=None)
    best_s = best_objective_s(problem)
    assert best_s is not None
    assert SettingBounds(problem).step_s <= best_s


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(graph_problems(max_layers=5, max_stages=4, minimize=["step-time"], schedules=EVERY))
def test_graph_bound(problem: Problem) -> None:
    problem = with_down_sets(replace(problem, memory_bytes=None, machine_devices=(), links=()))
    best_s = best_goal_s(problem)
    assert best_s is None or SettingBounds(problem).step_s <= best_s


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    problems(minimize=["step-time"], schedules=EVERY),
    st.sampled_from(["never", "always", "except-last", "selected"]),
)
def test_memory_bound(problem: Problem, recompute: str) -> None:
    if recompute == "selected" and why_not_selected(problem.schedule):
        return
    problem = replace(problem, memory_bytes=problem.memory_bytes or 60, recompute=recompute)
    assert not (SettingBounds(problem).exceeds_memory(problem.memory_bytes or 0) and is_feasible(problem))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    problems(minimize=["step-time"], schedules=EVERY), st.sampled_from(["never", "always", "except-last", "selected"])
)
def test_bound_within_memory(problem: Problem, recompute: str) -> None:
    if recompute == "selected" and why_not_selected(problem.schedule):
        return
    problem = replace(problem, memory_bytes=problem.memory_bytes or 60, recompute=recompute)
    found = solve(problem)
    bound_s = SettingBounds(problem).within_s(problem.memory_bytes or 0)
    assert found is None or bound_s <= goal_s(problem, found.stages) * (1 + 1e-9)


@pytest.mark.parametrize("name", AUTO_SCHEDULES)
def test_each_device_has_at_least_so_many_micro_batches_in_flight(name: str) -> None:
    for num_devices, num_microbatches in product(range(1, 7), range(1, 14)):
        try:
            made = make_schedule(name, num_devices=num_devices, num_microbatches=num_microbatches)
        except UsageError:  # interleaved 1F1B needs a multiple of K
            continue
        most = []
        for device in range(num_devices):
            counts = device_moments(made, device, recompute="never").counts
            whole = counts[(counts[:, :, PARTS.index("pending")] == 0).all(axis=1)]
            most.append(int(whole[:, :, PARTS.index("stash")].min(axis=1).max()))
        least = least_in_flight(name, num_devices, num_microbatches)
        assert least is not None
        assert (np.sort(most) >= least).all()


def test_memory_bound_counts_what_is_received_and_in_flight() -> None:
    problem = make_problem([1.0, 1.0], output_bytes=[4, 0], num_stages=2, num_microbatches=8, schedule="gpipe")
    fits = [x for x in range(1, 200) if is_feasible(replace(problem, memory_bytes=x))]
    bounds = SettingBounds(problem)
    assert not bounds.exceeds_memory(fits[0])
    assert bounds.exceeds_memory(8 * 4 // 2 - 1), "8 activations of 4 bytes on two devices"


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(graph_problems(max_layers=5, max_stages=4, minimize=["max-stage"]), st.integers(1, 80))
def test_graph_memory_bound(problem: Problem, memory_bytes: int) -> None:
    """What passes stages is held once, and activations may be sent out of where they were received."""
    problem = replace(problem, memory_bytes=memory_bytes, machine_devices=(), links=(), constraints=Constraints())
    assert not SettingBounds(with_down_sets(problem)).exceeds_memory(memory_bytes) or best_goal_s(problem) is None


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager-1f1b"])
def test_equal_stages_give_the_closed_form(schedule: str) -> None:
    problem = make_problem([1.0] * 8, num_stages=4, num_microbatches=16, schedule=schedule, minimize="step-time")
    step_s = (16 + 3) * 6.0
    assert SettingBounds(problem).estimate_s == pytest.approx(step_s)
    assert 0.9 * step_s < SettingBounds(problem).step_s <= step_s * (1 + 1e-9)


def test_chunks_are_guessed_to_wait_that_much_less() -> None:
    problem = make_problem(
        [1.0] * 8, num_stages=8, num_microbatches=16, schedule="interleaved-1f1b:2", minimize="step-time"
    )
    least = SettingBounds(problem)
    assert problem.num_devices == 4
    assert least.estimate_s == pytest.approx((16 + 3 / 2) * 6.0)
    assert least.step_s == pytest.approx(16 * 6.0 + 3 * 3.0)  # the last device waits for three layers


def test_bound_of_one_device_is_exact() -> None:
    problem = make_problem([1.0, 2.0], num_stages=1, num_microbatches=4, optimizer_s=5.0, weight_bytes=8)
    assert SettingBounds(problem).step_s == pytest.approx(4 * 9.0 + 5.0)


def test_min_s_per_byte() -> None:
    points = (LinkPoint(num_bytes=10, seconds=1.0), LinkPoint(num_bytes=100, seconds=2.0))
    link = Link(latency_s=0.0, bytes_per_s=25.0, points=points)
    assert link.least_s_per_byte == 0.02
