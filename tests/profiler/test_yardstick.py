"""The yardstick: when it is read, and samples brought to one speed. No real times."""

from __future__ import annotations

import mmap
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gplan.core import HostSpeed, SpeedWindow, YardstickTimes
from gplan.core.host_speed import GPU_PASS_WEIGHTS, PASS_WEIGHTS
from profiler.analytic.layer_work import analyse
from profiler.timing.clock import CpuClock, CudaClock, Samples
from profiler.timing.yardstick import (
    _STREAMED_FLOATS,
    PAGES,
    PARTS,
    TINY_OPERATIONS,
    SpeedHistory,
    Yardstick,
    _ones_in_huge_pages,
    mean_of_samples,
    pass_weights,
    tiny_model,
    yardstick_parts,
)
from tests.profiler.test_clock import Event, Stream

USUAL_S = (6e-4, 3e-4, 1e-4)


class PaperClock(CpuClock):
    """Time passes only by the work that it times: each takes a millisecond."""

    warmup_s, warmup_rounds = 0.0, 0

    def __init__(self) -> None:
        self.now_s = 0.0

    def time(self, samples: Samples, work: Callable[..., Any], *args: Any) -> Any:
        self.now_s += 1e-3
        samples.add_clean(1e-3, self.now_s)
        return work(*args)


def test_yardstick_takes_at_most_its_share_of_the_time() -> None:
    clock, samples = PaperClock(), defaultdict[str, Samples](Samples)
    yardstick = Yardstick(
        clock, samples.__getitem__, dict.fromkeys(PARTS, (lambda: None, 3)), share=0.01, now=lambda: clock.now_s
    )
    for _ in range(300_000):  # layers of 10 us
        yardstick.read_if_due()
        clock.now_s += 1e-5
    spent_s = clock.now_s - 3.0
    kept_s = sum(sum(x.clean_s) for x in yardstick.parts)
    assert 0.008 * clock.now_s < spent_s <= 0.02 * clock.now_s  # the first reading is at once
    assert kept_s == pytest.approx(spent_s)  # here only what is timed takes time
    assert len({len(x.clean_s) for x in yardstick.parts}) == 1


def test_yardstick_on_a_gpu_does_not_wait_for_it() -> None:
    stream, samples = Stream(), defaultdict[str, Samples](Samples)
    clock = CudaClock(make_event=lambda: Event(stream), synchronize=stream.synchronize)
    kernels = dict(zip(PARTS, USUAL_S, strict=True))
    parts = {name: (partial(stream.run, launch_s=0.0, kernel_s=x / 2), 2) for name, x in kernels.items()}
    yardstick = Yardstick(clock, samples.__getitem__, parts)
    yardstick.read_if_due()
    assert stream.waits == 0
    clock.flush()
    times = mean_of_samples(yardstick.parts)
    assert times is not None
    assert (times.compute_s, times.memory_s, times.interpreter_s) == pytest.approx(USUAL_S)


def test_a_gpu_has_the_same_parts_without_weights_from_memory() -> None:
    parts = yardstick_parts("meta")  # laid out as on a GPU
    assert tuple(parts) == PARTS
    for work, count in parts.values():
        for _ in range(count):
            work()


def test_parts_run_and_draw_nothing() -> None:
    before = torch.random.get_rng_state()
    parts = yardstick_parts()
    for work, _ in parts.values():
        work()
    assert tuple(parts) == (PAGES, *PARTS)
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_reading_does_not_depend_on_what_surrounds_it() -> None:
    """A script can read it without gradients, under autocast, and with another default dtype."""
    torch.set_default_dtype(torch.float64)
    try:
        work, _ = yardstick_parts()["interpreter"]
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        gradients = work()
    assert {x.dtype for x in gradients} == {torch.float32}  # type: ignore[attr-defined]
    assert any(x.abs().max() > 0 for x in gradients)  # type: ignore[attr-defined]


