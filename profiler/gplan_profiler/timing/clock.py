"""Clocks for a CPU and a GPU, and samples of durations with their spread.

On a CPU a sample is clean if the calling thread had its core for (nearly) all of the elapsed time; otherwise it is
refused and counted. On a GPU two events on the current stream enclose the work.

A layer takes two times on a GPU: the host's to enqueue its kernels, and the device's to run them. One sample gives both. The
device is idle and its queue empty when the host begins, and first gets a kernel that spins: for so long that the host has
enqueued everything behind it before the device comes to the layer. Where the host cannot be so far ahead, as it waits for
the device, or a layer has more kernels than the queue holds, the layer is timed without that kernel.
"""

from __future__ import annotations

import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Protocol, TypeVar, cast

import numpy as np
import torch

from gplan.core import Timing
from gplan.core.layer_cost import quartiles_median_error
from gplan_profiler.torch_compat import spin_on_gpu

T = TypeVar("T")

_MOST_WAITING = 0.05  # share of a sample that may pass without a core
_SHORTEST_WAIT_S = 2e-4  # below the resolution of the clocks
_LEAST_SAMPLES = 5  # for a standard error
_DISTURBED = 2.0  # times the median: a sample that other work interrupted
_LEAST_CLEAN = 3  # with fewer, refused samples count too
_SPIN = 2.0  # the device spins for so many times what the host took before; assumed to be enough
_LEAST_SPIN_S = 5e-5
_MOST_BEHIND = 3  # samples in which the device caught up with its host, before the first in which it did not
_SPIN_CYCLES = 20_000_000  # some 10 ms, to find out how long a cycle takes
_SYNCHRONIZED = "synchronizing CUDA operation"  # in the warning of torch


@dataclass(slots=True)
class Samples:
    """Clean and refused durations of one action. On a GPU these are the device's, and the host's are kept beside them.

    Refused ones are processor seconds, unless waiting is a part of the action.
    """

    clean_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    host_s: list[float] = field(default_factory=list)
    never_ahead: bool = False  # whether the host cannot enqueue all of it before the device begins

    @property
    def on_host(self) -> Samples:
        """The host's durations."""
        return Samples(self.host_s)

    def add(self, wall_s: float, busy_s: float, *, waits: bool = False) -> None:
        """Add a sample; it is refused if the thread waited for its core too long.

        Of a refused one the processor time is kept, as other processes had the rest; the wall time if the action `waits`.
        """
        is_clean = is_undisturbed(wall_s, busy_s)
        (self.clean_s if is_clean else self.refused_s).append(wall_s if is_clean or waits else busy_s)

    def extend(self, other: Samples) -> None:
        """Add all samples of `other`."""
        for name in ("clean_s", "refused_s", "host_s"):
            getattr(self, name).extend(getattr(other, name))

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
    def is_host_bound(self) -> bool:
        """Whether the host takes longer to enqueue the work than the device to run it."""
        return bool(self.host_s and self.clean_s) and median_s(self.host_s) > median_s(self.clean_s)


class Clock(ABC):
    """How a piece of work is timed on one kind of device."""

    has_host: ClassVar[bool] = False  # whether layers have times of the host beside those of the device
    warmup_s: ClassVar[float]  # of work before the first sample counts
    warmup_rounds: ClassVar[int]  # repetitions of the work before the first sample counts

    @abstractmethod
    def begin(self, samples: Samples) -> Callable[[], None]:
        """Start timing; the returned function ends it, and the samples get the duration by the next flush."""

    def begin_layer(self, samples: Samples) -> Callable[[], None]:
        """As `begin`, for a pass of one layer: where host and device have clocks of their own, each is timed alone."""
        return self.begin(samples)

    def time(self, samples: Samples, work: Callable[..., Any], *args: Any) -> Any:
        """Run and return `work(*args)`; its duration is in `samples` after the next flush at the latest."""
        end = self.begin(samples)
        result = work(*args)
        end()
        return result

    def time_layer(self, samples: Samples, work: Callable[..., Any], *args: Any) -> Any:
        """As `time`, by `begin_layer`."""
        end = self.begin_layer(samples)
        result = work(*args)
        end()
        return result

    def waited(self, work: Callable[[], T]) -> tuple[T, bool]:
        """The result of `work()`, and whether the host waited for the device in it."""
        return work(), False

    @abstractmethod
    def flush(self) -> None:
        """Wait for the device and add all pending durations."""


