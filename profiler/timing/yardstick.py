"""The yardstick: fixed work of about a millisecond that is timed beside the samples, to know how fast the host was.

Its parts are bound by compute, by memory, and by the interpreter. The speed of a shared host changes between phases of
some seconds or minutes; layers follow the parts by exponents, which are fitted to windows of the profile by least
squares (`fit_exponents`). Samples are then divided by the slowdown of their moment (`SpeedHistory`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, combinations, cycle
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from gplan.core.host_speed import HostSpeed, SpeedExponents, SpeedWindow, YardstickTimes
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
_MOST_WINDOWS = 40  # in which exponents are fitted
_NUM_STORED = 20  # windows in a profile
_STREAMED_FLOATS = 2**24  # 64 MiB, more than the caches hold that a core shares
_LEAST_WINDOWS = 8
_LEAST_NOISE = 0.01  # standard deviation of a window's logarithms
_NUM_REFITS = 3
_UNCERTAINTY = 0.3  # standard deviation of an exponent around 1/3, before any is learned
_SUM = 0.8, 1.2  # bounds of the exponents' sum


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


def is_work_alone(name: str) -> bool:
    """Whether samples of this name are times of work with no neighbours: of a layer, the loss, a stage or the model."""
    return name.endswith(("/forward", "/backward")) and not any(x in name for x in ("together/", "excess/"))


def median_times(parts: Sequence[Samples]) -> YardstickTimes | None:
    """The median of each part, as of layers; None without readings of all."""
    compute_s, memory_s, interpreter_s = (x.timing().median_s for x in parts)
    if not (compute_s and memory_s and interpreter_s):
        return None
    return YardstickTimes(compute_s=compute_s, memory_s=memory_s, interpreter_s=interpreter_s)


class SpeedHistory:
    """The slowdown of the host at each moment, by readings of the yardstick, and the exponents learned beside them.

    `work` has the samples of each action. With too few readings the speed counts as steady.
    """

    def __init__(self, parts: Sequence[Samples], work: Iterable[Samples], beside: Sequence[Samples] = ()) -> None:
        found = median_times(parts)
        self.host_speed = None if found is None else HostSpeed(reference=found, exponents=SpeedExponents())
        self._is_known = min(len(x.clean_s) for x in parts) >= _LEAST_READINGS
        if found is None or not self._is_known:
            return
        self._at = [np.array(x.clean_at_s) for x in parts]
        self._logs = [np.log(np.array(x.clean_s) / np.median(x.clean_s)) for x in parts]
        start_s, end_s = min(x.clean_at_s[0] for x in parts), max(x.clean_at_s[-1] for x in parts)
        window_s = max(_WINDOW_S, (end_s - start_s) / _MOST_WINDOWS)
        fitted = fit_exponents(*self._windows_of_work(work, start_s, window_s))
        exponents = SpeedExponents(**dict(zip(PARTS, fitted, strict=True)))
        windows = tuple(_stored_windows(parts, start_s, max(_WINDOW_S, (end_s - start_s) / _NUM_STORED)))
        self.host_speed = HostSpeed(
            reference=found, exponents=exponents, windows=windows, beside=_times_beside(found, beside)
        )

    def slowdowns(self, at_s: Sequence[float]) -> Floats:
        """The slowdown at each moment: by the medians of the nearest readings of each part."""
        if self.host_speed is None or not self._is_known:
            return np.ones(len(at_s))
        by = [getattr(self.host_speed.exponents, name) for name in PARTS]
        nearest = (_nearest_median(at, logs, np.array(at_s)) for at, logs in zip(self._at, self._logs, strict=True))
        slowdowns: Floats = np.exp(sum(exponent * logs for exponent, logs in zip(by, nearest, strict=True)))
        return slowdowns

    def at_one_speed(self, samples: Samples) -> Samples:
        """The samples as they would be at the median speed."""
        return samples.divided(self.slowdowns)

    def _windows_of_work(self, work: Iterable[Samples], start_s: float, window_s: float) -> tuple[Floats, Floats]:
        """Of each window with both: the logarithms of the parts (a row), and of the work, over their medians."""
        seconds: dict[int, float] = {}
        usual_s: dict[int, float] = {}
        for samples in work:
            if not (len(samples.clean_s) == len(samples.clean_at_s) >= _LEAST_READINGS):
                continue
            median_s = float(np.median(samples.clean_s))
            for one_s, at_s in zip(samples.clean_s, samples.clean_at_s, strict=True):
                window = int((at_s - start_s) // window_s)
                seconds[window] = seconds.get(window, 0.0) + one_s
                usual_s[window] = usual_s.get(window, 0.0) + median_s
        rows, found = [], []
        indices = [((at - start_s) // window_s).astype(int) for at in self._at]
        for window in sorted(seconds):
            inside = [logs[index == window] for logs, index in zip(self._logs, indices, strict=True)]
            if all(map(len, inside)) and seconds[window] > 0 and usual_s[window] > 0:
                rows.append([float(np.median(x)) for x in inside])
                found.append(float(np.log(seconds[window] / usual_s[window])))
        return np.array(rows).reshape(-1, len(PARTS)), np.array(found)


def fit_exponents(parts: Floats, work: Floats) -> tuple[float, ...]:
    """The exponents by which work follows the parts; [n, 3] and [n] logarithms of times over their medians, by window.

    Least squares with exponents of 0 or more, drawn to equal ones as far as the noise of the windows leaves them
    uncertain; their sum is kept near 1. With few windows they are equal.

    >>> fit_exponents(np.zeros((0, 3)), np.zeros(0))
    (0.333, 0.333, 0.333)
    """
    num_windows, num = parts.shape
    found = np.full(num, 1 / num)
    if num_windows < _LEAST_WINDOWS:
        return tuple(np.round(found, 3).tolist())
    centred, target = parts - parts.mean(axis=0), work - work.mean()
    for _ in range(_NUM_REFITS):  # the noise is what the exponents before do not explain
        noise = float(((target - centred @ found) ** 2).sum() / (num_windows - num))
        found = _nonnegative_ridge(centred, target, pull=max(_LEAST_NOISE**2, noise) / _UNCERTAINTY**2)
    total = float(found.sum())
    scale = min(max(total, _SUM[0]), _SUM[1]) / total if total else 1.0
    return tuple(np.round(found * scale, 3).tolist())


def _nonnegative_ridge(rows: Floats, target: Floats, *, pull: float) -> Floats:
    """The weights of 0 or more with the least squared error plus `pull` times their squared distance from equal ones.

    Exact: the optimum is that of one of the seven sets of weights that are not 0. Equal ones if all sets give negative
    weights.
    """
    num = rows.shape[1]
    best, best_cost = np.full(num, 1 / num), np.inf
    for chosen in chain.from_iterable(combinations(range(num), size) for size in range(1, num + 1)):
        some, weights = rows[:, chosen], np.zeros(num)
        gram = some.T @ some + pull * np.eye(len(chosen))
        weights[list(chosen)] = np.linalg.solve(gram, some.T @ target + pull / num)
        cost = float(((target - rows @ weights) ** 2).sum() + pull * ((weights - 1 / num) ** 2).sum())
        if weights.min() >= 0 and cost < best_cost:
            best, best_cost = weights, cost
    return best


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
