"""Clocks and samples on a CPU and a GPU."""

from __future__ import annotations

import time

import numpy as np
import pytest

from gplan_profiler.timing.clock import Clock, CpuClock, CudaClock, Samples, is_undisturbed


class Stream:
    """A GPU's queue and its host, both only on paper: kernels run in order, each not before it was launched."""

    def __init__(self) -> None:
        self.host_s = 0.0
        self.free_s = 0.0  # when the last kernel ends
        self.waits = 0

    def run(self, *, launch_s: float, kernel_s: float) -> str:
        self.host_s += launch_s
        self.free_s = max(self.free_s, self.host_s) + kernel_s
        return "result"

    def synchronize(self) -> None:
        self.host_s = max(self.host_s, self.free_s)
        self.waits += 1


class Event:
    """A moment on the paper stream, in the milliseconds that torch gives."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self.at_s = stream, -1.0

    def record(self) -> None:
        self.at_s = max(self._stream.host_s, self._stream.free_s)

    def elapsed_time(self, end_event: Event, /) -> float:
        assert self._stream.waits, "read before the device was waited for"
        return 1e3 * (end_event.at_s - self.at_s)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    stream = Stream()
    monkeypatch.setattr("gplan_profiler.timing.clock.time.perf_counter", lambda: stream.host_s)
    monkeypatch.setattr("torch.cuda.Event", lambda *, enable_timing: Event(stream))
    monkeypatch.setattr("torch.cuda.synchronize", stream.synchronize)
    return stream


def test_gpu_sample_is_kernel_time(stream: Stream) -> None:
    clock, first, second = CudaClock(), Samples(), Samples()
    clock.time(first, lambda: stream.run(launch_s=1e-5, kernel_s=0.25))
    assert clock.time(second, lambda: stream.run(launch_s=0.125, kernel_s=0.5)) == "result"
    clock.flush()
    assert first.clean_s == pytest.approx([0.25 + 1e-5])  # an idle GPU waits for the first launch
    assert second.clean_s == pytest.approx([0.5])
    assert second.launch_s == pytest.approx([0.125])
    assert not second.is_launch_bound


def test_a_round_of_many_samples_waits_for_the_gpu_once(stream: Stream) -> None:
    clock, samples = CudaClock(), [Samples() for _ in range(5)]
    for part in samples:
        clock.time(part, lambda: stream.run(launch_s=1e-5, kernel_s=0.1))
    assert (stream.waits, [len(x.clean_s) for x in samples]) == (0, [0] * 5)
    clock.flush()
    clock.flush()
    assert (stream.waits, [len(x.clean_s) for x in samples]) == (1, [1] * 5)


def test_launch_bound_layer(stream: Stream) -> None:
    clock, small = CudaClock(), Samples()
    for _ in range(3):
        clock.time(small, lambda: stream.run(launch_s=1e-3, kernel_s=1e-5))
    clock.flush()
    assert small.is_launch_bound
    assert small.timing().median_s == pytest.approx(1e-3, rel=0.02)
    assert small.launch_s == pytest.approx([1e-3] * 3)


def test_work_that_fails_on_a_gpu_leaves_no_sample(stream: Stream) -> None:
    clock, samples = CudaClock(), Samples()
    with pytest.raises(ZeroDivisionError):
        clock.time(samples, lambda: 1 // 0)
    clock.flush()
    assert samples == Samples()


def test_cpu_sample_is_refused_after_waiting() -> None:
    clock, idle, busy = CpuClock(), Samples(), Samples()
    clock.time(idle, time.sleep, 0.005)
    assert clock.time(busy, sum, [1, 2]) == 3
    assert [len(idle.clean_s), len(idle.refused_s)] == [0, 1]
    assert len(busy.clean_s) + len(busy.refused_s) == 1
    assert not busy.is_launch_bound


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


def test_both_clocks_time_the_same_way(stream: Stream) -> None:
    clocks: list[Clock] = [CpuClock(), CudaClock()]
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
