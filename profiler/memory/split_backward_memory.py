"""What each layer keeps between the halves of a split backward, and what each half does.

The layers run as one graph, as in a stage, from the first cut that wants a gradient back; before it the second half is
the whole backward and nothing is pending. What is pending are the gradients that the second half starts from. Each is
charged to the layer whose first half made it, and counted once however many layers wait with it: the layers of a stage
add up. What the first half lets go, such as what the loss kept, is taken off; a layer cannot have less than nothing
pending, so that what it lets go beyond that still counts as kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor, nn

from profiler.backward.split_backward import SecondHalf, first_half
from profiler.capture.chain import Tensors, detached, wants_gradient
from profiler.memory.allocations import AllocationTrace, now_ns, traced_allocations
from profiler.memory.layer_memory import note_backward, windows

Window: TypeAlias = tuple[int, int]


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
        note_backward(tensors, layer_starts, now)
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
