"""What each layer keeps and what it needs for a moment, from one forward and backward under a record of allocations.

The layers run as one graph, so that every storage is charged to the layer that produced it and is counted once. What is
still held when only the loss is left is the stash. A layer's workspace is the peak while it runs, above the stash of
the layers up to it. In a backward that is also what later layers made and left, less what they freed of those stashes:
each by the layer that did it, as in a stage that ends before that layer it has not happened (`Waiting`). The record is
the allocator's own, or that of `profiler/memory/ledger.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from gplan.nouns import Waiting
from profiler.capture.chain import Tensors
from profiler.memory.bytes import AllocationTrace, now_ns, traced_allocations
from profiler.memory.waiting import Later


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBytes:
    """What crosses a cut, one tensor or several together."""

    num_bytes: int
    gradient_bytes: int  # of the gradient that comes back for it
    unsaved_bytes: int  # num_bytes where no layer keeps it for its backward, else 0

    def __add__(self, other: TensorBytes) -> TensorBytes:
        """Both together."""
        return TensorBytes(
            num_bytes=self.num_bytes + other.num_bytes,
            gradient_bytes=self.gradient_bytes + other.gradient_bytes,
            unsaved_bytes=self.unsaved_bytes + other.unsaved_bytes,
        )


NO_BYTES = TensorBytes(num_bytes=0, gradient_bytes=0, unsaved_bytes=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """The memory of one layer, or of the loss, for one micro-batch."""

    stash_bytes: int
    forward_workspace_bytes: int
    backward_workspace_bytes: int
    crossing: tuple[TensorBytes, ...]  # what is alive at the cut after it, tensor by tensor; nothing after the loss
    pending_bytes: int = 0  # kept between the halves of a split backward, above the stash
    waiting: tuple[Waiting, ...] = ()  # what of the backward workspace comes of the backward of later layers

    @property
    def output_bytes(self) -> int:
        """Of all that crosses."""
        return sum(x.num_bytes for x in self.crossing)

    @property
    def output_gradient_bytes(self) -> int:
        """Of the gradients that come back for it."""
        return sum(x.gradient_bytes for x in self.crossing)

    @property
    def output_unsaved_bytes(self) -> int:
        """Of what crosses, that which no layer keeps."""
        return sum(x.unsaved_bytes for x in self.crossing)

    @property
    def sums(self) -> dict[str, Any]:
        """The bytes by the names that they have in a LayerCost."""
        names = (
            "stash_bytes", "forward_workspace_bytes", "backward_workspace_bytes", "output_bytes",
            "output_gradient_bytes", "output_unsaved_bytes", "pending_bytes", "waiting",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class CrossingTensor:
    """A tensor alive at the cut after a layer."""

    address: int  # of its storage, as the record of allocations names it
    num_bytes: int
    wants_gradient: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """One forward and backward: from when to when each layer, and last the loss, ran, and what crossed the cuts."""

    forwards: tuple[tuple[int, int], ...]  # on the clock of the record, in the order of the layers
    backwards: tuple[tuple[int, int], ...]
    crossings: tuple[tuple[CrossingTensor, ...], ...]  # one less: nothing crosses behind the loss


def measure_bytes(
    layers: Sequence[nn.Module], inputs: Tensors, loss: Callable[[Tensors], Tensor], *, device: str = "cpu"
) -> tuple[LayerBytes, ...]:
    """One entry for each layer and a last one for the loss. Gradient buffers must already be allocated."""
    with traced_allocations(device) as trace:
        passage = pass_through(
            layers, inputs, loss, now=now_ns, address_of=lambda tensor: tensor.untyped_storage().data_ptr()
        )
    return layer_bytes(trace, passage)


def pass_through(
    layers: Sequence[Callable[..., Tensors]],
    inputs: Tensors,
    loss: Callable[[Tensors], Tensor],
    *,
    now: Callable[[], int],
    address_of: Callable[[Tensor], int],
) -> Passage:
    """Run all layers forward, the loss, and all backward as one graph, by the clock of whatever records allocations."""
    marks: list[int] = []
    crossings: list[tuple[CrossingTensor, ...]] = []
    backward_starts: list[list[int]] = [[] for _ in range(len(layers) + 1)]
    tensors = inputs
    for layer, module in enumerate(layers):
        marks.append(now())
        tensors = module(*tensors)
        crossings.append(tuple(CrossingTensor(address_of(x), x.nbytes, x.requires_grad) for x in tensors))
        note_backward(tensors, backward_starts[layer], now)
    marks.append(now())
    value = loss(tensors)
    marks.append(now())
    del tensors
    backward_starts[-1].append(now())
    if value.requires_grad:
        value.backward()  # type: ignore[no-untyped-call]
    return Passage(
        forwards=tuple(pairwise(marks)), backwards=windows(backward_starts, now()), crossings=tuple(crossings)
    )


def note_backward(tensors: Tensors, starts: list[int], now: Callable[[], int]) -> None:
    """When the gradient of a layer's output arrives, the layer's own backward begins.

    Tensors that only pass a layer wait for those who made them; what enters the graph, for nobody.
    """
    for tensor in tensors:
        if tensor.grad_fn is not None:
            tensor.register_hook(lambda _: starts.append(now()))  # type: ignore[no-untyped-call]


def windows(starts: Sequence[Sequence[int]], end: int) -> tuple[tuple[int, int], ...]:
    """When the backward of each layer, and of the loss, ran; a window is empty where there was none."""
    found: list[tuple[int, int]] = []
    for layer_starts in starts:  # the first layer's backward is the last to run
        start = min(layer_starts, default=end)
        found.append((start, end))
        end = start
    return tuple(found)


def layer_bytes(trace: AllocationTrace, passage: Passage) -> tuple[LayerBytes, ...]:
    """The memory of each layer, and last of the loss, from the record of a passage."""
    forward_end = passage.backwards[-1][0]
    below, found = 0, []
    later = Later(trace, passage.forwards, passage.backwards)
    for layer, (forward, crossing) in enumerate(zip(passage.forwards, (*passage.crossings, ()), strict=True)):
        stash = sum(trace.alive(*forward, forward_end).values())
        below += stash
        backward_bytes, waiting = later.workspace(layer, below)
        found.append(
            LayerBytes(
                stash_bytes=stash,
                forward_workspace_bytes=max(0, trace.peak_bytes(*forward) - below),
                backward_workspace_bytes=backward_bytes,
                waiting=waiting,
                crossing=tuple(_tensor_bytes(x, trace.is_kept(x.address, forward[1], forward_end)) for x in crossing),
            )
        )
    return tuple(found)


def _tensor_bytes(tensor: CrossingTensor, is_kept: bool) -> TensorBytes:
    return TensorBytes(
        num_bytes=tensor.num_bytes,
        gradient_bytes=tensor.num_bytes if tensor.wants_gradient else 0,
        unsaved_bytes=0 if is_kept else tensor.num_bytes,
    )


def allocate_gradients(model: nn.Module) -> None:
    """Give every trained parameter a gradient of zeros, as all micro-batches but the first find it."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