class CpuClock(Clock):
    """Wall time of the calling thread; a sample is refused where the thread waited for its core."""

    warmup_s = 0.0
    warmup_rounds = 1  # after the neighbours are forked it takes twice as long: each page it writes is copied

    def begin(self, samples: Samples) -> Callable[[], None]:
        """Start a sample; the returned function ends it and adds its duration."""
        busy_s, wall_s = time.thread_time(), time.perf_counter()

        def end() -> None:
            seconds = time.perf_counter() - wall_s
            samples.add(seconds, time.thread_time() - busy_s)

        return end

    def flush(self) -> None:
        """Nothing is pending."""


class Event(Protocol):
    """A place in a device's queue."""

    def query(self) -> bool:
        """Whether the device has come to it."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds from this one to another, once the device has come to both."""


class CudaQueue:
    """The current stream of a GPU, and the clock of its host."""

    def now_s(self) -> float:
        """The host's clock."""
        return time.perf_counter()

    def record(self) -> Event:
        """Enqueue an event."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return cast(Event, event)

    def spin(self, seconds: float) -> None:
        """Enqueue a kernel that does nothing for so long."""
        spin_on_gpu(round(seconds / self._cycle_s))

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize()

    @contextmanager
    def synchronizations(self) -> Iterator[list[str]]:
        """A list that has, after the block, what waited for the device in it."""
        before, found = torch.cuda.get_sync_debug_mode(), list[str]()
        with warnings.catch_warnings(record=True) as caught:  # also that this mode is a prototype
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield found
            finally:
                torch.cuda.set_sync_debug_mode(before)
        found += [text for x in caught if _SYNCHRONIZED in (text := str(x.message))]

    @cached_property
    def _cycle_s(self) -> float:
        spin_on_gpu(_SPIN_CYCLES)  # until the GPU's clock is up
        first = self.record()
        spin_on_gpu(_SPIN_CYCLES)
        last = self.record()
        self.synchronize()
        return first.elapsed_time(last) / 1e3 / _SPIN_CYCLES


class CudaClock(Clock):
    """Time between two events on the current stream, read at the next flush; of layers also the host's."""

    has_host = True
    warmup_s = 0.5  # until the GPU's clocks are up
    warmup_rounds = 10  # until libraries have chosen their kernels and the allocator has its blocks

    def __init__(self, queue: CudaQueue | None = None) -> None:
        self._queue = queue or CudaQueue()
        self._pending: list[tuple[list[float], Event, Event]] = []

    def begin(self, samples: Samples) -> Callable[[], None]:
        """Put the first event into the queue; the returned function puts the second there."""
        first, start_s = self._queue.record(), self._queue.now_s()

        def end() -> None:
            samples.host_s.append(self._queue.now_s() - start_s)
            self._pending.append((samples.clean_s, first, self._queue.record()))

        return end

    def begin_layer(self, samples: Samples) -> Callable[[], None]:
        """Wait for the device, let it spin, and put the first event behind that.

        The first sample is of the host alone, as how long to spin is not known yet. If the device caught up with its host
        in the first three, it always does so: then nothing spins, and all samples count.
        """
        self.flush()
        self._queue.synchronize()
        samples.never_ahead |= len(samples.refused_s) >= _MOST_BEHIND and not samples.clean_s
        knows_host = bool(samples.host_s)
        spins = knows_host and not samples.never_ahead
        if spins:
            self._queue.spin(max(_LEAST_SPIN_S, _SPIN * median_s(samples.host_s)))
        first = self._queue.record()
        start_s = self._queue.now_s()

        def end() -> None:
            host_s = self._queue.now_s() - start_s
            is_ahead = not first.query()
            last = self._queue.record()
            if is_ahead or not spins:
                samples.host_s.append(host_s)
            if knows_host:
                is_clean = is_ahead or samples.never_ahead
                self._pending.append((samples.clean_s if is_clean else samples.refused_s, first, last))

        return end

    def waited(self, work: Callable[[], T]) -> tuple[T, bool]:
        """The result of `work()`, and whether the host waited for the device in it."""
        with self._queue.synchronizations() as found:
            result = work()
        return result, bool(found)

    def flush(self) -> None:
        """Synchronize once and add all durations since the last flush."""
        if not self._pending:
            return
        self._queue.synchronize()
        for seconds, first, last in self._pending:
            seconds.append(first.elapsed_time(last) / 1e3)
        self._pending.clear()


def is_undisturbed(wall_s: float, busy_s: float) -> bool:
    """Whether the thread had its core for (nearly) all of a sample."""
    return wall_s - busy_s <= max(_MOST_WAITING * wall_s, _SHORTEST_WAIT_S)


def median_s(values: Sequence[float]) -> float:
    """The median of some durations, in seconds."""
    return float(np.median(values))