def test_parts_lie_in_huge_pages_where_there_are_any() -> None:
    found = _ones_in_huge_pages(1000)
    assert found.tolist() == [1.0] * 1000
    assert not hasattr(mmap, "MADV_HUGEPAGE") or found.data_ptr() % 2**21 == 0


def sampled(usual_s: float, at_s: Sequence[float], slowdown: Callable[[float], float]) -> Samples:
    return Samples(clean_s=[usual_s * slowdown(x) for x in at_s], clean_at_s=list(at_s))


def two_phases(at_s: float) -> float:
    return 1.0 if at_s < 60 else 2.5


MEAN = 0.6 * 1.0 + 0.4 * 2.5
"""Of two phases, over 100 s."""


def history(slowdown: Callable[[float], float]) -> tuple[SpeedHistory, Samples]:
    parts = [sampled(x, np.arange(0, 100, 0.5).tolist(), slowdown) for x in USUAL_S]
    layer = sampled(0.02, np.arange(0.25, 100, 1.0).tolist(), slowdown)
    return SpeedHistory(parts, weights=PASS_WEIGHTS), layer


def test_a_profile_over_two_phases_is_brought_to_its_mean_speed() -> None:
    speeds, layer = history(two_phases)
    before, after = layer.timing(), speeds.at_one_speed(layer).timing()
    assert before.high_s / before.low_s == pytest.approx(2.5)
    assert (after.low_s, after.high_s) == pytest.approx((0.02 * MEAN, 0.02 * MEAN), rel=0.01)
    assert speeds.host_speed is not None
    (text,) = speeds.host_speed.doubts
    assert "by a factor of 2.5" in text
    assert "1.60 from 0 s to 59.7 s, 0.64 from 59.7 s" in text


def test_a_steady_host_changes_no_sample_and_gives_no_warning() -> None:
    speeds, layer = history(lambda _: 1.0)
    assert speeds.at_one_speed(layer) == layer
    assert speeds.host_speed is not None and speeds.host_speed.doubts == ()


def test_a_disturbed_reading_hardly_changes_the_reference() -> None:
    parts = [sampled(x, np.arange(0, 100, 0.5).tolist(), lambda at_s: 50.0 if at_s == 20.0 else 1.0) for x in USUAL_S]
    found = SpeedHistory(parts, weights=PASS_WEIGHTS).host_speed
    assert found is not None
    assert found.reference.compute_s == pytest.approx(1.01 * USUAL_S[0])


def test_too_few_readings_change_nothing() -> None:
    layer = sampled(0.02, [1.0, 2.0], two_phases)
    for num in (0, 1, 4):
        speeds = SpeedHistory([sampled(1e-3, list(range(num)), two_phases)] * 3, weights=PASS_WEIGHTS)
        assert (speeds.host_speed is None) == (num == 0)
        assert speeds.at_one_speed(layer) == layer


def test_stored_windows_cover_the_profile() -> None:
    speeds, _ = history(two_phases)
    assert speeds.host_speed is not None
    windows = speeds.host_speed.windows
    assert 10 < len(windows) <= 21
    assert windows[0].start_s == 0.0
    assert windows[-1].end_s == pytest.approx(99.5)
    assert sum(x.num_readings for x in windows) == 200


def test_phases_join_windows_of_one_speed() -> None:
    def window(start_s: float, factor: float) -> SpeedWindow:
        return SpeedWindow(
            start_s=start_s, end_s=start_s + 1, times=YardstickTimes(compute_s=factor, memory_s=factor, interpreter_s=factor), num_readings=1
        )  # fmt: skip

    speed = HostSpeed(
        reference=YardstickTimes(compute_s=1.0, memory_s=1.0, interpreter_s=1.0),
        windows=tuple(window(i, x) for i, x in enumerate([1.0, 1.05, 1.4, 1.4, 1.0])),
    )
    assert [(start, end) for start, end, _ in speed.phases] == [(0, 2), (2, 4), (4, 5)]


