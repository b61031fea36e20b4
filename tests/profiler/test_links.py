"""Links: the fit, refused samples, one real measurement, and gloo's threads."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from gplan_profiler.host.links import (
    COLLECTIVE_BYTES,
    MESSAGE_BYTES,
    GroupTimer,
    connection_threads,
    deprioritize_connection_threads,
    fit_link,
    measure_link,
    not_falling,
    pair_times,
)
from tests.runtime.forked import forking

KIB, MIB = 2**10, 2**20


def test_measure_link() -> None:
    with forking():
        link = measure_link()
    assert (link.origin, tuple(point.num_bytes for point in link.points)) == ("measured", MESSAGE_BYTES)
    assert (MESSAGE_BYTES[0], MESSAGE_BYTES[-1]) == (KIB, 64 * MIB)
    assert 0 < link.points[0].seconds < link.points[-1].seconds
    assert link.latency_s <= link.points[0].seconds
    (reduced,) = link.collectives
    assert (reduced.kind, reduced.num_devices) == ("all_reduce", 2)
    assert [2 * x.num_bytes for x in reduced.message.points] == list(COLLECTIVE_BYTES)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_of_this_host_are_measured() -> None:
    link = measure_link(device_kind="cuda")
    assert len(link.points) == len(MESSAGE_BYTES)
    assert link.bytes_per_s > 1e9


def test_times_on_a_line_give_back_its_latency_and_bandwidth() -> None:
    link = fit_link(MESSAGE_BYTES, [5e-6 + n / 2e9 for n in MESSAGE_BYTES])
    assert (link.latency_s, link.bytes_per_s) == (pytest.approx(5e-6), pytest.approx(2e9))
    assert link.transfer_s(3 * MIB) == pytest.approx(5e-6 + 3 * MIB / 2e9)
    assert link.transfer_s(640 * MIB) == pytest.approx(5e-6 + 640 * MIB / 2e9)


def test_the_bandwidth_is_that_of_the_large_messages() -> None:
    slow_start = [n / 1e8 if n < MIB else MIB / 1e8 + (n - MIB) / 4e9 for n in MESSAGE_BYTES]
    link = fit_link(MESSAGE_BYTES, slow_start)
    assert link.bytes_per_s == pytest.approx(4e9)
    assert [link.transfer_s(n) for n in MESSAGE_BYTES] == pytest.approx(slow_start)


def test_slow_size_is_pooled() -> None:
    link = fit_link([1, 2, 4, 8], [1.0, 9.0, 2.0, 4.0])
    assert [point.seconds for point in link.points] == [1.0, 4.0, 4.0, 4.0]


def test_bandwidth_without_rising_times() -> None:
    link = fit_link([100, 200, 400], [3.0, 2.0, 1.0])
    assert (link.bytes_per_s, link.transfer_s(400)) == (200.0, 2.0)
    assert link.transfer_s(800) == pytest.approx(4.0)


class TimerInPhases:
    """A timer of a link of 1 GB/s whose host is ten times slower while it times the actions `slow`."""

    device, num_ranks = torch.device("cpu"), 2

    def __init__(self, slow: range) -> None:
        self.slow, self.num_timed = slow, 0

    def median_s(self, action: Callable[[], object], *, budget_s: float, expected_s: float) -> float:
        size = MESSAGE_BYTES[self.num_timed % len(MESSAGE_BYTES)]
        self.num_timed += 1
        return 2e-9 * size * (10.0 if self.num_timed - 1 in self.slow else 1.0)


@pytest.mark.parametrize("slow", [range(0), range(2, 7), range(9, 18)])
def test_a_slow_phase_spoils_no_size(slow: range) -> None:
    times = pair_times(cast(GroupTimer, TimerInPhases(slow)), budget_s=100.0)
    assert times == [(size, pytest.approx(1e-9 * size)) for size in MESSAGE_BYTES]


def test_what_takes_longer_than_its_share_has_one_turn() -> None:
    timer = TimerInPhases(range(0))
    pair_times(cast(GroupTimer, timer), budget_s=18 * 2e-9 * 4**12)
    assert timer.num_timed == 2 * len(MESSAGE_BYTES) - 1  # the largest is timed once


values = st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=12)


@given(values)
def test_pooled_values_are_monotonic(found: list[float]) -> None:
    pooled = not_falling(found)
    assert len(pooled) == len(found)
    assert all(low <= high for low, high in pairwise(pooled))
    assert min(found) <= pooled[0] and pooled[-1] <= max(found)


@given(values)
def test_values_that_rise_are_left_as_they_are(found: list[float]) -> None:
    assert not_falling(sorted(found)) == sorted(found)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=5))
def test_no_other_rising_values_are_nearer(found: list[int]) -> None:
    def distance(candidate: np.ndarray) -> float:
        return float(np.abs(candidate - np.array(found)).sum())

    grids = np.stack(np.meshgrid(*[np.arange(4)] * len(found), indexing="ij"), axis=-1).reshape(-1, len(found))
    best = min(distance(grid) for grid in grids if np.all(np.diff(grid) >= 0))
    assert distance(np.array(not_falling([float(x) for x in found]))) == pytest.approx(best)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads have no names here")
def test_gloos_threads_wait_and_the_work_stays_as_it_is() -> None:
    store, own, others = dist.HashStore(), os.sched_getscheduler(0), set(connection_threads())
    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(lambda rank: dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=30)), range(2)))
    new = set(connection_threads()) - others
    assert {os.sched_getscheduler(x) for x in new} == {os.SCHED_OTHER}
    deprioritize_connection_threads()
    assert {os.sched_getscheduler(x) for x in new} == {os.SCHED_BATCH}
    assert os.sched_getscheduler(0) == own
    del groups
