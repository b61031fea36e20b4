"""Memory by the allocator's own record: every block that torch's allocator for a device gave and took back, in order.

torch.profiler reports each allocation, scratch space inside kernels included (memory that a library takes past torch's
allocator, such as oneDNN's or NCCL's, is not seen). Blocks that were there before the trace began are not part of it.
A CUDA block is given and taken when the host asks, not when kernels run, so its moments are the host's as well; its
size is the allocator's, rounded up to 512 bytes at least. Recording the host's activity is enough for both devices.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch._C._profiler import _EventType

from gplan.errors import ModelError

_NEVER_NS = 2**63 - 1

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the tracer's own messages are not for the user


@dataclass(frozen=True, slots=True)
class AllocationEvent:
    """One block given (bytes above 0) or taken back (below 0), at a moment of `time.time_ns`."""

    time_ns: int
    address: int
    num_bytes: int


@dataclass(slots=True)
class AllocationTrace:
    """What the allocator did; filled when the tracing ends.
    Each question takes the time of the window it asks about."""

    events: tuple[AllocationEvent, ...] = ()
    peak_reserved_bytes: int = 0  # the most that a CUDA allocator held of its device, older blocks too; 0 on a CPU
    _index: _Index | None = field(default=None, init=False, repr=False)

    def fill(self, roots: Sequence[Any], device: torch.device) -> None:
        """Take this device's blocks from the profiler's tree of events."""
        nodes = _allocations(roots, device)
        blocks = [(node.start_time_ns, node.extra_fields) for node in nodes]
        self.events = tuple(AllocationEvent(time_ns, block.ptr, block.alloc_size) for time_ns, block in blocks)
        self.peak_reserved_bytes = max((block.total_reserved for _, block in blocks), default=0)

    def peak_bytes(self, start_ns: int = 0, end_ns: int = _NEVER_NS, *, without: tuple[int, int] | None = None) -> int:
        """The most bytes held within a window, above what was there when the trace began.

        Blocks that were given in the window `without`, which ends before this one begins, do not count.
        """
        index = self._indexed()
        first, end = np.searchsorted(index.times_ns, [start_ns, end_ns])
        levels = index.levels[first : end + 1]
        if without is None:
            return int(levels.max())
        given_ns, freed_ns, num_bytes = self.blocks()
        some = (without[0] <= given_ns) & (given_ns < without[1])
        order = np.argsort(freed_ns[some], kind="stable")
        gone = np.concatenate([[0], np.cumsum(num_bytes[some][order])])
        moments_ns = np.concatenate([[start_ns - 1], index.times_ns[first:end]])
        num_gone = np.searchsorted(freed_ns[some][order], moments_ns, side="right")
        return int((levels - gone[-1] + gone[num_gone]).max())

    def blocks(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """[B] each: when every block was given and when it was taken back, far off if never, and its bytes."""
        return self._indexed().blocks

    def alive(self, start_ns: int, end_ns: int, at_ns: int) -> dict[int, int]:
        """Address to size of the blocks given within a window and still held at a later moment."""
        index = self._indexed()
        first, end = np.searchsorted(index.times_ns, [start_ns, min(end_ns, at_ns)])
        held = first + np.flatnonzero(index.freed_ns[first:end] >= at_ns)
        return {self.events[x].address: self.events[x].num_bytes for x in held}

    def is_kept(self, address: int, end_ns: int, at_ns: int) -> bool:
        """Whether a block that was given at this address before `end_ns` is still held at a later moment."""
        index = self._indexed()
        given = index.given.get(address, [])
        return any(index.times_ns[x] < end_ns and index.freed_ns[x] >= at_ns for x in given)

    def _indexed(self) -> _Index:
        if self._index is None:
            self._index = _Index.of(self.events)
        return self._index


@dataclass(frozen=True, slots=True, kw_only=True)
class _Index:
    """The events as arrays: when each was, what was held after it, and when the block that it gave was taken back."""

    times_ns: NDArray[np.int64]  # [E]
    levels: NDArray[np.int64]  # [E+1]: bytes before the first event, after it, after the second, ...
    freed_ns: NDArray[np.int64]  # [E]: -1 for blocks taken back
    given: dict[int, list[int]]  # by address
    blocks: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]  # as `AllocationTrace.blocks`

    @classmethod
    def of(cls, events: Sequence[AllocationEvent]) -> _Index:
        """One walk over the events."""
        freed_ns = np.full(len(events), -1, dtype=np.int64)
        given: dict[int, list[int]] = {}
        for index, event in enumerate(events):
            if event.num_bytes > 0:
                freed_ns[index] = _NEVER_NS
                given.setdefault(event.address, []).append(index)
            elif event.address in given:
                last = given[event.address][-1]
                freed_ns[last] = min(freed_ns[last], event.time_ns)
        sizes = np.array([0, *(event.num_bytes for event in events)], dtype=np.int64)
        times_ns, some = np.array([event.time_ns for event in events], dtype=np.int64), np.flatnonzero(freed_ns >= 0)
        return cls(
            times_ns=times_ns,
            levels=np.cumsum(sizes),
            freed_ns=freed_ns,
            given=given,
            blocks=(times_ns[some], freed_ns[some], sizes[1:][some]),
        )


@contextmanager
def traced_allocations(device: str = "cpu") -> Iterator[AllocationTrace]:
    """Record every allocation on this device inside the block; slows it down, so nothing is timed there.

    "cuda" is the current GPU. Its allocator keeps what is given back to it: `torch.cuda.empty_cache()` beforehand makes
    `peak_reserved_bytes` that of the block alone.
    """
    trace, traced = AllocationTrace(), _with_index(device)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with (
        _without_warning("Memory block of unknown size"),  # blocks that are older than the trace are expected
        torch.profiler.profile(activities=activities, profile_memory=True, acc_events=False) as profile,
    ):
        yield trace
    if profile.profiler is None or profile.profiler.kineto_results is None:
        raise ModelError("torch.profiler recorded nothing; is another profiler running in this process?")
    trace.fill(profile.profiler.kineto_results.experimental_event_tree(), traced)


@contextmanager
def _without_warning(words: str) -> Iterator[None]:
    """Keep native code from printing lines with these words to standard error; all others are printed afterwards."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            said.seek(0)
            for line in said.readlines():
                if words.encode() not in line:
                    os.write(2, line)


def now_ns() -> int:
    """The clock of the trace."""
    return time.time_ns()


def _with_index(device: str) -> torch.device:
    """The device as the record names it: a GPU by its number, the CPU without one."""
    return torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device(device)


def _allocations(roots: Sequence[Any], device: torch.device) -> list[Any]:
    """The nodes of the profiler's tree in which a block of this device was given or taken back, by time."""
    found, open_nodes = [], list(roots)
    while open_nodes:
        node = open_nodes.pop()
        open_nodes.extend(node.children)
        if node.tag == _EventType.Allocation and node.extra_fields.device == device:
            found.append(node)
    return sorted(found, key=lambda node: int(node.start_time_ns))