@pytest.mark.parametrize(("read", "num_kept"), [(Yardstick.read_if_due, 2), (Yardstick.read_beside, 4)])
def test_products_run_before_they_are_timed_and_no_part_between_two_of_them(
    read: Callable[[Yardstick], None], num_kept: int
) -> None:
    calls = list[str]()
    parts = {name: (partial(calls.append, name), 1) for name in PARTS}
    yardstick = Yardstick(PaperClock(), lambda _: Samples(), parts)
    calls.clear()
    read(yardstick)
    assert [(name, len([*run])) for name, run in groupby(calls)] == [
        ("compute", 14 + num_kept),
        ("memory", 1 + num_kept),
        ("interpreter", 6 + num_kept),
    ]


def test_a_pause_is_not_made_up_for() -> None:
    """Many readings at one moment would count as much as those of a minute."""
    clock, samples = PaperClock(), defaultdict[str, Samples](Samples)
    yardstick = Yardstick(clock, samples.__getitem__, dict.fromkeys(PARTS, (lambda: None, 1)), now=lambda: clock.now_s)
    yardstick.read_if_due()
    clock.now_s += 1000.0
    for _ in range(50):
        yardstick.read_if_due()
    assert len(yardstick.parts[0].clean_s) == 2 * 2


@pytest.mark.parametrize("read", [Yardstick.read_if_due, Yardstick.read_beside])
def test_pages_are_touched_once_before_parts_are_timed(read: Callable[[Yardstick], None]) -> None:
    calls = list[str]()
    parts = {name: (partial(calls.append, name), 1) for name in (PAGES, *PARTS)}
    yardstick = Yardstick(PaperClock(), lambda _: Samples(), parts)
    calls.clear()
    read(yardstick)
    assert calls[0] == PAGES
    assert PAGES not in calls[1:]


def test_touched_pages_are_all_that_the_parts_read() -> None:
    """Every page of 4 KiB of the memory that is read in turns, by where the work reads."""
    work, _ = yardstick_parts()[PAGES]
    assert isinstance(work, partial)
    assert work.args[0].numel() * 4096 == _STREAMED_FLOATS * 4
    assert set(np.diff([x.data_ptr() for x in work.args[0][:5]])) == {4096}


def test_parts_beside_others_are_the_reference_of_runs_on_several_devices() -> None:
    clock, samples = PaperClock(), defaultdict[str, Samples](Samples)
    yardstick = Yardstick(clock, samples.__getitem__, dict.fromkeys(PARTS, (lambda: None, 3)), now=lambda: clock.now_s)
    yardstick.read_if_due()
    for beside in yardstick.parts_beside:
        beside.add_clean(2e-3, clock.now_s)
    for _ in range(4):
        clock.now_s += 2.0
        yardstick.read_if_due()
    found = SpeedHistory(yardstick.parts, yardstick.parts_beside, weights=PASS_WEIGHTS).host_speed
    assert found is not None
    assert found.beside == YardstickTimes(compute_s=2e-3, memory_s=2e-3, interpreter_s=2e-3)
    assert found.slowdown(found.beside, num_devices=2) == pytest.approx(1.0)
    assert found.slowdown(found.beside) == pytest.approx(2.0)


