"""A function whose stash is not kept: it runs again when the backward first needs a part of it, and only then.

The backward may come in several calls of autograd, as the halves of a split one do, which go on to the weights group by
group (`profiler/backward/split_backward.py`). What the second run keeps stays until autograd lets go of it:
in a whole backward operation by operation, after the first half of a split one until the second is done. The second run
ends at the last tensor that is kept, so operations behind it are not run again.

    forward            pack  a  b  c          each leaves a place, which the graph holds
    first half         unpack c -> run again: a, b and c get their tensors in their places
    second half        unpack b               is there; with its operation its place goes, and its tensor

Built on `torch.autograd.graph.saved_tensors_hooks`, as torch's own checkpoint is, which runs again in every call of
autograd. Random numbers and buffers are the caller's to put back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from profiler.capture.chain import Tensors

Again = Callable[[], AbstractContextManager[None]]
"""What the second run runs inside."""


def recomputed(run: Callable[..., Tensors], inputs: Tensors, *, again: Again) -> Tensors:
    """What `run` makes of the inputs; of all that a backward needs only these are kept.

    The second run must do what the first did: the backward raises RuntimeError where it keeps another number of tensors
    or tensors of another shape, type or device, and where the inputs were written into in between.
    """
    if not torch.is_grad_enabled():
        return run(*inputs)
    call = _Call(run, inputs, again)
    with saved_tensors_hooks(call.pack, call.unpack):
        outputs = run(*inputs)
    call.is_over = True
    return outputs


class _Place:
    """What the graph holds instead of a tensor, and the tensor once it is there again."""

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self) -> None:
        self.tensor: Tensor | None = None
        self.version = 0


@dataclass(frozen=True, slots=True)
class _Autocast:
    """How operations on one kind of device choose their types."""

    device_type: str
    is_enabled: bool
    dtype: torch.dtype
    keeps_casts: bool


class _Enough(Exception):
    """All that the backward needs is there."""


class _Call:
    """One run of the function, and the second one."""

    def __init__(self, run: Callable[..., Tensors], inputs: Tensors, again: Again) -> None:
        self.is_over = False  # the first run; code that takes gradients itself asks for tensors before
        self._run, self._again = run, again
        self._inputs = inputs
        self._versions = [x._version for x in inputs]
        self._autocast = _autocast()
        self._places: list[weakref.ref[_Place]] = []
        self._kinds: list[tuple[torch.Size, torch.dtype, torch.device]] = []

    def pack(self, tensor: Tensor) -> _Place:
        """A tensor that the graph wants to hold."""
        place = _Place()
        self._places.append(weakref.ref(place))
        self._kinds.append((tensor.shape, tensor.dtype, tensor.device))
        return place

    def unpack(self, place: _Place) -> Tensor:
        """The tensor that belongs there."""
        if place.tensor is None:
            self._run_again()
        tensor = place.tensor
        assert tensor is not None
        if tensor._version != place.version:
            raise RuntimeError(
                f"a tensor of shape {tuple(tensor.shape)} that the backward needs was written in place after it was used"
            )
        return tensor

    def _run_again(self) -> None:
        if [x._version for x in self._inputs] != self._versions:
            raise RuntimeError(
                "what a recomputed layer is given was written into between its forward and its backward; expected that "
                "later layers work on copies"
            )
        with torch.enable_grad(), _under(self._autocast), self._again():
            num_kept = self._fill()
        if num_kept < len(self._places):
            raise _differs(f"keeps {num_kept} tensors", f"it kept {len(self._places)} at first")
        if self.is_over:
            self._inputs = ()

    def _fill(self) -> int:
        """Run the function until all places have their tensors; how many it kept."""
        num_kept = 0

        def keep(tensor: Tensor) -> Tensor:
            nonlocal num_kept
            place, kind = self._places[num_kept](), (tensor.shape, tensor.dtype, tensor.device)
            if kind != self._kinds[num_kept]:
                raise _differs(f"keeps {_text(kind)}", f"it kept {_text(self._kinds[num_kept])} at first")
            alone = tensor if tensor.is_leaf else tensor.detach()  # from the graph of the second run, which may go
            if place is not None:
                place.tensor, place.version = alone, alone._version
            num_kept += 1
            if num_kept == len(self._places):
                raise _Enough
            return alone

        try:
            with saved_tensors_hooks(keep, _itself):
                self._run(*self._inputs)
        except _Enough:
            pass
        return num_kept


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _autocast() -> tuple[_Autocast, ...]:
    """As it is now."""
    keeps_casts = torch.is_autocast_cache_enabled()
    return tuple(
        _Autocast(x, torch.is_autocast_enabled(x), torch.get_autocast_dtype(x), keeps_casts) for x in ("cpu", "cuda")
    )


@contextmanager
def _under(state: tuple[_Autocast, ...]) -> Iterator[None]:
    """Within it autocast is as it was."""
    with ExitStack() as stack:
        for then, now in zip(state, _autocast(), strict=True):
            if then != now:
                stack.enter_context(
                    torch.autocast(
                        then.device_type, dtype=then.dtype, enabled=then.is_enabled, cache_enabled=then.keeps_casts
                    )
                )
        yield


def _text(kind: tuple[torch.Size, torch.dtype, torch.device]) -> str:
    shape, dtype, device = kind
    return f"a tensor of shape {tuple(shape)}, {str(dtype).removeprefix('torch.')}, on {device}"


def _differs(found: str, expected: str) -> RuntimeError:
    return RuntimeError(
        f"a recomputed forward {found} for the backward, where {expected}; expected a layer that computes the same "
        "whenever it is given the same: exempt it from recompute, or let it not depend on what changes between two calls"
    )
