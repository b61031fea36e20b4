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
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch._C._profiler import _EventType

from gplan.errors import ModelError

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the tracer's own messages are not for the user


@dataclass(frozen=True, slots=True)
class AllocationEvent:
    """One block given (bytes above 0) or taken back (below 0), at a moment of `time.time_ns`."""

    time_ns: int
    address: int
    num_bytes: int


@dataclass(slots=True)
class AllocationTrace:
    """What the allocator did; filled when the tracing ends."""

    events: tuple[AllocationEvent, ...] = ()
    peak_reserved_bytes: int = 0  # the most that a CUDA allocator held of its device, older blocks too; 0 on a CPU

    def fill(self, roots: Sequence[Any], device: torch.device) -> None:
        """Take this device's blocks from the profiler's tree of events."""
        nodes = _allocations(roots, device)
        blocks = [(node.start_time_ns, node.extra_fields) for node in nodes]
        self.events = tuple(AllocationEvent(time_ns, block.ptr, block.alloc_size) for time_ns, block in blocks)
        self.peak_reserved_bytes = max((block.total_reserved for _, block in blocks), default=0)

    def peak_bytes(self, start_ns: int = 0, end_ns: int = 2**63) -> int:
        """The most bytes held within a window, above what was there when the trace began."""
        before = sum(x.num_bytes for x in self.events if x.time_ns < start_ns)
        inside = (x.num_bytes for x in self.events if start_ns <= x.time_ns < end_ns)
        return max(accumulate(inside, initial=before))

    def alive(self, start_ns: int, end_ns: int, at_ns: int) -> dict[int, int]:
        """Address to size of the blocks given within a window and still held at a later moment."""
        blocks: dict[int, int] = {}
        for event in self.events:
            if event.time_ns >= at_ns:
                break
            if event.num_bytes < 0:
                blocks.pop(event.address, None)
            elif start_ns <= event.time_ns < end_ns:
                blocks[event.address] = event.num_bytes
        return blocks


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