def test_references_beside_others_belong_to_the_speed_of_those_alone() -> None:
    """The host is slow in the first three quarters, and contention is measured in the last quarter only."""

    def seconds(at_s: float) -> float:
        return 2.0 if at_s < 75 else 1.0

    alone = [sampled(x, np.arange(0, 100, 0.5).tolist(), seconds) for x in USUAL_S]
    beside = [sampled(1.1 * x, np.arange(85, 95, 0.5).tolist(), seconds) for x in USUAL_S]
    speeds = SpeedHistory(alone, beside, weights=PASS_WEIGHTS)
    assert speeds.host_speed is not None and speeds.host_speed.beside is not None
    reference, there = speeds.host_speed.reference, speeds.host_speed.beside
    assert reference.compute_s == pytest.approx(1.75 * USUAL_S[0])
    assert there.compute_s == pytest.approx(1.1 * reference.compute_s)
    assert (there.memory_s, there.interpreter_s) == pytest.approx(
        (1.1 * reference.memory_s, 1.1 * reference.interpreter_s)
    )
    assert speeds.slowdowns([90.0], beside=True).tolist() == pytest.approx([1 / 1.75])
    work = sampled(0.02, np.arange(85, 95, 0.5).tolist(), seconds)
    assert speeds.at_one_speed(work, beside=True).timing().median_s == pytest.approx(0.02 * 1.75)


def test_a_part_that_counts_a_third_slows_passes_by_the_cube_root() -> None:
    """Other work can slow one part alone, and layers then take longer too."""
    for index in range(3):
        parts = [sampled(x, np.arange(0, 100, 0.5).tolist(), lambda _: 1.0) for x in USUAL_S]
        parts[index] = sampled(USUAL_S[index], np.arange(0, 100, 0.5).tolist(), two_phases)
        fast, slow = SpeedHistory(parts, weights=PASS_WEIGHTS).slowdowns([10.0, 90.0]).tolist()
        assert slow / fast == pytest.approx(2.5 ** (1 / 3))


def test_a_model_of_many_short_operations_is_slowed_as_their_code() -> None:
    parts = [sampled(x, np.arange(0, 100, 0.5).tolist(), lambda _: 1.0) for x in USUAL_S]
    each_s = 2.3 * USUAL_S[2] / TINY_OPERATIONS  # longer than in the tiny model, whose code is in the caches
    found = pass_weights(parts, num_operations=1000, seconds=4000 * each_s)
    assert found == pytest.approx((0.375, 0.375, 0.25))
    assert pass_weights(parts, num_operations=1000, seconds=1e9 * each_s) == pytest.approx((0.5, 0.5, 0.0), abs=1e-5)
    assert pass_weights(parts, num_operations=1000, seconds=each_s) == pytest.approx((0.1, 0.1, 0.8))


def test_parts_count_alike_in_passes_whose_operations_are_not_counted() -> None:
    parts = [sampled(x, np.arange(0, 100, 0.5).tolist(), lambda _: 1.0) for x in USUAL_S]
    assert pass_weights(parts, num_operations=0, seconds=1.0) == PASS_WEIGHTS
    assert pass_weights([Samples()] * 3, num_operations=9, seconds=1.0) == PASS_WEIGHTS


class TinyModel(nn.Module):
    """That of the yardstick as a layer."""

    def __init__(self) -> None:
        super().__init__()
        shapes = ((32, 32), (32,), (32,), (32,), (32, 32), (32,))
        self.weights = nn.ParameterList(torch.ones(x) for x in shapes)

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        return tiny_model(samples, *self.weights)


def test_operations_of_the_tiny_model_are_counted_as_those_of_layers() -> None:
    analyses = analyse([TinyModel()], (torch.ones(8, 32),), lambda outputs: outputs[0].sum())
    assert sum(len(x.forward) + len(x.backward) for x in analyses) == TINY_OPERATIONS


def test_launches_do_not_slow_the_passes_of_a_gpu() -> None:
    parts = [sampled(x, np.arange(0, 100, 0.5).tolist(), lambda _: 1.0) for x in USUAL_S]
    parts[2] = sampled(USUAL_S[2], np.arange(0, 100, 0.5).tolist(), two_phases)
    assert SpeedHistory(parts, weights=GPU_PASS_WEIGHTS).slowdowns([10.0, 90.0]) == pytest.approx([1.0, 1.0])


