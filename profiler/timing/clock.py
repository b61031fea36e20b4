"""Clocks for a CPU and a GPU, and samples of durations with their spread.

On a CPU a sample is clean if the calling thread had its core for (nearly) all of the elapsed time; otherwise it is
refused and counted. On a GPU two events on the current stream enclose the work; one synchronisation reads the times of
many samples.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from gplan.core import Timing
from gplan.core.host_speed import mean_near_median
from gplan.core.layer_cost import quartiles_median_error

_MOST_WAITING = 0.05  # share of a sample that may pass without a core
_SHORTEST_WAIT_S = 2e-4  # below the resolution of the clocks
_LEAST_SAMPLES = 5  # for a standard error
_SWEPT_BYTES = 64 * 2**20  # more than what a core's own caches hold
DISTURBED = 2.0  # times the median: a sample that other work interrupted
_LEAST_CLEAN = 3  # with fewer, refused samples count too
_LAUNCH_BOUND_SHARE = 0.9  # launches over device time; 1 less the resolution of events


@dataclass(slots=True)
class Samples:
    """Clean and refused durations of one action, and when each was taken; on a GPU also the host's launch times.

    Refused ones are processor seconds, unless waiting is a part of the action.
    """

    clean_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    launch_s: list[float] = field(default_factory=list)
    clean_at_s: list[float] = field(default_factory=list)  # time.time: on a CPU the middle, on a GPU after the launches
    refused_at_s: list[float] = field(default_factory=list)

    def add(self, wall_s: float, busy_s: float, *, waits: bool = False) -> None:
        """Add a sample that ends now; it is refused if the thread waited for its core too long.

        Of a refused one the processor time is kept, as other processes had the rest; the wall time if the action `waits`.
        """
        is_clean, at_s = is_undisturbed(wall_s, busy_s), time.time() - wall_s / 2
        (self.clean_s if is_clean else self.refused_s).append(wall_s if is_clean or waits else busy_s)
        (self.clean_at_s if is_clean else self.refused_at_s).append(at_s)

    def add_clean(self, seconds: float, at_s: float) -> None:
        """Add a clean sample that was taken at that moment."""
        self.clean_s.append(seconds)
        self.clean_at_s.append(at_s)

    def extend(self, other: Samples) -> None:
        """Add all samples of `other`."""
        for x in fields(self):
            getattr(self, x.name).extend(getattr(other, x.name))

    def divided(self, slowdowns: Callable[[Sequence[float]], NDArray[np.float64]]) -> Samples:
        """The samples, each divided by the slowdown of its moment; launch times are left as they are."""
        clean_s, refused_s = (
            np.divide(values_s, slowdowns(at_s)).tolist()
            for values_s, at_s in ((self.clean_s, self.clean_at_s), (self.refused_s, self.refused_at_s))
        )
        return replace(self, clean_s=clean_s, refused_s=refused_s)

    def between(self, start_s: float, end_s: float) -> Samples:
        """The clean samples of moments in [start, end)."""
        inside = [(x, at) for x, at in zip(self.clean_s, self.clean_at_s, strict=True) if start_s <= at < end_s]
        return Samples(clean_s=[x for x, _ in inside], clean_at_s=[at for _, at in inside])

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
        """As `timing`, scaled from the median to the mean of the clean samples; disturbed ones count as the median."""
        if not self.clean_s:
            return self.timing()
        return self.timing().times(float(mean_near_median(self.clean_s, most=DISTURBED)) / median_s(self.clean_s))

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


class AtOneSpeed(Protocol):
    """Brings samples to one speed of the host, which is known only when everything is sampled.

    `beside`: those taken while other processes computed.
    """

    def __call__(self, samples: Samples, *, beside: bool = False) -> Samples:
        """The samples as they would be at that speed."""


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


class DeviceEvent(Protocol):
    """The used part of torch.cuda.Event."""

    def record(self) -> None:
        """Put the event on the current stream."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds to a later event; both are complete."""


def _timing_event() -> DeviceEvent:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class CudaClock(Clock):
    """Time between two events on the current stream, read at the next flush.

    Where launches take longer than the kernels, the time is that of the launches. Flush at least every thousand
    kernels: when the driver's queue is full the host waits, and its launches seem longer than they are.
    """

    warmup_s = 0.5  # until the GPU's clocks are up
    warmup_rounds = 10  # until libraries have chosen their kernels and the allocator has its blocks

    def __init__(
        self,
        *,
        make_event: Callable[[], DeviceEvent] = _timing_event,
        synchronize: Callable[[], object] = torch.cuda.synchronize,
    ) -> None:
        self._make_event, self._synchronize = make_event, synchronize
        self._pending: list[tuple[Samples, DeviceEvent, DeviceEvent, float, float]] = []

    def begin(self) -> Callable[[Samples], None]:
        """Put the first event on the stream; the returned function puts the second there."""
        first, last = self._make_event(), self._make_event()
        first.record()
        watch = time.perf_counter()

        def end(samples: Samples) -> None:
            launch_s = time.perf_counter() - watch
            last.record()
            self._pending.append((samples, first, last, launch_s, time.time()))

        return end

    def flush(self) -> None:
        """Synchronize once and add all durations since the last flush."""
        if not self._pending:
            return
        self._synchronize()
        for samples, start, end, launch_s, at_s in self._pending:
            samples.add_clean(start.elapsed_time(end) / 1e3, at_s)
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
