"""The yardstick: fixed work of about a millisecond that is timed beside the samples, to know how fast the host was.

Its parts are bound by compute, by memory, and by the interpreter. The speed of a shared host changes between phases of
some seconds or minutes. Samples are divided by the slowdown of their moment (`SpeedHistory`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import cycle
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from gplan.core.host_speed import HostSpeed, SpeedWindow, YardstickTimes
from profiler.timing.clock import Clock, Samples
from profiler.timing.neighbours import BESIDE_OTHERS

MOST_SHARE = 0.01
"""The most of the time that readings may take."""

Floats = NDArray[np.float64]

PARTS = ("compute", "memory", "interpreter")
BESIDE = ("compute", "interpreter")
"""The parts that the devices of a run read at the same time. They read memory in turns, as it would slow down itself."""
SAMPLES = "yardstick/"
"""Prefix of the names of its samples in a journal."""

_LEAST_READING_S = 1e-3  # on a GPU the host only launches it
_LEAST_READINGS = 5
_NUM_BESIDE = 3  # readings in a round beside others
_NUM_AROUND = 9  # readings whose median is the speed of a moment
_WINDOW_S = 1.0  # the shortest window
_NUM_STORED = 20  # windows in a profile
_STREAMED_FLOATS = 2**24  # 64 MiB, more than the caches hold that a core shares


Part: TypeAlias = tuple[Callable[[], object], int]
"""A piece of work, and how often a reading does it."""


def yardstick_parts(device: str = "cpu") -> dict[str, Part]:
    """The parts on a device: 192 x 192 products, sums over 4 MiB of memory, a loop; on a GPU larger, and small launches.

    The sums go on through 64 MiB, so that what they read has left the caches, whatever ran in between. They allocate
    nothing and draw no random numbers.
    """
    on_gpu = device != "cpu"
    width, num_floats = (2048, 2**23) if on_gpu else (192, 2**20)
    left, right, product = (torch.ones(width, width, device=device) for _ in range(3))
    addends = cycle(torch.zeros(_STREAMED_FLOATS // num_floats, num_floats, device=device).unbind())
    total = torch.zeros(num_floats, device=device)
    small = torch.zeros(1, device=device)

    def add_next() -> None:
        total.add_(next(addends))

    def loop() -> None:
        number = 0
        for i in range(1500):
            number += i & 7

    return {
        "compute": (partial(torch.mm, left, right, out=product), 1 if on_gpu else 4),
        "memory": (add_next, 1 if on_gpu else 3),
        "interpreter": (partial(small.add_, 1), 32) if on_gpu else (loop, 4),
    }


class Yardstick:
    """Times the parts now and then, on the clock of the samples that it stands beside."""

    def __init__(
        self,
        clock: Clock,
        samples: Callable[[str], Samples],
        parts: Mapping[str, Part],
        *,
        share: float = MOST_SHARE,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock, self._samples, self._parts, self._share, self._now = clock, samples, parts, share, now
        for work, _ in parts.values():  # a library chooses its kernels
            work()
        self._due_s = now()

    @property
    def parts(self) -> tuple[Samples, ...]:
        """The samples of each part."""
        return tuple(self._samples(f"{SAMPLES}{name}") for name in PARTS)

    @property
    def parts_beside(self) -> tuple[Samples, ...]:
        """The samples of the parts of BESIDE beside other processes."""
        return tuple(self._samples(f"{SAMPLES}{name}{BESIDE_OTHERS}") for name in BESIDE)

    def read_if_due(self) -> None:
        """Time every part once, unless that would take more than its share of the time since the last reading."""
        if self._now() >= self._due_s:
            self._read(self.parts)

    def read_beside(self) -> None:
        """Time the parts of BESIDE while other processes compute."""
        for _ in range(_NUM_BESIDE):
            for name, samples in zip(BESIDE, self.parts_beside, strict=True):
                self._time(samples, name)

    def seconds(self, *names: str) -> tuple[float | None, ...]:
        """Time these parts now. Waits for the device. None for one that was interrupted."""
        parts = [Samples() for _ in names]
        for samples, name in zip(parts, names, strict=True):
            self._time(samples, name)
        self._clock.flush()
        return tuple(x.clean_s[0] if x.clean_s else None for x in parts)

    def _read(self, parts: Sequence[Samples]) -> None:
        start_s = self._now()
        for samples, name in zip(parts, PARTS, strict=True):
            self._time(samples, name)
        end_s = self._now()
        reading_s = max(_LEAST_READING_S, end_s - start_s)
        self._due_s = end_s + reading_s * (1 / self._share - 1)

    def _time(self, samples: Samples, name: str) -> None:
        work, count = self._parts[name]
        work()  # unsampled: caches are the same whatever ran before
        self._clock.time(samples, _repeat, work, count)


def _repeat(work: Callable[[], object], count: int) -> None:
    for _ in range(count):
        work()


def median_times(parts: Sequence[Samples]) -> YardstickTimes | None:
    """The median of each part, as of layers; None without readings of all."""
    compute_s, memory_s, interpreter_s = (x.timing().median_s for x in parts)
    if not (compute_s and memory_s and interpreter_s):
        return None
    return YardstickTimes(compute_s=compute_s, memory_s=memory_s, interpreter_s=interpreter_s)


class SpeedHistory:
    """The slowdown of the host at each moment, by readings of the yardstick. With too few of them, it is steady."""

    def __init__(self, parts: Sequence[Samples], beside: Sequence[Samples] = ()) -> None:
        found = median_times(parts)
        self.host_speed = None if found is None else HostSpeed(reference=found)
        self._is_known = min(len(x.clean_s) for x in parts) >= _LEAST_READINGS
        if found is None or not self._is_known:
            return
        self._at = [np.array(x.clean_at_s) for x in parts]
        self._ratios = [np.array(x.clean_s) / np.median(x.clean_s) for x in parts]
        start_s, end_s = min(x.clean_at_s[0] for x in parts), max(x.clean_at_s[-1] for x in parts)
        windows = tuple(_stored_windows(parts, start_s, max(_WINDOW_S, (end_s - start_s) / _NUM_STORED)))
        self.host_speed = HostSpeed(reference=found, windows=windows, beside=_times_beside(found, beside))

    def slowdowns(self, at_s: Sequence[float]) -> Floats:
        """The slowdown at each moment: by the medians of the nearest readings of each part, the median part."""
        if not self._is_known:
            return np.ones(len(at_s))
        nearest = [_nearest_median(at, x, np.array(at_s)) for at, x in zip(self._at, self._ratios, strict=True)]
        slowdowns: Floats = np.median(nearest, axis=0)
        return slowdowns

    def at_one_speed(self, samples: Samples) -> Samples:
        """The samples as they would be at the median speed."""
        return samples.divided(self.slowdowns)


def _times_beside(reference: YardstickTimes, beside: Sequence[Samples]) -> YardstickTimes | None:
    """The reference with the parts of BESIDE as they were beside other processes; None without samples."""
    found = dict(zip(BESIDE, (x.timing().median_s for x in beside), strict=False))
    if not all(found.get(name) for name in BESIDE):
        return None
    return YardstickTimes(compute_s=found["compute"], memory_s=reference.memory_s, interpreter_s=found["interpreter"])


def _stored_windows(parts: Sequence[Samples], start_s: float, window_s: float) -> Iterable[SpeedWindow]:
    last = max(x.clean_at_s[-1] for x in parts)
    for window in range(1 + int((last - start_s) // window_s)):
        begin_s, end_s = start_s + window * window_s, start_s + (window + 1) * window_s
        inside = [x.between(begin_s, end_s) for x in parts]
        if times := median_times(inside):
            yield SpeedWindow(
                start_s=round(begin_s - start_s, 3),
                end_s=round(min(end_s, last) - start_s, 3),
                times=times,
                num_readings=len(inside[0].clean_s),
            )


def _nearest_median(at_s: Floats, values: Floats, moments_s: Floats) -> Floats:
    """For each moment the median of the nearest values in time."""
    num = min(_NUM_AROUND, len(at_s))
    first = np.clip(np.searchsorted(at_s, moments_s) - num // 2, 0, len(at_s) - num)
    medians: Floats = np.median(values[first[:, None] + np.arange(num)], axis=1)
    return medians
