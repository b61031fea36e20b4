"""Evidence of other work on the host."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from gplan.core import HostLoad
from gplan.core.host_load import interruption_text, largest_load
from gplan_profiler.host.host_load import (
    FixedWork,
    HostMeter,
    LoadReading,
    load_between,
    read_load,
    thread_times,
    waited_for_others_s,
)
from gplan_profiler.timing.clock import Samples


def stat_file(folder: Path, text: str) -> Path:
    path = folder / "stat"
    path.write_text(text)
    return path


def test_steal_is_a_share_of_all_ticks(tmp_path: Path) -> None:
    before = read_load(stat_file(tmp_path, "cpu  100 0 0 100 0 0 0 10 50 0\ncpu0 1 1\n"))
    after = read_load(stat_file(tmp_path, "cpu  150 0 0 140 0 0 0 20 90 0\ncpu0 1 1\n"))
    assert load_between(before, after).steal_share == pytest.approx(0.1)


@pytest.mark.parametrize("text", ["", "cpu\n", "cpu 1 2 3\n", "no figures here\n"])
def test_a_system_that_reports_nothing_gives_no_evidence(tmp_path: Path, text: str) -> None:
    reading = read_load(stat_file(tmp_path, text))
    assert load_between(reading, reading).steal_share == 0.0
    assert read_load(tmp_path / "missing").total == 0


def test_waiting_is_a_share_of_the_time() -> None:
    before = LoadReading(at_s=0.0, stolen=0, total=0, threads={"main": (1.0, 1.0)})
    after = LoadReading(at_s=10.0, stolen=0, total=0, threads={"main": (8.0, 3.0)})
    load = load_between(before, after)
    assert load == HostLoad(wait_share=0.2)
    assert load.is_evidence and "20.0 % of the time waiting for a core" in interruption_text(load)


def test_no_blame_without_evidence() -> None:
    assert "interrupted by an unknown cause" in interruption_text(HostLoad(steal_share=0.002, wait_share=0.003))


def test_loads_of_several_ranks() -> None:
    loads = [HostLoad(steal_share=0.1), HostLoad(wait_share=0.2)]
    assert largest_load(loads) == HostLoad(steal_share=0.1, wait_share=0.2)


@pytest.mark.parametrize(
    ("ran_s", "ready_s", "expected_s"),
    [
        ({"main": 2.0}, {"main": 0.0}, 0.0),
        ({"main": 2.0}, {"main": 3.0}, 3.0),  # nobody else in this process ran
        ({"main": 2.0, "helper": 3.0}, {"main": 3.0, "helper": 0.0}, 0.0),  # the helper had the core
        ({"main": 2.0, "helper": 1.0}, {"main": 3.0, "helper": 0.0}, 2.0),
        ({"main": 2.0, "helper": 1.0}, {"main": 0.5, "helper": 7.0}, 5.0),
        ({}, {}, 0.0),
    ],
)
def test_waiting_for_own_threads(ran_s: dict[str, float], ready_s: dict[str, float], expected_s: float) -> None:
    before = dict.fromkeys(ran_s, (10.0, 20.0)) | {"ended": (1.0, 1.0)}
    after = {name: (10.0 + ran_s[name], 20.0 + ready_s[name]) for name in ran_s} | {"begun": (9.0, 9.0)}
    assert waited_for_others_s(before, after) == expected_s


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how long threads waited")
def test_the_system_tells_how_long_this_thread_ran() -> None:
    before = thread_times()
    sum(range(2_000_000))
    name = str(os.getpid())
    assert thread_times()[name][0] > before[name][0] > 0


def test_the_yardstick_takes_its_share_of_the_time() -> None:
    samples, now_s = Samples(), [0.0]

    def now() -> float:
        now_s[0] += 0.01  # so a reading takes that long
        return now_s[0]

    meter = HostMeter(samples, share=0.01, now=now)
    for seconds, num_read in ((0.0, 1), (0.5, 1), (0.6, 2), (0.5, 2), (0.6, 3)):
        now_s[0] += seconds
        meter.read_if_due()
        assert len(samples.clean_s) + len(samples.refused_s) == num_read
    samples.clean_s[:] = [2e-3, 4e-3, 6e-3]
    found = meter.load().yardstick
    assert found is not None and found.median_s == 2e-3  # of one of two repetitions


def test_a_reading_draws_no_random_numbers_and_changes_no_setting() -> None:
    state, is_on = torch.random.get_rng_state(), torch.is_grad_enabled()
    HostMeter().read_if_due()
    assert torch.equal(torch.random.get_rng_state(), state) and torch.is_grad_enabled() == is_on
    with torch.no_grad(), torch.autocast("cpu"):
        FixedWork()()


def test_the_host_of_a_gpu_has_no_yardstick() -> None:
    meter = HostMeter(device="cuda")
    meter.read_if_due()
    assert meter.load().yardstick is None
