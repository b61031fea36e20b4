"""The yardstick: short fixed work, timed between the samples to know how fast the host was.

Its parts are bound by compute, by memory, and by the interpreter with PyTorch's own code. The speed of a shared host
changes between phases of some seconds or minutes. Samples are divided by the slowdown of their moment (`SpeedHistory`).
"""

from __future__ import annotations

import mmap
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import cycle
from statistics import fmean, median
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from gplan.core.host_speed import (
    PASS_WEIGHTS,
    HostSpeed,
    PartWeights,
    SpeedWindow,
    YardstickTimes,
    mean_near_median,
    slowdown_of,
)
from gplan.core.stage_cost import Floats
from profiler.timing.clock import DISTURBED, Clock, Samples
from profiler.timing.neighbours import BESIDE_OTHERS

_MOST_SHARE = 0.02  # of the time; the most that readings by `read_if_due` take

PARTS = ("compute", "memory", "interpreter")
WARMUPS = dict(zip(PARTS, (14, 1, 6), strict=True))
"""How often each part runs before it is timed.

After 14 times both products a core has its full speed, also after a wait or work without large products. After six passes the code of
the tiny model is in the caches, whatever ran before.
"""
PAGES = "pages"
"""Work beside the parts, on a CPU: touches every page of the memory that they read.

A virtual machine's host takes a while to bring back pages that were not used for some seconds (docs/cost-model.md, Host
speed). The pages of a model are in use all the time.
"""
SAMPLES = "yardstick/"
"""Prefix of the names of its samples in a journal."""

_GPU_READING_S = 5e-3  # about; the host only launches it
_LEAST_READINGS = 5
_MOST_READING_S = 0.02  # that counts: an interruption need not put off the next
_NUM_KEPT = 2  # times of each part in a reading
_NUM_KEPT_BESIDE = 4  # the same beside other processes
_NUM_AROUND = 9  # times of a part whose mean is the speed of a moment
_NUM_AROUND_BESIDE = 6  # the same beside other processes, where readings are close to each other
_MOST_OVER_MEDIAN = 3.0  # for which a reading counts in the reference
_WINDOW_S = 1.0  # the shortest window
_NUM_STORED = 20  # windows in a profile
_STREAMED_FLOATS = 2**24  # 64 MiB, more than the caches hold that a core shares; on a CPU two halves are read in turns
_ROWS, _WEIGHTS = 128, 256  # of the product whose weights come from memory: it takes as long as 192 x 192 x 192
_TINY_ROWS, _TINY_WIDTH = 8, 32
TINY_OPERATIONS = 27  # of the forward and backward of `tiny_model`, as those of a layer are counted
_COLD = 2.3  # times as long an operation's own code takes in a model as in the tiny one; see Host speed
_MOST_OWN_CODE = 0.8  # of the time of passes; what is computed takes some of it
_HUGE_PAGE_BYTES = 2**21
_PAGE_FLOATS = 1024
_HALF_PAGE_FLOATS = 512  # a core is slower to write where what it reads lies whole pages away


Part: TypeAlias = tuple[Callable[[], object], int]
"""A piece of work, and how often a reading does it."""


