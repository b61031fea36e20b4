"""When a device computed within a stretch of its process: from the first kernel to the last, or without a GPU from the
first operation to the last. Leftover for what another rank sends, and the sending itself, are thereby left out.

A kernel belongs to the stretch in which it was launched, by whichever thread: on a GPU a backward runs on threads of
its own. Operations count on the stretch's own thread, after the last receive, up to the next send.
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
class Device:
    """The device of one rank."""

    trace: RankTrace

    @property
    def has_kernels(self) -> bool:
        """Whether the trace has GPU times; it is then these that count."""
        return self.kernels.launch_us.size > 0

    @property
    def kernels(self) -> Kernels:
        """What ran on the GPU."""
        return self.trace.kernels

    def times(self, stretch: Mark) -> Times | None:
        """When the device computed for a stretch; None where it had nothing to do."""
        return self._by_kernels(stretch) if self.has_kernels else self._by_operations(stretch)

    def turning_us(self, stretch: Mark) -> float:
        """When the first backward within a stretch begins, on whichever thread; its end where there is none."""
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
    """The operations of the stretch's own thread that begin within it."""
    first, end = np.searchsorted(operations.start_us, [stretch.start_us, stretch.end_us])
    kept = first + np.flatnonzero(operations.thread[first:end] == stretch.thread)
    return Operations(
        start_us=operations.start_us[kept],
        end_us=operations.end_us[kept],
        thread=operations.thread[kept],
        role=operations.role[kept],
    )
