"""When a device computed within a time range: from its first to its last kernel, or operation where there is no GPU.

This excludes sending and waiting to receive. A kernel belongs to the range in which it was launched, by any thread,
because on a GPU a backward runs on its own threads. Operations count if they are on the range's thread, after its last
receive and before the next send.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from gplan.interop.traces.profiler_marks import Mark, OperationRole
from gplan.interop.traces.reading import Kernels, Operations, RankTrace

Times = tuple[float, float]
"""Start and end in microseconds of the trace's clock."""


@dataclass(frozen=True)
class TracedDevice:
    """The device of one rank."""

    trace: RankTrace

    @property
    def has_kernels(self) -> bool:
        """Whether the trace has GPU times, which are then used."""
        return self.kernels.launch_us.size > 0

    @property
    def kernels(self) -> Kernels:
        """What ran on the GPU."""
        return self.trace.kernels

    def times(self, stretch: Mark) -> Times | None:
        """When the device computed for a range; None if it did not."""
        return self._by_kernels(stretch) if self.has_kernels else self._by_operations(stretch)

    def turning_us(self, stretch: Mark) -> float:
        """When the first backward within a range begins, on any thread; the end of the range if there is none."""
        within = self.trace.operations.start_us[self._backwards]
        first = int(np.searchsorted(within, stretch.start_us))
        return float(within[first]) if first < within.size and within[first] < stretch.end_us else stretch.end_us

    @cached_property
    def _backwards(self) -> NDArray[np.int64]:
        return np.flatnonzero(self.trace.operations.role == OperationRole.GOES_BACK)

    def _by_kernels(self, stretch: Mark) -> Times | None:
        first, end = np.searchsorted(self.kernels.launch_us, [stretch.start_us, stretch.end_us])
        if first == end:
            return None
        return float(self.kernels.start_us[first:end].min()), float(self.kernels.end_us[first:end].max())

    def _by_operations(self, stretch: Mark) -> Times | None:
        own = within(self.trace.operations, stretch)
        received = np.flatnonzero(own.role == OperationRole.RECEIVES)
        after = int(received[-1]) + 1 if received.size else 0
        sent = np.flatnonzero(own.role[after:] == OperationRole.SENDS)
        end = after + int(sent[0]) if sent.size else own.role.size
        return None if after == end else (float(own.start_us[after]), float(own.end_us[end - 1]))


def within(operations: Operations, stretch: Mark) -> Operations:
    """The operations on the range's thread that begin within it."""
    first, end = np.searchsorted(operations.start_us, [stretch.start_us, stretch.end_us])
    kept = first + np.flatnonzero(operations.thread[first:end] == stretch.thread)
    return Operations(
        start_us=operations.start_us[kept],
        end_us=operations.end_us[kept],
        thread=operations.thread[kept],
        role=operations.role[kept],
    )
