"""Recompute: run a function without saving its activations, and run it again when the backward first needs one.

The backward may consist of several calls of autograd, as with the halves of a split backward
(`gplan_profiler/backward/split_backward.py`). The recomputed tensors live until autograd releases them. The second run ends at
the last saved tensor; later operations are not run again.

    forward            pack  a  b  c          the graph saves a slot for each
    first half         unpack c -> run again: the slots of a, b and c are filled
    second half        unpack b               already there; the slot is released with its operation

Uses `torch.autograd.graph.saved_tensors_hooks`, as torch's checkpoint does, which would run again in every call of
autograd. The caller restores random state.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from gplan_profiler.capture.chain import Tensors
from gplan_profiler.torch_compat import checkpoint_replaced

Again = Callable[[], AbstractContextManager[None]]
"""Returns the context manager around the second run."""


@contextmanager
def without_checkpointing() -> Iterator[list[object]]:
    """Inside, torch's checkpoint calls its function only, as a trace of the model does; yields what was called so."""
    found: list[object] = []

    def kept(function: Callable[..., Any], *_: Any, **__: Any) -> Iterator[None]:
        found.append(function)
        yield

    def apply(function: Callable[..., Any], _preserve_random_state: bool, *args: Any) -> Any:
        found.append(function)
        return function(*args)

    reentrant = SimpleNamespace(apply=apply)
    with checkpoint_replaced(kept=kept, reentrant=reentrant):
        yield found


def recomputed(
    run: Callable[..., Tensors], inputs: Tensors, *, again: Again = nullcontext, written: Sequence[Tensor] = ()
) -> Tensors:
    """`run(*inputs)`, saving only the inputs for the backward; the second run is inside `again()`.

    It finds in `written`, the buffers that a run writes to, what the first one found: a router's bias, say, must route
    the same way again.

    The backward raises RuntimeError if the second run saves other tensors (number, shape, dtype, device) than the first,
    or if the inputs were written into in between.
    """
    if not torch.is_grad_enabled():
        return run(*inputs)
    call = _Call(run, inputs, again, written)
    with saved_tensors_hooks(call.pack, call.unpack):
        outputs = run(*inputs)
    call.is_over = True
    return outputs


@contextmanager
def _buffers_as(buffers: Sequence[Tensor], values: Sequence[Tensor]) -> Iterator[None]:
    """Inside, some buffers have these values, past autograd, which may have saved them; afterwards their present ones."""
    present = [x.detach().clone() for x in buffers]
    try:
        for buffer, value in zip(buffers, values, strict=True):
            buffer.data.copy_(value)
        yield
    finally:
        for buffer, value in zip(buffers, present, strict=True):
            buffer.data.copy_(value)


def share_run_again(run: Callable[..., Tensors], inputs: Tensors, *, now: Callable[[], float]) -> tuple[float, Tensors]:
    """The share of a forward's time, by the clock `now`, after which it saves nothing: there a second run would end.

    Also returns the outputs.
    """
    start, saved = now(), list[float]()
    outputs = noting_saves(run, lambda _: saved.append(now()))(*inputs)
    end = now()
    return (saved[-1] - start) / (end - start) if saved and end > start else 0.0, outputs


def noting_saves(run: Callable[..., Tensors], note: Callable[[Tensor], object]) -> Callable[..., Tensors]:
    """The same function; `note` is called with every tensor that is saved for the backward."""

    def pack(tensor: Tensor) -> Tensor:
        note(tensor)
        return _without_graph(tensor)

    def noted(*inputs: Tensor) -> Tensors:
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            return run(*inputs)

    return noted


def _without_graph(tensor: Tensor) -> Tensor:
    """The tensor without its graph: a graph that saves its own output would keep itself alive."""
    return tensor if tensor.is_leaf else tensor.detach()


_Kind: TypeAlias = tuple[torch.Size, torch.dtype, torch.device]


