"""Trace memory over time: by torch's allocator, or by following storages under a dispatch mode.

`traced_allocations` reads the allocator's events, scratch space inside kernels included: on a CPU from torch.profiler,
on a GPU from the CUDA allocator's own history, because the profiler's tree omits some frees of GPU blocks. Memory of
libraries with their own allocator (oneDNN, NCCL) is not seen, nor are blocks from before the trace; of these a GPU's are
subtracted when they are freed. CUDA blocks are allocated and freed in the host's time. `StorageRecorder` works on fake and
meta tensors too.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, count
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gplan.core.errors import ModelError
from gplan_profiler.torch_compat import EventType, RecordFunctionFast, TorchDispatchMode, cuda_memory_history, pytree


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """The storage of a tensor's numbers, of a sparse one without the indices; works for fake and meta tensors too."""
    return (tensor._values() if tensor.is_sparse else tensor).untyped_storage()


def storage_key(tensor: Tensor) -> int:
    """A key of a tensor's storage, valid while the storage lives."""
    return int(storage_of(tensor)._cdata)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages of some tensors."""
    return sum({storage_key(x): storage_of(x).nbytes() for x in tensors}.values())


def gradient_bytes(parameter: nn.Parameter) -> int:
    """Bytes of a parameter's gradient, in the dtype that it accumulates in; 0 for a frozen one."""
    dtype = parameter.grad_dtype or parameter.dtype
    return parameter.numel() * dtype.itemsize if parameter.requires_grad else 0


def optimizer_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the distinct storages of an optimizer's state."""
    return storage_bytes(x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor))


class StorageRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records when operations inside the block create and release storages, also those of fake and meta tensors.

    Its clock counts operations. Scratch memory inside kernels is not seen: on a CPU mostly the buffers of convolutions
    (several times their result in a small model), and the partial sums of normalizations. Under a dispatch mode some
    derivatives (of binary cross-entropy) avoid in-place operations and need one more temporary tensor.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ticks = count()
        self._events: list[AllocationEvent] = []
        self._alive: dict[int, weakref.finalize[..., torch.UntypedStorage]] = {}

    def now(self) -> int:
        """The clock of the trace; each call advances it."""
        return next(self._ticks)

    def trace(self) -> AllocationTrace:
        """The events so far."""
        return AllocationTrace(tuple(self._events))

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)  # type: ignore[no-untyped-call]
        for finalizer in self._alive.values():
            finalizer.detach()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and record the storages of its results that are not its operands'."""
        result = func(*args, **(kwargs or {}))
        known = {storage_key(x) for x in tensors_in((args, kwargs))}
        for tensor in tensors_in(result):
            key, storage = storage_key(tensor), storage_of(tensor)
            if key not in known and key not in self._alive and (num_bytes := storage.nbytes()):
                self._events.append(AllocationEvent(self.now(), key, num_bytes))
                self._alive[key] = weakref.finalize(storage, self._leave, key, num_bytes)
        return result

    def _leave(self, key: int, num_bytes: int) -> None:
        self._alive.pop(key, None)  # absent if an interrupt came before it was added
        self._events.append(AllocationEvent(self.now(), key, -num_bytes))


def tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and dicts."""
    return (x for x in pytree.tree_leaves(value) if isinstance(x, Tensor))


_NEVER_NS = 2**63 - 1
_MARK = "gplan: "  # before a reading of `now_ns`, as the name of a profiler's event
_GPU_BLOCK_BYTES = 512  # the CUDA allocator's unit
_GPU_SIGNS = {"alloc": 1, "free_requested": -1}
_SEGMENT_SIGNS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the tracer's own messages are not for the user


@dataclass(frozen=True, slots=True)
class AllocationEvent:
    """One block allocated (bytes above 0) or freed (below 0), at a moment of the trace's clock.

    That is `now_ns`, or the count of a StorageRecorder.
    """

    time_ns: int
    address: int
    num_bytes: int


@dataclass
class AllocationTrace:
    """The events of an allocator, filled when tracing ends. Queries, after that, take time linear in their window."""

    events: tuple[AllocationEvent, ...] = ()
    peak_reserved_bytes: int = 0  # of a CUDA allocator, older blocks included; 0 on a CPU

    @cached_property
    def _times_ns(self) -> NDArray[np.int64]:
        """[E]: the time of every event."""
        return np.array([event.time_ns for event in self.events], dtype=np.int64)

    @cached_property
    def _levels(self) -> NDArray[np.int64]:
        """[E+1]: bytes before the first event, after it, after the second, ..."""
        return np.cumsum(np.array([0, *(event.num_bytes for event in self.events)], dtype=np.int64))

    @cached_property
    def _given(self) -> dict[int, list[int]]:
        """The allocating events by address."""
        given: dict[int, list[int]] = {}
        for index, event in enumerate(self.events):
            if event.num_bytes > 0:
                given.setdefault(event.address, []).append(index)
        return given

    @cached_property
    def _freed_ns(self) -> NDArray[np.int64]:
        """[E]: when the block allocated by the event was freed, 2**63 - 1 if never; -1 for freeing events."""
        freed_ns, last = np.full(len(self.events), -1, dtype=np.int64), dict[int, int]()
        for index, event in enumerate(self.events):
            if event.num_bytes > 0:
                freed_ns[index], last[event.address] = _NEVER_NS, index
            elif event.address in last:
                freed_ns[last[event.address]] = min(freed_ns[last[event.address]], event.time_ns)
        return freed_ns

    def fill_from_tree(self, roots: Sequence[Any]) -> None:
        """Read the CPU's blocks from the profiler's tree of events, in the time of `now_ns`.

        The profiler's clock differs from that a little (70 ns were seen). So an event gets at least the time of the mark
        before it in the profiler's record, and less than that of the mark after it.
        """
        nodes, open_nodes = list[Any](), list(roots)  # the CPU's allocations and the readings of `now_ns`
        while open_nodes:
            node = open_nodes.pop()
            open_nodes.extend(node.children)
            if _is_mark(node) or (node.tag == EventType.Allocation and node.extra_fields.device.type == "cpu"):
                nodes.append(node)
        nodes.sort(key=lambda node: int(node.start_time_ns))
        after = [int(node.name.removeprefix(_MARK)) if _is_mark(node) else 0 for node in nodes]
        before = [mark or _NEVER_NS for mark in after]
        at_least, less_than = accumulate(after, max), reversed(list(accumulate(reversed(before), min)))
        self.events = tuple(
            AllocationEvent(
                min(max(node.start_time_ns, start), end - 1), node.extra_fields.ptr, node.extra_fields.alloc_size
            )
            for node, start, end in zip(nodes, at_least, less_than, strict=True)
            if not _is_mark(node)
        )

    def fill_from_history(self, history: Sequence[Mapping[str, Any]], reserved_bytes: int) -> None:
        """Read a GPU's blocks from its allocator's history; `reserved_bytes` is what it had reserved before.

        A block counts as freed when its free is requested, as in `torch.cuda.memory_allocated`, not when other streams
        have finished with it. torch stores whole microseconds: an event less than one after a mark counts as before it.
        Sizes are in whole units of the CUDA allocator. The block can be up to 1 MiB larger where the allocator does not
        split one, which depends on what ran before; that is not counted.
        """
        changes = (
            (x, _GPU_SIGNS[x["action"]] * -(-x["size"] // _GPU_BLOCK_BYTES))
            for x in history
            if x["action"] in _GPU_SIGNS
        )
        self.events = tuple(
            AllocationEvent(1000 * x["time_us"], x["addr"], units * _GPU_BLOCK_BYTES) for x, units in changes
        )
        grown = (_SEGMENT_SIGNS[x["action"]] * x["size"] for x in history if x["action"] in _SEGMENT_SIGNS)
        self.peak_reserved_bytes = max(accumulate(grown, initial=reserved_bytes))

    def peak_bytes(self, start_ns: int = 0, end_ns: int = _NEVER_NS, *, without: tuple[int, int] | None = None) -> int:
        """The peak of allocated bytes within a window, above the start of the trace.

        Blocks allocated in the earlier window `without` are not counted.
        """
        first, end = np.searchsorted(self._times_ns, [start_ns, end_ns])
        levels = self._levels[first : end + 1]
        if without is None:
            return int(levels.max())
        given_ns, freed_ns, num_bytes = self.blocks
        some = (without[0] <= given_ns) & (given_ns < without[1])
        order = np.argsort(freed_ns[some], kind="stable")
        gone = np.concatenate([[0], np.cumsum(num_bytes[some][order])])
        moments_ns = np.concatenate([[start_ns - 1], self._times_ns[first:end]])
        num_gone = np.searchsorted(freed_ns[some][order], moments_ns, side="right")
        return int((levels - gone[-1] + gone[num_gone]).max())

    @cached_property
    def blocks(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """[B] each: when every block was allocated and when it was freed (2**63 - 1 if never), and its bytes."""
        some = np.flatnonzero(self._freed_ns >= 0)
        return self._times_ns[some], self._freed_ns[some], np.diff(self._levels)[some]

    def alive(self, start_ns: int, end_ns: int, at_ns: int) -> dict[int, int]:
        """Address to size of the blocks allocated within a window and still alive at a later moment."""
        first, end = np.searchsorted(self._times_ns, [start_ns, min(end_ns, at_ns)])
        alive = first + np.flatnonzero(self._freed_ns[first:end] >= at_ns)
        return {self.events[x].address: self.events[x].num_bytes for x in alive}

    def is_kept(self, address: int, end_ns: int, at_ns: int) -> bool:
        """Whether a block allocated at this address before `end_ns` is still alive at a later moment."""
        return any(self._times_ns[x] < end_ns and self._freed_ns[x] >= at_ns for x in self._given.get(address, []))


@contextmanager
def traced_allocations(device: str = "cpu") -> Iterator[AllocationTrace]:
    """Record every allocation on this device inside the block; too slow for timing.

    "cuda" is the current GPU. Call `torch.cuda.empty_cache()` first if `peak_reserved_bytes` is to be that of the block.
    On a GPU this ends a memory history that the caller records (`torch.cuda.memory._record_memory_history`).
    """
    trace = AllocationTrace()
    if device == "cpu":
        activities = [torch.profiler.ProfilerActivity.CPU]
        with (
            _without_warning(),
            torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile,
        ):
            yield trace
        if profile.profiler is None or profile.profiler.kineto_results is None:
            raise ModelError("torch.profiler recorded nothing; is another profiler running in this process?")
        trace.fill_from_tree(profile.profiler.kineto_results.experimental_event_tree())
        return
    index = torch.device(device).index
    index = torch.cuda.current_device() if index is None else index
    reserved_bytes = torch.cuda.memory_reserved(index)
    with cuda_memory_history(index) as history:
        yield trace
    trace.fill_from_history(history, reserved_bytes)


@contextmanager
def _without_warning() -> Iterator[None]:
    """Suppress warnings of blocks from before the trace, of native code; other lines on standard error come afterwards."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as output:
        os.dup2(output.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            output.seek(0)
            for line in output.readlines():
                if b"Memory block of unknown size" not in line:
                    os.write(2, line)


def now_ns() -> int:
    """The clock of the trace. A trace of a CPU's allocations also notes each reading among its events."""
    moment_ns = time.time_ns()
    with RecordFunctionFast(f"{_MARK}{moment_ns}"):
        return moment_ns


def _is_mark(node: Any) -> bool:
    return node.tag == EventType.TorchOp and str(node.name).startswith(_MARK)