def test_a_long_tail_of_readings_changes_no_samples() -> None:
    """Every fourth reading is 1.6 times slower, and the layer never is. Medians would make it 1.15 times as long."""
    at_s = np.arange(0, 100, 0.5).tolist()
    parts = [sampled(x, at_s, lambda at_s: 1.6 if at_s % 2 == 0 else 1.0) for x in USUAL_S]
    layer = sampled(0.02, np.arange(10, 90, 0.7).tolist(), lambda _: 1.0)
    brought = SpeedHistory(parts, weights=PASS_WEIGHTS).at_one_speed(layer)
    assert brought.timing().median_s == pytest.approx(0.02, rel=0.02)


def test_a_short_disturbance_of_a_part_changes_nothing() -> None:
    parts = [sampled(x, np.arange(0, 100, 0.5).tolist(), lambda _: 1.0) for x in USUAL_S]
    disturbed = [3.0 * x if at_s == 90.0 else x for x, at_s in zip(parts[2].clean_s, parts[2].clean_at_s, strict=True)]
    parts[2] = Samples(clean_s=disturbed, clean_at_s=parts[2].clean_at_s)
    fast, slow = SpeedHistory(parts, weights=PASS_WEIGHTS).slowdowns([10.0, 90.0]).tolist()
    assert slow == fast


class BusyClock(PaperClock):
    """Every piece of work is interrupted."""

    def time(self, samples: Samples, work: Callable[..., Any], *args: Any) -> Any:
        samples.add(1.0, 0.1)
        return work(*args)


def test_an_interrupted_reading_is_dropped() -> None:
    samples = defaultdict[str, Samples](Samples)
    yardstick = Yardstick(BusyClock(), samples.__getitem__, dict.fromkeys(PARTS, (lambda: None, 3)))
    yardstick.read_if_due()
    # refused samples count in `timing`, as for layers, but not in means of readings
    assert all(x.timing().median_s for x in yardstick.parts)
    assert mean_of_samples(yardstick.parts) is None


def test_many_readings_in_one_second_count_as_that_second() -> None:
    """Updates, with many readings, come in a fast second before 50 slow ones."""
    at_s = [*np.linspace(0.0, 0.9, 50).tolist(), *np.arange(1.0, 51.0).tolist()]
    parts = [sampled(x, at_s, lambda at_s: 1.0 if at_s < 1.0 else 2.0) for x in USUAL_S]
    speed = SpeedHistory(parts, weights=PASS_WEIGHTS).host_speed
    assert speed is not None
    assert speed.reference.compute_s == pytest.approx((1 + 50 * 2) / 51 * USUAL_S[0])


def test_layers_in_different_phases_are_brought_to_one_speed() -> None:
    """As those of a lazy model, or of two micro-batch sizes; each layer has one phase of the host."""
    parts = [sampled(x, np.arange(0, 100, 0.5).tolist(), two_phases) for x in USUAL_S]
    layers = [sampled(0.02, np.arange(first, first + 30, 1.0).tolist(), two_phases) for first in (10, 65)]
    speeds = SpeedHistory(parts, weights=PASS_WEIGHTS)
    found_s = [speeds.at_one_speed(x).timing().median_s for x in layers]
    assert found_s == pytest.approx([0.02 * MEAN] * 2)


def test_an_interruption_puts_off_the_next_reading_by_seconds_only() -> None:
    clock, samples = PaperClock(), defaultdict[str, Samples](Samples)
    yardstick = Yardstick(clock, samples.__getitem__, dict.fromkeys(PARTS, (lambda: None, 3)), now=lambda: clock.now_s)
    stopped = partial(setattr, clock, "now_s", 60.0)
    yardstick._parts = {**yardstick._parts, "memory": (stopped, 1)}
    yardstick.read_if_due()
    yardstick._parts = dict.fromkeys(PARTS, (lambda: None, 3))
    clock.now_s += 3.0
    yardstick.read_if_due()
    assert len(yardstick.parts[0].clean_s) == 2 * 2
