"""Clocks for a CPU and a GPU, and samples of durations with their spread.

On a CPU a sample is clean if the calling thread had its core for (nearly) all of the elapsed time; otherwise it is
refused and counted. On a GPU two events on the current stream enclose the work; one synchronisation reads the times of
many samples.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np
import torch

from gplan.core import Timing
from gplan.core.layer_cost import quartiles_median_error

_MOST_WAITING = 0.05  # share of a sample that may pass without a core
_SHORTEST_WAIT_S = 2e-4  # below the resolution of the clocks
_LEAST_SAMPLES = 5  # for a standard error
_SWEPT_BYTES = 64 * 2**20  # more than what a core's own caches hold
_DISTURBED = 2.0  # times the median: a sample that other work interrupted
_LEAST_CLEAN = 3  # with fewer, refused samples count too
_LAUNCH_BOUND_SHARE = 0.9  # launches over device time; 1 less the resolution of events


@dataclass(slots=True)
class Samples:
    """Clean and refused durations of one action; on a GPU also the host's launch times.

    Refused ones are processor seconds, unless waiting is a part of the action.
    """

    clean_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    launch_s: list[float] = field(default_factory=list)

    def add(self, wall_s: float, busy_s: float, *, waits: bool = False) -> None:
        """Add a sample; it is refused if the thread waited for its core too long.

        Of a refused one the processor time is kept, as other processes had the rest; the wall time if the action `waits`.
        """
        is_clean = is_undisturbed(wall_s, busy_s)
        (self.clean_s if is_clean else self.refused_s).append(wall_s if is_clean or waits else busy_s)

    def extend(self, other: Samples) -> None:
        """Add all samples of `other`."""
        for x in fields(self):
            getattr(self, x.name).extend(getattr(other, x.name))

    def timing(self) -> Timing:
        """Median and quartiles of the clean samples; of the shorter half of all if fewer than three are clean.

        An action that was never run, such as the backward of a frozen layer, takes 0 s.
        """
        if not self.clean_s and not self.refused_s:
            return Timing.exactly(0.0, origin="measured")
        values = self.clean_s
        if self.is_disturbed:
            everything = sorted(self.clean_s + self.refused_s)
            values = everything[: max(1, (len(everything) + 1) // 2)]
        low_s, middle_s, high_s = np.quantile(values, [0.25, 0.5, 0.75]).tolist()
        return Timing(
            median_s=middle_s, low_s=low_s, high_s=high_s, num_samples=len(values), num_refused=len(self.refused_s)
        )

    def mean_timing(self) -> Timing:
        """As `timing`, scaled from the median to the mean of the clean samples.

        Those more than twice off the median count as the median: a disturbance does not count, a skewed spread does.
        """
        if not self.clean_s:
            return self.timing()
        found, middle_s = np.array(self.clean_s), median_s(self.clean_s)
        is_near = (found <= _DISTURBED * middle_s) & (middle_s <= _DISTURBED * found)
        return self.timing().times(float(np.where(is_near, found, middle_s).mean()) / middle_s)

    @property
    def is_disturbed(self) -> bool:
        """Whether there are too few clean samples, so that refused ones count too."""
        return bool(self.refused_s) and len(self.clean_s) < _LEAST_CLEAN

    @property
    def median_error_s(self) -> float:
        """The standard error of the median of the clean samples; infinite below five."""
        if len(self.clean_s) < _LEAST_SAMPLES:
            return float("inf")
        low, high = np.quantile(self.clean_s, [0.25, 0.75]).tolist()
        return quartiles_median_error(low, high, len(self.clean_s))

    def settled(self, share: float) -> bool:
        """Whether the standard error of the median is at most this share of it."""
        return bool(self.clean_s) and self.median_error_s <= share * median_s(self.clean_s)

    @property
    def is_launch_bound(self) -> bool:
        """Whether the GPU waits for its host: launches take as long as the work."""
        return bool(self.launch_s) and median_s(self.launch_s) >= _LAUNCH_BOUND_SHARE * median_s(self.clean_s)


class Clock(ABC):
    """How a piece of work is timed on one kind of device."""

    warmup_s: ClassVar[float]  # of work before the first sample counts
    warmup_rounds: ClassVar[int]  # repetitions of the work before the first sample counts

    @abstractmethod
    def begin(self) -> Callable[[Samples], None]:
        """Start timing; the returned function ends it, and the samples get the duration by the next flush."""

    def time(self, samples: Samples, work: Callable[..., Any], *args: Any) -> Any:
        """Run and return `work(*args)`; its duration is in `samples` after the next flush at the latest."""
        end = self.begin()
        result = work(*args)
        end(samples)
        return result

    @abstractmethod
    def flush(self) -> None:
        """Wait for the device and add all pending durations."""


class CpuClock(Clock):
    """Wall time of the calling thread; a sample is refused where the thread waited for its core."""

    warmup_s = 0.0
    warmup_rounds = 1  # after the neighbours are forked it takes twice as long: each page it writes is copied

    def begin(self) -> Callable[[Samples], None]:
        """Start a sample; the returned function ends it and adds its duration."""
        busy_s, wall_s = time.thread_time(), time.perf_counter()

        def end(samples: Samples) -> None:
            seconds = time.perf_counter() - wall_s
            samples.add(seconds, time.thread_time() - busy_s)

        return end

    def flush(self) -> None:
        """Nothing is pending."""


class CudaClock(Clock):
    """Time between two events on the current stream, read at the next flush.

    Where launches take longer than the kernels, the time is that of the launches. Flush at least every thousand
    kernels: when the driver's queue is full the host waits, and its launches seem longer than they are.
    """

    warmup_s = 0.5  # until the GPU's clocks are up
    warmup_rounds = 10  # until libraries have chosen their kernels and the allocator has its blocks

    def __init__(self) -> None:
        self._pending: list[tuple[Samples, torch.cuda.Event, torch.cuda.Event, float]] = []

    def begin(self) -> Callable[[Samples], None]:
        """Put the first event on the stream; the returned function puts the second there."""
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        first.record()
        watch = time.perf_counter()

        def end(samples: Samples) -> None:
            launch_s = time.perf_counter() - watch
            last.record()
            self._pending.append((samples, first, last, launch_s))

        return end

    def flush(self) -> None:
        """Synchronize once and add all durations since the last flush."""
        if not self._pending:
            return
        torch.cuda.synchronize()
        for samples, start, end, launch_s in self._pending:
            samples.clean_s.append(start.elapsed_time(end) / 1e3)
            samples.launch_s.append(launch_s)
        self._pending.clear()


def cold_caches(device: str) -> Callable[[], object]:
    """A function that fills the caches of a core with other data; on a GPU it does nothing."""
    swept = torch.zeros(_SWEPT_BYTES if device == "cpu" else 0, dtype=torch.uint8)
    return lambda: swept.add_(1)


def is_undisturbed(wall_s: float, busy_s: float) -> bool:
    """Whether the thread had its core for (nearly) all of a sample."""
    return wall_s - busy_s <= max(_MOST_WAITING * wall_s, _SHORTEST_WAIT_S)


def median_s(values: Sequence[float]) -> float:
    """The median of some durations, in seconds."""
    return float(np.median(values))