def yardstick_parts(device: str = "cpu") -> dict[str, Part]:
    """The parts on a device: products, sums over 1 MiB of memory, and a tiny model; on a GPU larger, and small launches.

    One product has two matrices of 192 x 192, and one has other weights of 256 x 256 each time: small layers stay in the
    caches, those of large models do not, and other work on the host slows the two differently. On a CPU these weights
    and the sums each cycle through 32 MiB, on a GPU the sums through 64 MiB, so that what they read has left the caches,
    whatever ran in between. The products and sums are equally fast in every process: their tensors have fixed distances and
    lie in huge pages, and they allocate nothing. The third part is a forward and backward of a tiny model, on a GPU launches
    of small kernels. No part draws random numbers.
    """
    on_gpu = device != "cpu"
    width, num_floats = (2048, 2**23) if on_gpu else (192, 2**18)
    sizes = [width * width] * 3 + [_STREAMED_FLOATS, _HALF_PAGE_FLOATS, num_floats, 1]
    ones = torch.ones(sum(sizes), device=device) if on_gpu else _ones_in_huge_pages(sum(sizes))
    found = ones.split(sizes)  # type: ignore[no-untyped-call]
    left, right, product, streamed, _, total, small = found
    # on a GPU no product has weights from memory
    weights, summed = streamed.split([0, _STREAMED_FLOATS] if on_gpu else [_STREAMED_FLOATS // 2] * 2)
    square = partial(torch.Tensor.view, size=(width, width))
    multiply = partial(torch.mm, *map(square, (left, right)), out=square(product))
    rows, outputs = (x[: _ROWS * _WEIGHTS].view(_ROWS, _WEIGHTS) for x in (left, product))
    next_weights = cycle(weights.unflatten(0, (-1, _WEIGHTS, _WEIGHTS)).unbind())
    addends = cycle(summed.view(-1, num_floats).unbind())

    def multiply_both() -> None:
        multiply()
        torch.mm(rows, next(next_weights), out=outputs)

    def add_next() -> None:
        total.add_(next(addends))

    pages = streamed.view(-1, _PAGE_FLOATS)[:, 0]
    touch: dict[str, Part] = {} if on_gpu else {PAGES: (partial(torch.sum, pages, dim=0, out=small.view(())), 1)}
    return touch | {
        "compute": (multiply if on_gpu else multiply_both, 1),
        "memory": (add_next, 8 if on_gpu else 2),  # on a GPU the first launch is short beside 8 sums
        "interpreter": (partial(small.add_, 1), 32) if on_gpu else (_passes_of_tiny_model(), 1),
    }


def _passes_of_tiny_model() -> Callable[[], object]:
    """A forward and backward that compute next to nothing: Python, the choice of kernels, and small pieces of memory."""
    numbers = torch.linspace(-1.0, 1.0, _TINY_WIDTH**2, dtype=torch.float32, device="cpu")
    values = numbers.view(_TINY_WIDTH, _TINY_WIDTH)
    weights = [x.clone().requires_grad_() for x in (values, values[0], values[1], values[2], values, values[3])]
    samples = values[:_TINY_ROWS].clone()

    def train() -> object:
        with torch.enable_grad(), torch.autocast("cpu", enabled=False):
            loss = tiny_model(samples, *weights).sum()
        return torch.autograd.grad(loss, weights)

    return train


def tiny_model(
    samples: Tensor,
    first: Tensor,
    first_bias: Tensor,
    scale: Tensor,
    shift: Tensor,
    second: Tensor,
    second_bias: Tensor,
) -> Tensor:
    """A linear layer, a layer norm, GELU and a linear layer: [rows, width] to [rows, width]."""
    hidden = functional.layer_norm(functional.linear(samples, first, first_bias), scale.shape, scale, shift)
    return functional.linear(functional.gelu(hidden), second, second_bias)


def pass_weights(parts: Sequence[Samples], *, num_operations: int, seconds: float) -> PartWeights:
    """The weights of the parts for the passes of a model on a CPU.

    `num_operations` and `seconds` are of one forward and backward of the model. The interpreter's weight is the share of
    `seconds` that Python and PyTorch's own code take: for each operation `_COLD` times what one of the tiny model takes,
    together at most `_MOST_OWN_CODE`. Compute and memory get half of the rest each. Every part gets a third if the
    operations were not counted or the yardstick was not read.
    """
    tiny_s = _mean_s(parts[PARTS.index("interpreter")])
    if not (num_operations and seconds and tiny_s):
        return PASS_WEIGHTS
    own = min(_MOST_OWN_CODE, _COLD * tiny_s / TINY_OPERATIONS * num_operations / seconds)
    return ((1 - own) / 2, (1 - own) / 2, own)


def _ones_in_huge_pages(number: int) -> Tensor:
    """Ones on the CPU, in huge pages where the system has them.

    In small pages reading takes 1.4 to 2.8 times as long, depending on where the pages lie.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.ones(number)
    space = mmap.mmap(-1, 4 * number + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system without huge pages
        space.madvise(mmap.MADV_HUGEPAGE)
    floats = torch.frombuffer(space, dtype=torch.float32)
    first = -floats.data_ptr() % _HUGE_PAGE_BYTES // 4
    return floats[first : first + number].fill_(1.0)


class Yardstick:
    """Times the parts at intervals, on the clock of the samples that it corrects."""

    def __init__(
        self,
        clock: Clock,
        samples: Callable[[str], Samples],
        parts: Mapping[str, Part],
        *,
        share: float = _MOST_SHARE,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`share`: the most of the time that `read_if_due` may take."""
        self._clock, self._samples, self._parts, self._now = clock, samples, parts, now
        self._share = share
        self._least_s = 0.0 if PAGES in parts else _GPU_READING_S
        for work, _ in parts.values():  # a library chooses its kernels
            work()
        self._next_s = now()

    @property
    def parts(self) -> tuple[Samples, ...]:
        """The samples of each part."""
        return tuple(self._samples(f"{SAMPLES}{name}") for name in PARTS)

    @property
    def parts_beside(self) -> tuple[Samples, ...]:
        """The samples of each part beside other processes."""
        return tuple(self._samples(f"{SAMPLES}{name}{BESIDE_OTHERS}") for name in PARTS)

    def read_if_due(self) -> bool:
        """Time every part, unless the last reading was so short a time ago that it took more than its share of it.

        Returns whether it was due.
        """
        is_due = self._now() >= self._next_s
        if is_due:
            self.read()
        return is_due

    def read(self) -> None:
        """Time every part now; the next `read_if_due` waits as after any reading."""
        start_s = self._now()
        self._read(self.parts, _NUM_KEPT)
        end_s = self._now()
        self._next_s = end_s + min(max(self._least_s, end_s - start_s), _MOST_READING_S) / self._share

    def read_beside(self) -> None:
        """Time every part, while other processes compute."""
        self._read(self.parts_beside, _NUM_KEPT_BESIDE)

    def _read(self, samples: Sequence[Samples], num_kept: int) -> None:
        """Time the parts, one after the other, each some times in a row after `WARMUPS` that do not count.

        Before, the memory that they read is brought back, which takes longer in some processes than in others. Parts do not
        take turns: the sums fill the caches, and would slow the product after them.
        """
        if PAGES in self._parts:
            _repeat(*self._parts[PAGES])
        for name, of_part in zip(PARTS, samples, strict=True):
            work, count = self._parts[name]
            _repeat(work, count * WARMUPS[name])
            for _ in range(num_kept):
                self._clock.time(of_part, _repeat, work, count)


def _repeat(work: Callable[[], object], count: int) -> None:
    for _ in range(count):
        work()


def mean_of_samples(parts: Sequence[Samples]) -> YardstickTimes | None:
    """The mean of each part; None without readings of all."""
    return _times([fmean(x.clean_s or [0.0]) for x in parts])


def _times(seconds: Sequence[float]) -> YardstickTimes | None:
    """The times of PARTS; None if one is 0."""
    return YardstickTimes(**{f"{name}_s": s for name, s in zip(PARTS, seconds, strict=True)}) if all(seconds) else None


def _mean_s(readings: Samples) -> float:
    """The mean over time: of the readings of each second first, then of the seconds that have any; 0 without readings.

    Otherwise the many readings around updates would outweigh those between layers. No reading counts as more than three
    times the median.
    """
    if not readings.clean_s:
        return 0.0
    most_s = _MOST_OVER_MEDIAN * median(readings.clean_s)
    by_second = defaultdict[int, list[float]](list)
    for reading_s, at_s in zip(readings.clean_s, readings.clean_at_s, strict=True):
        by_second[int(at_s)].append(min(reading_s, most_s))
    return fmean(map(fmean, by_second.values()))


class SpeedHistory:
    """The slowdown of the host at each moment, by readings of the yardstick. With too few of them, it is steady.

    The reference is the mean over time, so predictions include slow phases: on a host that is slow for less than half of the
    time, the median would leave them out. The speed of a moment is a mean too. With medians there, samples would be divided
    by too little, as readings have a long tail.
    """

    def __init__(self, parts: Sequence[Samples], beside: Sequence[Samples] = (), *, weights: PartWeights) -> None:
        """`parts` were read alone, `beside` beside other processes; `weights` are those of the parts for passes."""
        references_s = [_mean_s(x) for x in parts]
        found = _times(references_s)
        self.host_speed = None if found is None else HostSpeed(reference=found, weights=weights)
        self._is_known = min(len(x.clean_s) for x in parts) >= _LEAST_READINGS
        if found is None or not self._is_known:
            return
        self._ratios = [_ratios(*pair) for pair in zip(parts, references_s, strict=True)]
        self._ratios_beside, times_beside = list[tuple[Floats, Floats]](), None
        if beside and all(x.clean_s for x in beside):
            beside_s = [self._at_reference_s(*pair) for pair in zip(beside, self._ratios, strict=True)]
            self._ratios_beside = [_ratios(*pair) for pair in zip(beside, beside_s, strict=True)]
            times_beside = _times(beside_s)
        start_s, end_s = min(x.clean_at_s[0] for x in parts), max(x.clean_at_s[-1] for x in parts)
        windows = tuple(_stored_windows(parts, start_s, max(_WINDOW_S, (end_s - start_s) / _NUM_STORED)))
        self.host_speed = HostSpeed(reference=found, windows=windows, beside=times_beside, weights=weights)

    @staticmethod
    def _at_reference_s(beside: Samples, alone: tuple[Floats, Floats]) -> float:
        """The time of a part beside other processes at the speed of the reference.

        The host may be faster or slower while other processes run. So each reading is compared with the nearest ones alone.
        """
        around = _nearest_mean(*alone, np.array(beside.clean_at_s), _NUM_AROUND)
        return float(mean_near_median(np.array(beside.clean_s) / around, most=DISTURBED))

    def slowdowns(self, at_s: Sequence[float], *, beside: bool = False, weights: PartWeights | None = None) -> Floats:
        """The slowdown at each moment, by the means of the nearest readings of each part: alone, or beside others.

        `weights`: of the parts; by default those of passes.
        """
        if self.host_speed is None or not self._is_known:
            return np.ones(len(at_s))
        of, num = self._ratios, _NUM_AROUND
        if beside and self._ratios_beside:
            of, num = self._ratios_beside, _NUM_AROUND_BESIDE
        moments_s = np.array(at_s)
        ratios = np.array([_nearest_mean(*x, moments_s, num) for x in of])
        return slowdown_of(ratios, weights or self.host_speed.weights)

    def at_one_speed(self, samples: Samples, *, beside: bool = False, weights: PartWeights | None = None) -> Samples:
        """The samples as they would be at the mean speed."""
        return samples.divided(partial(self.slowdowns, beside=beside, weights=weights))


def _stored_windows(parts: Sequence[Samples], start_s: float, window_s: float) -> Iterable[SpeedWindow]:
    last = max(x.clean_at_s[-1] for x in parts)
    for window in range(1 + int((last - start_s) // window_s)):
        begin_s, end_s = start_s + window * window_s, start_s + (window + 1) * window_s
        inside = [x.between(begin_s, end_s) for x in parts]
        if times := _times([_mean_s(x) for x in inside]):
            yield SpeedWindow(
                start_s=round(begin_s - start_s, 3),
                end_s=round(min(end_s, last) - start_s, 3),
                times=times,
                num_readings=len(inside[0].clean_s),
            )


def _ratios(readings: Samples, reference_s: float) -> tuple[Floats, Floats]:
    """When they were taken, and each over the reference."""
    return np.array(readings.clean_at_s), np.array(readings.clean_s) / reference_s


def _nearest_mean(at_s: Floats, values: Floats, moments_s: Floats, num_around: int) -> Floats:
    """For each moment the mean of the nearest values in time; disturbed ones count as the median."""
    num = min(num_around, len(at_s))
    first = np.clip(np.searchsorted(at_s, moments_s) - num // 2, 0, len(at_s) - num)
    return mean_near_median(values[first[:, None] + np.arange(num)], most=DISTURBED)
