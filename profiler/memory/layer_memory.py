"""What each layer keeps and what it needs for a moment, from one forward and backward under a record of allocations.

The layers run as one graph, so that every storage is charged to the layer that produced it and is counted once. What is
still held when only the loss is left is the stash. A layer's workspace is the peak while it runs, above the stash of
the layers up to it. In a backward that is also what later layers made and left, less what they freed of those stashes:
each by the layer that did it, as in a stage that ends before that layer it has not happened (`Leftover`). The record is
the allocator's own, or that of `profiler/memory/allocations.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gplan.core import Leftover
from profiler.backward.split_backward import SecondHalf, first_half
from profiler.capture.chain import Tensors, detached, wants_gradient
from profiler.memory.allocations import AllocationTrace, now_ns, traced_allocations

# What the backward of later layers leaves to an earlier layer's: gradients that wait, less stashes that are gone.


_LEAST_SHARE = 0.01  # of a workspace; what is less, such as the gradient of the loss itself, is not told apart

Window = tuple[int, int]
"""From when to when, on the clock of the record."""


class LaterLayers:
    """What a record of one forward and backward says of it; layers are numbered, the loss is the last."""

    def __init__(self, trace: AllocationTrace, forwards: Sequence[Window], backwards: Sequence[Window]) -> None:
        self._trace, self._backwards, num = trace, backwards, len(backwards)
        given_ns, freed_ns, num_bytes = trace.blocks()
        forward, made = _place_of(given_ns, forwards), num - 1 - _place_of(given_ns, backwards[::-1])
        freed = num - 1 - _place_of(freed_ns, backwards[::-1])
        freed[freed_ns >= backwards[0][1]] = -1  # after all of them
        is_made = given_ns >= backwards[-1][0]
        is_stash = ~is_made & (forward >= 0) & (freed_ns >= backwards[-1][0]) & (freed >= 0)
        made_until = np.zeros((num, num + 1), dtype=np.int64)  # by the layer that made it, then that freed it
        np.add.at(made_until, (made[is_made], freed[is_made] + 1), num_bytes[is_made])
        gone = np.zeros((num, num), dtype=np.int64)  # of the stash of the first layer, by the layer that freed it
        np.add.at(gone, (forward[is_stash], freed[is_stash]), num_bytes[is_stash])
        self._made_until, self._held_on, self._gone = made_until, made_until.cumsum(axis=1), gone.cumsum(axis=0)

    def workspace(self, layer: int, below: int) -> tuple[int, tuple[Leftover, ...]]:
        """Bytes that a layer's backward needs above `below`, and what of that comes of later layers' backward."""
        begins, ends = self._backwards[layer]
        whole = self._trace.peak_bytes(begins, ends)
        alone = self._trace.peak_bytes(begins, ends, without=(self._backwards[-1][0], begins))
        least = _LEAST_SHARE * (whole - below)
        return max(0, whole - below), tuple(x for x in self._of(layer, whole, alone, below) if abs(x.num_bytes) > least)

    def _of(self, layer: int, whole: int, alone: int, below: int) -> Iterator[Leftover]:
        """By later layer what it made that is held all through, less what it freed of the stashes up to this layer's.

        Of what is let go meanwhile counts by how much the peak is higher for it, at the nearest layer that made any.
        """
        later = slice(layer + 1, None)
        through, gone = self._held_on[later, layer], self._gone[layer, later]
        meanwhile = np.flatnonzero(self._made_until[later, layer + 1])
        left, clipped = (through - gone).tolist(), max(0, below - whole)
        if len(meanwhile):
            left[meanwhile[0]] += max(0, whole - alone - int(through.sum()))
        for number, num_bytes in enumerate(left, start=1):
            taken = min(max(0, -num_bytes), clipped)  # as a workspace does not fall below 0
            clipped -= taken
            yield Leftover(num_later=number, num_bytes=num_bytes + taken)


def _place_of(moments_ns: NDArray[np.int64], windows: Sequence[Window]) -> NDArray[np.int64]:
    """Which of windows that follow each other a moment is in; -1 before the first, the last one behind it."""
    return np.searchsorted([start for start, _ in windows], moments_ns, side="right") - 1


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
    leftovers: tuple[Leftover, ...] = ()  # what of the backward workspace comes of the backward of later layers

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
            "output_gradient_bytes", "output_unsaved_bytes", "pending_bytes", "leftovers",
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
        record_backward_start(tensors, backward_starts[layer], now)
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


def record_backward_start(tensors: Tensors, starts: list[int], now: Callable[[], int]) -> None:
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
    later = LaterLayers(trace, passage.forwards, passage.backwards)
    for layer, (forward, crossing) in enumerate(zip(passage.forwards, (*passage.crossings, ()), strict=True)):
        stash = sum(trace.alive(*forward, forward_end).values())
        below += stash
        backward_bytes, leftovers = later.workspace(layer, below)
        found.append(
            LayerBytes(
                stash_bytes=stash,
                forward_workspace_bytes=max(0, trace.peak_bytes(*forward) - below),
                backward_workspace_bytes=backward_bytes,
                leftovers=leftovers,
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


# MERGED profiler/memory/layer_memory.py
# What each layer keeps between the halves of a split backward, and what each half does.
#
# The layers run as one graph, as in a stage, from the first cut that wants a gradient back; before it the second half is
# the whole backward and nothing is pending. What is pending are the gradients that the second half starts from. Each is
# charged to the layer whose first half made it, and counted once however many layers wait with it: the layers of a stage
# add up. What the first half lets go, such as what the loss kept, is taken off; a layer cannot have less than nothing
# pending, so that what it lets go beyond that still counts as kept.


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPassage:
    """One forward, the loss and a backward in two halves: from when to when each layer, and last the loss, ran."""

    first: int  # the layer behind the first cut that wants a gradient: the others ran before and are not in here
    forwards: tuple[Window, ...]  # on the clock of the record, of the layers from `first` and of the loss
    inputs: tuple[Window, ...]  # their first halves
    between: int  # a moment between the halves
    weights: tuple[tuple[int, Window], ...]  # the second halves piece by piece, each with the layer it is for


def measure_pending(
    layers: Sequence[nn.Module], inputs: Tensors, loss: Callable[[Tensors], Tensor], *, device: str = "cpu"
) -> tuple[int, ...]:
    """Bytes by the allocator's record, for each layer and last for the loss; gradients are added to the parameters'."""
    with traced_allocations(device) as trace:
        passage = pass_in_halves(layers, [tuple(x.parameters()) for x in layers], inputs, loss, now=now_ns)
    return pending_bytes(trace, passage)


def pass_in_halves(
    layers: Sequence[Callable[..., Tensors]],
    parameters: Sequence[Sequence[Tensor]],
    inputs: Tensors,
    loss: Callable[[Tensors], Tensor],
    *,
    now: Callable[[], int],
) -> SplitPassage:
    """Run the layers, with these parameters, and the loss, then both halves, by the clock of whatever is recorded."""
    first, leaves = _first_cut(layers, inputs)
    starts: list[list[int]] = [[] for _ in range(len(layers) - first + 1)]
    marks, tensors = [now()], leaves
    for layer, layer_starts in zip(layers[first:], starts, strict=False):
        tensors = layer(*tensors)
        record_backward_start(tensors, layer_starts, now)
        marks.append(now())
    ends = [loss(tensors)]
    del tensors
    marks.append(now())
    starts[-1].append(now())
    rest = _first_half(ends.pop(), leaves)  # which alone knows it: it must be let go
    between = now()
    return SplitPassage(
        first=first,
        forwards=tuple(pairwise(marks)),
        inputs=windows(starts, between),
        between=between,
        weights=tuple(_second_half(rest, enumerate(parameters[first:], start=first), now)) if rest else (),
    )


def _first_cut(layers: Sequence[Callable[..., Tensors]], inputs: Tensors) -> tuple[int, Tensors]:
    """The first layer that a gradient goes back through, or how many layers there are, and what enters there."""
    tensors = inputs
    for first, layer in enumerate(layers):
        if wants_gradient(tensors):
            return first, detached(tensors)
        tensors = layer(*tensors)
    return len(layers), detached(tensors)


def _first_half(value: Tensor, leaves: Tensors) -> SecondHalf | None:
    """Nothing but what the second half needs is kept: what goes on to the layer before was sent."""
    if not value.requires_grad:
        return None
    _, rest = first_half([value], [torch.ones_like(value)], leaves)
    return rest


def _second_half(
    rest: SecondHalf, parameters: Iterable[tuple[int, Sequence[Tensor]]], now: Callable[[], int]
) -> Iterator[tuple[int, Window]]:
    """From one weight that gets its gradient to the next; one that several layers use counts for the first of them."""
    layer_of: dict[Tensor, int] = {}
    for layer, weights in parameters:
        layer_of = {**dict.fromkeys(weights, layer), **layer_of}
    ends: list[tuple[int, int]] = []
    hooks = [
        x.register_post_accumulate_grad_hook(lambda x: ends.append((layer_of[x], now())))  # type: ignore[no-untyped-call]
        for x in layer_of
        if x.requires_grad
    ]
    start = now()
    rest.run()
    for hook in hooks:
        hook.remove()
    for layer, end in ends:
        yield layer, (start, end)
        start = end


def pending_bytes(trace: AllocationTrace, passage: SplitPassage) -> tuple[int, ...]:
    """Bytes that each layer, and last the loss, keeps between the halves, above what it kept before the first one."""
    before, between = passage.inputs[-1][0], passage.between
    found = [0] * passage.first
    for forward, backward in zip(passage.forwards, passage.inputs, strict=True):
        stash, kept = (sum(trace.alive(*forward, moment).values()) for moment in (before, between))
        found.append(max(0, kept - stash + sum(trace.alive(*backward, between).values())))
    return tuple(found)
