"""Clocks and samples on a CPU and a GPU."""

from __future__ import annotations

import time

import numpy as np
import pytest

from gplan_profiler.timing.clock import Clock, CpuClock, CudaClock, Samples, is_undisturbed
from tests.profiler.device_queue import DeviceQueue


def test_gpu_sample_is_kernel_time() -> None:
    queue, first, second = DeviceQueue(), Samples(), Samples()
    clock = CudaClock(queue)
    clock.time(first, lambda: queue.launch(host_s=1e-5, device_s=0.25))
    clock.time(second, lambda: queue.launch(host_s=0.125, device_s=0.5))
    assert clock.time(second, abs, -2) == 2
    clock.flush()
    assert first.clean_s == pytest.approx([0.25 + 1e-5])  # an idle GPU waits for the first launch
    assert second.clean_s == pytest.approx([0.5, 0.0])
    assert second.host_s == pytest.approx([0.125, 0.0])
    assert not second.is_host_bound


def test_samples_wait_for_the_gpu_at_a_flush_only() -> None:
    queue, samples = DeviceQueue(), [Samples() for _ in range(5)]
    clock = CudaClock(queue)
    for part in samples:
        clock.time(part, lambda: queue.launch(host_s=1e-5, device_s=0.1))
    assert (queue.host_s, [len(x.clean_s) for x in samples]) == (pytest.approx(5e-5), [0] * 5)
    clock.flush()
    clock.flush()
    assert (queue.host_s, [len(x.clean_s) for x in samples]) == (pytest.approx(0.5 + 1e-5), [1] * 5)


def test_work_that_fails_on_a_gpu_leaves_no_sample() -> None:
    clock, samples = CudaClock(DeviceQueue()), Samples()
    for time_it in (clock.time, clock.time_layer):
        with pytest.raises(ZeroDivisionError):
            time_it(samples, lambda: 1 // 0)
    clock.flush()
    assert samples == Samples()


def test_cpu_sample_is_refused_after_waiting() -> None:
    clock, idle, busy = CpuClock(), Samples(), Samples()
    clock.time(idle, time.sleep, 0.005)
    assert clock.time(busy, sum, [1, 2]) == 3
    assert [len(idle.clean_s), len(idle.refused_s)] == [0, 1]
    assert len(busy.clean_s) + len(busy.refused_s) == 1
    assert not busy.is_host_bound


@pytest.mark.parametrize(("clock", "seconds", "rounds"), [(CpuClock(), 0.0, 1), (CudaClock(), 0.5, 10)])
def test_each_clock_says_how_its_device_is_warmed_up(clock: Clock, seconds: float, rounds: int) -> None:
    assert (clock.warmup_s, clock.warmup_rounds) == (seconds, rounds)


@pytest.mark.parametrize(
    ("wall_s", "busy_s", "clean"),
    [(1.0, 0.96, True), (1.0, 0.94, False), (1e-3, 0.81e-3, True), (1e-3, 0.79e-3, False)],
)
def test_allowed_waiting_of_a_sample(wall_s: float, busy_s: float, clean: bool) -> None:
    assert is_undisturbed(wall_s, busy_s) is clean


def test_samples_settle_as_the_error_of_their_median_falls() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(1.0, 0.1, size=400).tolist()
    assert not Samples(clean_s=values[:20]).settled(0.01)
    assert Samples(clean_s=values).settled(0.01)
    assert not Samples(clean_s=values).settled(0.003)


def test_the_error_that_settled_looks_at_is_that_of_the_median() -> None:
    rng = np.random.default_rng(1)
    batches = rng.normal(1.0, 0.1, size=(2000, 100))
    true_error = float(np.std(np.median(batches, axis=1)))
    accepted = [Samples(clean_s=batch.tolist()).settled(true_error) for batch in batches]
    assert 0.3 < np.mean(accepted) < 0.7  # the estimate lies about the true error


@pytest.mark.parametrize("values", [[], [1.0] * 4])
def test_fewer_than_five_samples_are_not_settled(values: list[float]) -> None:
    assert not Samples(clean_s=values, refused_s=[1.0] * 9).settled(0.5)


@pytest.mark.parametrize(
    ("samples", "median_s", "num_samples", "num_refused"),
    [
        (Samples(), 0.0, 0, 0),
        (Samples(clean_s=[1.0, 2.0, 6.0], refused_s=[90.0]), 2.0, 3, 1),
        (Samples(clean_s=[3.0], refused_s=[1.0, 8.0, 9.0]), 2.0, 2, 3),
    ],
    ids=["never run", "clean", "nearly all refused"],
)
def test_timing_of_clean_and_refused_samples(
    samples: Samples, median_s: float, num_samples: int, num_refused: int
) -> None:
    timing = samples.timing()
    assert (timing.median_s, timing.num_samples, timing.num_refused) == (median_s, num_samples, num_refused)


def test_both_clocks_time_the_same_way() -> None:
    clocks: list[Clock] = [CpuClock(), CudaClock(DeviceQueue())]
    for clock in clocks:
        samples = Samples()
        assert clock.time(samples, abs, -2) == 2
        clock.flush()
        assert len(samples.clean_s) == 1


def test_samples_that_lost_their_core_count_with_their_processor_time() -> None:
    samples = Samples()
    for _ in range(5):
        samples.add(wall_s=2.0, busy_s=1.0)
    assert (samples.timing().median_s, samples.timing().num_refused) == (1.0, 5)