@lru_cache(maxsize=4096)
def _kind(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> _Kind:
    """The kind of a tensor; one object for all alike, as Python's garbage collector visits every tuple again and again."""
    return shape, dtype, device


class _Slot:
    """Saved by the graph instead of a tensor; contains the tensor after the second run."""

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self) -> None:
        self.tensor: Tensor | None = None
        self.version = 0


class _Enough(Exception):
    """All saved tensors are recomputed."""


class _Call:
    """The two runs of one call."""

    def __init__(self, run: Callable[..., Tensors], inputs: Tensors, again: Again, written: Sequence[Tensor]) -> None:
        self.is_over = False  # the first run; a function that takes gradients itself unpacks before
        self._run, self._again = run, again
        self._inputs = inputs
        self._written, self._values = written, [x.detach().clone() for x in written]
        self._versions = [x._version for x in inputs]
        self._autocast = _autocast()
        self._slots: list[weakref.ref[_Slot]] = []
        self._kinds: list[_Kind] = []

    def pack(self, tensor: Tensor) -> _Slot:
        """A slot in place of a tensor that the graph saves."""
        slot = _Slot()
        self._slots.append(weakref.ref(slot))
        self._kinds.append(_kind(tensor.shape, tensor.dtype, tensor.device))
        return slot

    def unpack(self, slot: _Slot) -> Tensor:
        """The tensor of a slot, after a second run if needed."""
        if slot.tensor is None:
            self._run_again()
        tensor = slot.tensor
        assert tensor is not None
        if tensor._version != slot.version:
            raise RuntimeError(
                f"a tensor of shape {tuple(tensor.shape)} that the backward needs was written in place after it was used"
            )
        return tensor

    def _run_again(self) -> None:
        if [x._version for x in self._inputs] != self._versions:
            raise RuntimeError(
                "the input of a recomputed layer was written into between its forward and its backward; expected that "
                "later layers work on copies"
            )
        with ExitStack() as stack:
            for then, now in zip(self._autocast, _autocast(), strict=True):
                if then != now:
                    stack.enter_context(torch.autocast(**then))
            with torch.enable_grad(), _buffers_as(self._written, self._values), self._again():
                num_kept = self._fill()
        if num_kept < len(self._slots):
            raise _differs(f"saves {num_kept} tensors", f"it saved {len(self._slots)} at first")
        if self.is_over:
            self._inputs = ()

    def _fill(self) -> int:
        """Run the function until all slots are filled; returns the number of tensors saved."""
        num_kept = 0

        def keep(tensor: Tensor) -> Tensor:
            nonlocal num_kept
            slot, kind = self._slots[num_kept](), _kind(tensor.shape, tensor.dtype, tensor.device)
            if kind != self._kinds[num_kept]:
                raise _differs(f"saves {_text(kind)}", f"it saved {_text(self._kinds[num_kept])} at first")
            leaf = _without_graph(tensor)
            if slot is not None:
                slot.tensor, slot.version = leaf, leaf._version
            num_kept += 1
            if num_kept == len(self._slots):
                raise _Enough
            return leaf

        with suppress(_Enough), saved_tensors_hooks(keep, lambda tensor: tensor):
            self._run(*self._inputs)
        return num_kept


def _autocast() -> list[dict[str, Any]]:
    """The current state of autocast, as the arguments of torch.autocast for each kind of device."""
    return [
        {
            "device_type": kind,
            "dtype": torch.get_autocast_dtype(kind),
            "enabled": torch.is_autocast_enabled(kind),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }
        for kind in ("cpu", "cuda")
    ]


def _text(kind: _Kind) -> str:
    shape, dtype, device = kind
    return f"a tensor of shape {tuple(shape)}, {str(dtype).removeprefix('torch.')}, on {device}"


def _differs(found: str, expected: str) -> RuntimeError:
    return RuntimeError(
        f"a recomputed forward {found} for the backward, where {expected}; expected a layer with the same result for the "
        "same input: exempt it from recompute, or remove its dependence on state that changes between two calls"
    )
