"""Bounds of chains by single stages and by counts of layers, against every partition."""

from __future__ import annotations

from dataclasses import replace
from itertools import product, takewhile

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from gplan.core import ActionKind, RecomputeMode, StageBytes
from gplan.cost.memory_moments import peak_of, stage_moments
from gplan.partition import chain_bounds, device_bounds
from gplan.partition.chain_bounds import ChainBounds, ChainStages, least_moments
from gplan.partition.device_bounds import DeviceBounds
from gplan.partition.plan_evaluation import goal_s
from gplan.partition.problem import Problem
from gplan.partition.solve import solve
from gplan.partition.validation import why_not_selected
from gplan.schedules.in_flight import chunk_warmup
from gplan.schedules.registry import make_schedule, stage_devices
from tests.partition.problems import ALL_BOUNDARIES, EVERY, SHARED, best_objective_s, make_problem, problems

INFINITY = float("inf")


@settings(max_examples=80, deadline=None)
@given(problems(minimize=["step-time"], schedules=ALL_BOUNDARIES))
def test_no_partition_is_below_the_bound_of_its_stages(problem: Problem) -> None:
    best_s = best_objective_s(problem)
    _assert_below(problem, INFINITY if best_s is None else best_s)


@settings(max_examples=60, deadline=None)
@given(problems(minimize=["step-time"], schedules=ALL_BOUNDARIES), st.integers(40, 160))
def test_no_selection_of_layers_is_below_the_bound(problem: Problem, memory_bytes: int) -> None:
    if why_not_selected(problem.schedule):
        return
    problem = replace(problem, recompute="selected", memory_bytes=memory_bytes)
    best = solve(problem)
    best_s = INFINITY if best is None else goal_s(problem, best.stages)
    _assert_below(problem, best_s)


def _assert_below(problem: Problem, best_s: float) -> None:
    """Also where it is only asked whether steps up to some limit are too short, so that long stages are left out."""
    stages = ChainStages(problem.costs)
    every = [ChainBounds(problem, stages, share * best_s) for share in (INFINITY, 0.5, 0.9, 1.0, 1.3)]
    for bounds in every:
        assert bounds.quick_s <= bounds.step_s <= best_s
        assert bounds.step_s >= min(bounds.enough_s, every[0].step_s) * (1 - 2e-3)  # the bisection's precision


def test_settings_that_do_not_fit_need_no_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """The paths through an order took most of the time of searches with hundreds of settings."""

    def order_paths(*_: object, **__: object) -> None:
        raise AssertionError

    problem = make_problem([1] * 6, stash_bytes=4, weight_bytes=1, num_stages=3, schedule="zb-h1")
    stages = ChainStages(problem.costs)
    monkeypatch.setattr(chain_bounds, "order_paths", order_paths)
    for recompute in ("never", "always", "except-last", "selected"):
        assert ChainBounds(replace(problem, recompute=recompute, memory_bytes=3), stages).step_s == INFINITY


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problem=problems(minimize=["step-time"], schedules=EVERY))
def test_no_partition_is_below_the_bounds_by_counts(monkeypatch: pytest.MonkeyPatch, problem: Problem) -> None:
    monkeypatch.setattr(device_bounds, "_LEAST_ALIKE", 1)
    if DeviceBounds.apply_to(problem):
        best_s = best_objective_s(problem)
        bounds = DeviceBounds(problem)
        assert max(bounds.quick_s, bounds.step_s) <= (INFINITY if best_s is None else best_s)
        assert best_s is None or bounds.holds_all


@pytest.mark.parametrize("recompute", ["never", "always", "except-last"])
@pytest.mark.parametrize("schedule", ALL_BOUNDARIES)
def test_least_moments_are_no_more_than_the_order_s(schedule: str, recompute: RecomputeMode) -> None:
    names = StageBytes.__struct_fields__
    numbers, signs = (np.random.default_rng(x).integers(0, high, (len(names), 300)) for x, high in ((0, 50), (1, 2)))
    parts = StageBytes(**dict(zip(names, numbers * signs, strict=True)))
    parts = structs.replace(parts, pending=parts.pending - numbers[0] % (parts.stash + 1))
    for num_devices, num_microbatches in product(range(1, 5), range(1, 8)):
        for stage in range(num_devices):
            least = least_moments(
                schedule, num_devices=num_devices, num_microbatches=num_microbatches, stage=stage, recompute=recompute
            )
            found = stage_moments(
                schedule, num_devices=num_devices, num_microbatches=num_microbatches, stage=stage, recompute=recompute
            )
            assert least is not None
            assert (peak_of(least, parts) <= peak_of(found, parts)).all()


def test_counts_are_whole_numbers() -> None:
    """Nine equal layers on four devices: one has three of them, and its step is no shorter than theirs."""
    problem = make_problem([1.0] * 11, num_stages=8, num_microbatches=16, schedule="interleaved-1f1b:2")
    assert DeviceBounds.apply_to(problem)
    assert 16 * 3 * 3.0 <= DeviceBounds(problem).step_s < 16 * 3 * 3.0 + 9.0


def test_devices_that_cannot_hold_all_layers() -> None:
    problem = make_problem(
        [1.0] * 12, num_stages=8, num_microbatches=8, schedule=SHARED[0], weight_bytes=10, memory_bytes=79
    )
    assert DeviceBounds(problem).step_s == INFINITY  # a layer takes 40 bytes, with gradients and state


@pytest.mark.parametrize(("memory_bytes", "is_enough"), [(137, False), (140, True)])
def test_devices_that_cannot_hold_the_workspace_of_a_layer(memory_bytes: int, is_enough: bool) -> None:
    """Three layers of 40 bytes and the 20 bytes in which one works; the bound leaves a byte a stage for rounding."""
    problem = make_problem(
        [1.0] * 12,
        num_stages=8,
        num_microbatches=8,
        schedule=SHARED[0],
        weight_bytes=10,
        workspace_bytes=20,
        memory_bytes=memory_bytes,
    )
    assert (DeviceBounds(problem).step_s < INFINITY) is is_enough


def test_more_ways_than_are_listed_give_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_bounds, "_MOST_WAYS", 1)
    problem = make_problem([1.0] * 12, num_stages=8, num_microbatches=8, schedule=SHARED[0])
    assert DeviceBounds(problem).step_s == 0.0


@pytest.mark.parametrize("num_devices", [1, 3])
@pytest.mark.parametrize("schedule", EVERY[:-1])
def test_stages_are_where_the_order_has_them(schedule: str, num_devices: int) -> None:
    made = make_schedule(schedule, num_devices=num_devices, num_microbatches=3)
    assert stage_devices(schedule, num_devices=num_devices) == made.devices


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SHARED[:4]), st.integers(1, 4), st.integers(1, 11), st.data())
def test_warmup_of_chunks_is_the_order_s(
    schedule: str, num_devices: int, num_microbatches: int, data: st.DataObject
) -> None:
    device = data.draw(st.integers(0, num_devices - 1))
    made = make_schedule(schedule, num_devices=num_devices, num_microbatches=num_microbatches)
    forwards = [*takewhile(lambda x: x.kind is ActionKind.FORWARD, made.orders[device])]
    counts = tuple(sum(x.stage == stage for x in forwards) for stage in made.stages_of(device))
    where = {"num_devices": num_devices, "num_microbatches": num_microbatches, "device": device}
    assert chunk_warmup(schedule, **where) == counts
