"""Memory by following storages: every one's birth and death under a dispatch mode, as the allocator would record it.

Works where no allocator is asked: on fake and meta tensors, whose storages have a size and a lifetime but no memory.
The clock counts operations and looks at it; it does not run with time. What a kernel allocates for itself and gives
back before it returns is not seen: on a CPU above all the buffers of convolutions (several times their result in a
small model), then the partial sums of normalizations. Under any mode some derivatives (binary cross-entropy's) take
torch's path without in-place operations, which needs one more temporary tensor. Results that stay are all seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.memory.bytes import AllocationEvent, AllocationTrace
from profiler.memory.storages import storage_key


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the storages that operations inside the block make, and when each is let go."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ticks = count()
        self._events: list[AllocationEvent] = []
        self._alive: dict[int, weakref.finalize[..., torch.UntypedStorage]] = {}

    def now(self) -> int:
        """The clock of the trace; every look at it moves it on."""
        return next(self._ticks)

    def trace(self) -> AllocationTrace:
        """What was recorded so far."""
        return AllocationTrace(tuple(self._events))

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)  # type: ignore[no-untyped-call]
        for finalizer in self._alive.values():
            finalizer.detach()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and enter the storages of its results that are not its operands'."""
        result = func(*args, **(kwargs or {}))
        known = {storage_key(x) for x in tensors_in((args, kwargs))}
        for tensor in tensors_in(result):
            if storage_key(tensor) not in known:
                self._enter(storage_key(tensor), tensor.untyped_storage())
        return result

    def _enter(self, key: int, storage: torch.UntypedStorage) -> None:
        num_bytes = storage.nbytes()
        if key in self._alive or not num_bytes:
            return
        self._events.append(AllocationEvent(self.now(), key, num_bytes))
        self._alive[key] = weakref.finalize(storage, self._leave, key, num_bytes)

    def _leave(self, key: int, num_bytes: int) -> None:
        self._alive.pop(key, None)  # nothing, where an interrupt came before it was noted
        self._events.append(AllocationEvent(self.now(), key, -num_bytes))


def tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and dicts."""
    return (x for x in pytree.tree_leaves(value) if isinstance(x, Tensor))
