"""Stash, workspaces and pending bytes of each layer, from one forward and backward with a trace of allocations.

The layers run as one graph, so each storage is charged once, to the layer that created it. The stash of a layer is what
is still alive after the forward. Its workspace is the peak while it runs, above the stash of all layers up to it. In a
backward this includes what later layers left behind, less what they freed of those stashes. `Leftover` states it by
layer, because a stage can end before that layer. Pending bytes are kept between the halves of a split backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import count, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call

from gplan.core import Leftover
from gplan.core.layer_cost import Lifetime, leftovers_of
from gplan_profiler.backward.rematerialize import noting_saves
from gplan_profiler.backward.split_backward import SecondHalf, first_half
from gplan_profiler.capture.chain import Tensors, detached, wants_gradient
from gplan_profiler.memory.allocations import AllocationTrace, gradient_bytes, now_ns, traced_allocations

_LEAST_SHARE = 0.01  # of a workspace; smaller leftovers, such as the gradient of the loss, are dropped

Window = tuple[int, int]
"""Start and end, on the clock of the trace."""


class LaterLayers:
    """What the backward of later layers leaves to a layer: gradients, less freed stashes. The loss is the last layer."""

    def __init__(self, trace: AllocationTrace, forwards: Sequence[Window], backwards: Sequence[Window]) -> None:
        self._trace, self._backwards, num = trace, backwards, len(backwards)
        given_ns, freed_ns, num_bytes = trace.blocks
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
        """The workspace of a layer's backward above `below` bytes, and the part of it left by later layers."""
        begins, ends = self._backwards[layer]
        whole = self._trace.peak_bytes(begins, ends)
        alone = self._trace.peak_bytes(begins, ends, without=(self._backwards[-1][0], begins))
        # by later layer: what it made that outlives this backward, less what it freed of the stashes up to this layer;
        # what is freed during this backward counts by its effect on the peak, at the nearest layer that made any of it
        later = slice(layer + 1, None)
        through, gone = self._held_on[later, layer], self._gone[layer, later]
        freed_within = np.flatnonzero(self._made_until[later, layer + 1])
        left, clipped = (through - gone).tolist(), max(0, below - whole)
        if len(freed_within):
            left[freed_within[0]] += max(0, whole - alone - int(through.sum()))
        leftovers = list[Leftover]()
        for number, num_bytes in enumerate(left, start=1):
            taken = min(max(0, -num_bytes), clipped)  # as a workspace does not fall below 0
            clipped -= taken
            if abs(num_bytes + taken) > _LEAST_SHARE * (whole - below):
                leftovers.append(Leftover(num_later=number, num_bytes=num_bytes + taken))
        return max(0, whole - below), tuple(leftovers)


def _place_of(moments_ns: NDArray[np.int64], windows: Sequence[Window]) -> NDArray[np.int64]:
    """The index of the consecutive window that each moment lies in; -1 before the first, the last one after the end."""
    return np.searchsorted([start for start, _ in windows], moments_ns, side="right") - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBytes:
    """The bytes of one tensor, or several, that cross a cut."""

    num_bytes: int
    gradient_bytes: int
    unsaved_bytes: int  # num_bytes if no layer keeps it for its backward, else 0
    saved_later_bytes: int = 0  # num_bytes if later layers keep it and the one that made it does not, else 0
    viewed_bytes: int = 0  # gradient_bytes if the gradient is a view of that of what the last reader makes, else 0

    def __add__(self, other: TensorBytes) -> TensorBytes:
        """Both together."""
        names = [x.name for x in fields(self)]
        return TensorBytes(**{x: getattr(self, x) + getattr(other, x) for x in names})


NO_BYTES = TensorBytes(num_bytes=0, gradient_bytes=0, unsaved_bytes=0)


class HalvesBytes(NamedTuple):
    """The memory of one layer, or of the loss, in a backward in two halves."""

    pending_bytes: int = 0  # kept between them above the stash; below 0 where the first frees more than it leaves
    input_workspace_bytes: int | None = None  # peak of the first above what is there when it begins; None: not known
    grown_bytes: int = 0  # by the first until all layers are through; what it frees is freed only then
    weight_workspace_bytes: int | None = None  # peak of the second above what is there then; None: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """The memory of one layer, or of the loss, for one micro-batch."""

    stash_bytes: int
    forward_workspace_bytes: int
    backward_workspace_bytes: int
    crossing: tuple[TensorBytes, ...]  # the tensors at the cut after the layer; none after the loss
    halves: HalvesBytes = field(default_factory=HalvesBytes)
    leftovers: tuple[Leftover, ...] = ()  # the part of the backward workspace left by later layers
    unkept_output_bytes: int = 0  # of the loss: the model's outputs that layers keep and the loss does not
    views: tuple[int | None, ...] = ()  # of each crossing tensor, the index of that before the layer with its storage
    tensors: tuple[Lifetime, ...] = ()  # as those of a LayerCost
    num_forward_times: int = 0

    @property
    def output(self) -> TensorBytes:
        """All tensors at the cut together."""
        return sum(self.crossing, NO_BYTES)

    def fields(self, *, on_gpu: bool) -> dict[str, Any]:
        """The fields of a LayerCost for this memory; the tensors are for a GPU's allocator alone."""
        names = (
            "stash_bytes", "forward_workspace_bytes", "backward_workspace_bytes", "leftovers", "unkept_output_bytes",
        )  # fmt: skip
        halves = self.halves._asdict()
        halves["pending_bytes"] = max(-self.stash_bytes, self.halves.pending_bytes)  # measured in another pass
        return {
            "output_bytes": self.output.num_bytes,
            "output_gradient_bytes": self.output.gradient_bytes,
            "output_unsaved_bytes": self.output.unsaved_bytes,
            "output_saved_later_bytes": self.output.saved_later_bytes,
            **{name: getattr(self, name) for name in (*names, *(("tensors", "num_forward_times") if on_gpu else ()))},
            **halves,
        }


@dataclass(frozen=True, slots=True)
class CrossingTensor:
    """A tensor alive at the cut after a layer."""

    address: int  # of its storage, as in the trace
    num_bytes: int
    wants_gradient: bool


@dataclass(frozen=True, slots=True)
class GradientArrival:
    """When the gradient of a tensor was complete, and where it lay."""

    address: int  # of its storage, as in the trace
    moment: int


Place = tuple[int, int]
"""The first cut that a tensor crosses, by the layer before it, and the tensor's index there."""


@dataclass(frozen=True, slots=True)
class LayerGradients:
    """Gradients in the backward of a layer: of what it made, and its own for what no later layer reads, by place."""

    made: list[GradientArrival] = field(default_factory=list)
    read: dict[Place, GradientArrival] = field(default_factory=dict)

    def record(
        self,
        layer: int,
        before: Tensors,
        after: Tensors,
        places: Mapping[int, Place],
        arrival: Callable[[Tensor], GradientArrival],
    ) -> dict[int, Place]:
        """Record the gradients when they come, given the tensors alive before and after the layer.

        `places` are those of the tensors before, by id; returns those of the tensors after.
        """
        found = {id(x): places.get(id(x), (layer, i)) for i, x in enumerate(after)}
        made = [x for x in after if x.grad_fn is not None and id(x) not in places]
        for x in made:
            x.register_hook(lambda gradient: self.made.append(arrival(gradient)))  # type: ignore[no-untyped-call]
        readers = _readers([x.grad_fn for x in made], ends={x.grad_fn for x in before if x.grad_fn is not None})
        for x in before:
            users = readers.get((x.grad_fn, x.output_nr), ()) if id(x) in places and id(x) not in found else ()
            if len(users) == 1:  # the gradients of several are added up
                (node, index), place = users[0], places[id(x)]

                def record(gradients: Any, _: object, index: int = index, place: Place = place) -> None:
                    if gradients[index] is not None:
                        self.read[place] = arrival(gradients[index])

                node.register_hook(record)
        return found

    def viewed(self, trace: AllocationTrace) -> Iterator[Place]:
        """The tensors that it read whose gradient lies in the storage of a gradient of what it made."""
        for place, mine in self.read.items():
            if any(x.address == mine.address and trace.is_kept(x.address, x.moment, mine.moment) for x in self.made):
                yield place


def _readers(nodes: Sequence[Any], *, ends: set[Any]) -> dict[tuple[Any, int], list[tuple[Any, int]]]:
    """For the outputs of autograd's nodes `ends` the nodes behind them, down from `nodes`, and which input each is."""
    found: dict[tuple[Any, int], list[tuple[Any, int]]] = {}
    rest, seen = list(nodes), {*nodes, *ends}
    while rest:
        node = rest.pop()
        for index, (reached, output) in enumerate(node.next_functions):
            if reached in ends:
                found.setdefault((reached, output), []).append((node, index))
            elif reached is not None and reached not in seen:
                seen.add(reached)
                rest.append(reached)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """The windows in which each layer, and last the loss, ran forward and backward, and the tensors at each cut."""

    forwards: tuple[Window, ...]
    backwards: tuple[Window, ...]
    crossings: tuple[tuple[CrossingTensor, ...], ...]  # one for each layer, none for the loss
    gradients: tuple[LayerGradients, ...]  # one for each layer
    saved: tuple[frozenset[int], ...]  # addresses of what each layer, and last the loss, saves for its backward
    last_saves: tuple[int, ...]  # when each saved its last tensor; its start where it saves nothing


def measure_bytes(
    layers: Sequence[nn.Module], inputs: Tensors, loss: Callable[[Tensors], Tensor], *, device: str = "cpu"
) -> tuple[LayerBytes, ...]:
    """The memory of each layer, and last of the loss. Gradient buffers must already be allocated."""
    tied = tied_uses(layers)
    calls = layers_apart(layers, tied)
    with traced_allocations(device) as trace:
        passage = pass_through(calls, inputs, loss, now=now_ns, address_of=lambda x: x.untyped_storage().data_ptr())
    return with_sums(layer_bytes(trace, passage), tied)


@dataclass(slots=True)
class TiedUse:
    """A layer that uses a trained parameter of an earlier layer."""

    layer: int
    previous: int  # the last layer before it that uses the parameter
    parameter: nn.Parameter
    is_shared: bool = False  # whether its gradient comes as a view: then nothing is added to it in place

    def watch(self, leaf: Tensor) -> None:
        """Set `is_shared` when the gradient of this leaf, which takes the parameter's place, comes."""

        def note(gradient: Tensor) -> None:
            self.is_shared = gradient._is_view()

        leaf.register_hook(note)  # type: ignore[no-untyped-call]


def tied_uses(layers: Sequence[nn.Module]) -> tuple[TiedUse, ...]:
    """Where parameters of earlier layers are used again.

    The passage gives such a layer a copy: users on different stages have gradients of their own. What users on the same
    stage share is added by `with_sums` and by the cost model (`Costs.waiting`).
    """
    found, last = [], dict[int, int]()
    for layer, module in enumerate(layers):
        for parameter in module.parameters():
            if parameter.requires_grad and id(parameter) in last:
                found.append(TiedUse(layer, last[id(parameter)], parameter))
            last[id(parameter)] = layer
    return tuple(found)


def layers_apart(layers: Sequence[nn.Module], tied: Sequence[TiedUse]) -> list[Callable[..., Tensors]]:
    """The layers, the later users of a parameter with a copy, whose gradients are watched."""
    return [_with_copies(layer, uses) for layer, uses in zip(layers, tied_by_layer(layers, tied), strict=True)]


def tied_by_layer(layers: Sequence[nn.Module], tied: Sequence[TiedUse]) -> list[list[TiedUse]]:
    """For each layer its uses of parameters that earlier layers use too."""
    return [[x for x in tied if x.layer == i] for i in range(len(layers))]


def _with_copies(layer: nn.Module, tied: Sequence[TiedUse]) -> Callable[..., Tensors]:
    """The layer with leaves and gradients of its own in the place of tied parameters."""
    if not tied:
        return layer
    copies = {id(x.parameter): x.parameter.detach().requires_grad_() for x in tied}
    for use in tied:
        copy = copies[id(use.parameter)]
        copy.grad_dtype = use.parameter.grad_dtype
        copy.grad = torch.zeros_like(copy, dtype=copy.grad_dtype)
        use.watch(copy)
    named = layer.named_parameters(remove_duplicate=False)
    state = {name: copies[id(x)] for name, x in named if id(x) in copies}
    return lambda *tensors: functional_call(layer, state, tensors, tie_weights=False)


def with_sums(layers: Sequence[LayerBytes], tied: Sequence[TiedUse]) -> tuple[LayerBytes, ...]:
    """The layers with the sums of gradients that autograd makes where users of a parameter are on the same stage.

    A user adds its gradient to that of the next user in place, unless the latter shares its storage with another
    tensor: then the sum is a third tensor, and users before it add to that one in place.
    """
    found = list(layers)
    for use in (x for x in tied if x.is_shared):
        num_bytes = gradient_bytes(use.parameter)
        found[use.previous] = _with_leftover(found[use.previous], use.layer - use.previous, num_bytes)
        for other in tied:
            if other.parameter is use.parameter and other.previous == use.layer:
                found[use.previous] = _with_leftover(found[use.previous], other.layer - use.previous, -num_bytes)
    return tuple(found)


def _with_leftover(layer: LayerBytes, num_later: int, num_bytes: int) -> LayerBytes:
    left = ((x.num_later, x.num_bytes) for x in layer.leftovers)
    return replace(
        layer,
        backward_workspace_bytes=layer.backward_workspace_bytes + num_bytes,
        leftovers=leftovers_of([*left, (num_later, num_bytes)]),
    )


def pass_through(
    layers: Sequence[Callable[..., Tensors]],
    inputs: Tensors,
    loss: Callable[[Tensors], Tensor],
    *,
    now: Callable[[], int],
    address_of: Callable[[Tensor], int],
) -> Passage:
    """Run all layers forward, the loss, and all layers backward as one graph; `now` is the clock of the trace."""
    marks: list[int] = []
    crossings: list[tuple[CrossingTensor, ...]] = []
    backward_starts: list[list[int]] = [[] for _ in range(len(layers) + 1)]
    gradients = tuple(LayerGradients() for _ in layers)
    saved, last_saves = [set[int]() for _ in (*layers, loss)], [0] * (len(layers) + 1)

    def note(layer: int, tensor: Tensor) -> None:
        saved[layer].add(address_of(tensor))
        last_saves[layer] = now()

    tensors, places = inputs, dict[int, Place]()
    for layer, module in enumerate(layers):
        marks.append(now())
        before, tensors = tensors, noting_saves(module, partial(note, layer))(*tensors)
        places = gradients[layer].record(
            layer, before, tensors, places, lambda gradient: GradientArrival(address_of(gradient), now())
        )
        del before
        crossings.append(tuple(CrossingTensor(address_of(x), x.nbytes, x.requires_grad) for x in tensors))
        record_backward_start(tensors, backward_starts[layer], now)
    marks.append(now())
    (value,) = noting_saves(lambda *outputs: (loss(outputs),), partial(note, len(layers)))(*tensors)
    marks.append(now())
    del tensors
    backward_starts[-1].append(now())
    if value.requires_grad:
        value.backward()  # type: ignore[no-untyped-call]
    return Passage(
        forwards=tuple(pairwise(marks)),
        backwards=backward_windows(backward_starts, now()),
        crossings=tuple(crossings),
        gradients=gradients,
        saved=tuple(map(frozenset, saved)),
        last_saves=tuple(map(max, last_saves, marks)),
    )


def record_backward_start(tensors: Tensors, starts: list[int], now: Callable[[], int]) -> None:
    """Append to `starts` when a gradient of the layer's outputs arrives: then the layer's own backward begins."""
    for tensor in tensors:
        if tensor.grad_fn is not None:
            tensor.register_hook(lambda _: starts.append(now()))  # type: ignore[no-untyped-call]


def backward_windows(starts: Sequence[Sequence[int]], end: int) -> tuple[Window, ...]:
    """The windows of the backward of each layer, and last of the loss; empty for a layer without a backward."""
    found: list[Window] = []
    for layer_starts in starts:  # the first layer's backward is the last to run
        start = min(layer_starts, default=end)
        found.append((start, end))
        end = start
    return tuple(found)


def layer_bytes(trace: AllocationTrace, passage: Passage) -> tuple[LayerBytes, ...]:
    """The memory of each layer, and last of the loss, from the trace of a passage."""
    forward_end = passage.backwards[-1][0]
    below, found = 0, []
    later = LaterLayers(trace, passage.forwards, passage.backwards)
    tensors_of = lifetimes(trace, passage)
    viewed = {place for x in passage.gradients for place in x.viewed(trace)}
    cuts = ((), *passage.crossings, ())
    for layer, (forward, before, crossing) in enumerate(zip(passage.forwards, cuts, cuts[1:], strict=False)):
        stash = sum(trace.alive(*forward, forward_end).values())
        tensors, num_forward_times = tensors_of[layer]
        below += stash
        backward_bytes, leftovers = later.workspace(layer, below)
        crossing_bytes = list[TensorBytes]()
        for i, x in enumerate(crossing):
            is_kept = trace.is_kept(x.address, forward[1], forward_end)
            crossing_bytes.append(
                TensorBytes(
                    num_bytes=x.num_bytes,
                    gradient_bytes=x.num_bytes if x.wants_gradient else 0,
                    unsaved_bytes=0 if is_kept else x.num_bytes,
                    saved_later_bytes=x.num_bytes if is_kept and x.address not in passage.saved[layer] else 0,
                    viewed_bytes=x.num_bytes if (layer, i) in viewed else 0,
                )
            )
        found.append(
            LayerBytes(
                stash_bytes=stash,
                forward_workspace_bytes=max(0, trace.peak_bytes(*forward) - below),
                backward_workspace_bytes=backward_bytes,
                leftovers=leftovers,
                crossing=tuple(crossing_bytes),
                views=tuple(before.index(x) if x.num_bytes and x in before else None for x in crossing),
                tensors=tensors,
                num_forward_times=num_forward_times,
            )
        )
    unkept = (
        x.num_bytes
        for x in passage.crossings[-1]
        if x.address not in passage.saved[-1] and trace.is_kept(x.address, passage.forwards[-1][0], forward_end)
    )
    return (*found[:-1], replace(found[-1], unkept_output_bytes=sum(unkept)))


def lifetimes(trace: AllocationTrace, passage: Passage) -> list[tuple[tuple[Lifetime, ...], int]]:
    """Of each layer, and last of the loss, the tensors and the number of times of its forward, as in `LayerCost`.

    A tensor belongs to the layer that makes it, and ends with its pass where a pass of another layer frees it. A gradient
    for earlier layers belongs to these too, while their backward runs.
    """
    forwards_end, ends, last = passage.backwards[-1][0], passage.backwards[0][1], len(passage.backwards) - 1
    found = [list[tuple[int, int, int]]() for _ in passage.forwards]
    given_ns, freed_ns, _ = trace.blocks
    backward_of = [last - _place_of(x, passage.backwards[::-1]) for x in (given_ns, freed_ns)]
    makers = np.where(given_ns < forwards_end, _place_of(given_ns, passage.forwards), backward_of[0])
    enders = np.where((given_ns >= forwards_end) & (freed_ns < ends), backward_of[1], makers)
    for maker, ender, *block in zip(makers.tolist(), enders.tolist(), *(x.tolist() for x in trace.blocks), strict=True):
        for layer in range(max(0, ender), maker + 1):  # none for the inputs
            found[layer].append((*block,))
    return [_numbered(*x, forwards_end) for x in zip(found, passage.forwards, passage.backwards, strict=True)]


def _numbered(
    blocks: Sequence[tuple[int, int, int]], forward: Window, backward: Window, forwards_end: int
) -> tuple[tuple[Lifetime, ...], int]:
    """Tensors by the number of each event of a layer's passes, from when they are made and freed and their bytes."""

    def within(moment: int) -> int:
        return min(moment, forward[1]) if moment < forwards_end else min(max(moment, backward[0]), backward[1])

    events = [(within(made), within(freed), num_bytes) for made, freed, num_bytes in blocks]
    moments = sorted({forward[1], *(moment for x in events for moment in x[:2])})
    number = {moment: i for i, moment in enumerate(moments)}
    tensors = tuple(Lifetime(num_bytes, number[made], number[freed]) for made, freed, num_bytes in events)
    return tensors, number[forward[1]] + 1


def allocate_gradients(model: nn.Module) -> None:
    """Give every trained parameter a gradient of zeros, as in all micro-batches but the first."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPassage:
    """The windows of a forward, the loss and a backward in two halves, as one graph from layer `first` on.

    No gradient goes back before layer `first`: there the second half is the whole backward, and nothing is pending.
    """

    first: int
    forwards: tuple[Window, ...]  # of the layers from `first`, and of the loss
    inputs: tuple[Window, ...]  # of their first halves
    between: int  # a moment between the halves
    weights: tuple[tuple[int, Window], ...]  # of the second halves, with the layer of each
    tied: frozenset[int]  # layers that share a trained parameter; its gradient is computed once, for the first of them


def measure_halves(
    layers: Sequence[nn.Module], inputs: Tensors, loss: Callable[[Tensors], Tensor], *, device: str = "cpu"
) -> tuple[HalvesBytes, ...]:
    """What both halves take of each layer, and last of the loss, by the allocator; accumulates into the gradients."""
    with traced_allocations(device) as trace:
        passage = pass_in_halves(layers, [tuple(x.parameters()) for x in layers], inputs, loss, now=now_ns)
    return halves_bytes(trace, passage)


def pass_in_halves(
    layers: Sequence[Callable[..., Tensors]],
    parameters: Sequence[Sequence[Tensor]],
    inputs: Tensors,
    loss: Callable[[Tensors], Tensor],
    *,
    now: Callable[[], int],
) -> SplitPassage:
    """Run the layers, with these parameters, the loss, and both halves; `now` is the clock of the trace."""
    first, tensors = 0, inputs
    while first < len(layers) and not wants_gradient(tensors):
        tensors = layers[first](*tensors)
        first += 1
    leaves = detached(tensors)
    starts: list[list[int]] = [[] for _ in range(len(layers) - first + 1)]
    marks, tensors = [now()], leaves
    for layer, layer_starts in zip(layers[first:], starts, strict=False):
        tensors = layer(*tensors)
        record_backward_start(tensors, layer_starts, now)
        marks.append(now())
    value = loss(tensors)
    del tensors
    marks.append(now())
    starts[-1].append(now())
    rest: SecondHalf | None = None
    if value.requires_grad:  # only the second half is kept; the input gradients were sent to the previous stage
        rest = first_half([value], [torch.ones_like(value)], leaves)[1]
    del value
    between = now()
    users: dict[Tensor, set[int]] = {}
    for number, weights in enumerate(parameters[first:], start=first):
        for x in weights:
            users.setdefault(x, set()).add(number)
    return SplitPassage(
        first=first,
        forwards=tuple(pairwise(marks)),
        inputs=backward_windows(starts, between),
        between=between,
        weights=tuple(_second_half(rest, enumerate(parameters[first:], start=first), now)) if rest else (),
        tied=frozenset().union(*(used for x, used in users.items() if x.requires_grad and len(used) > 1)),
    )


def _second_half(
    rest: SecondHalf, parameters: Iterable[tuple[int, Sequence[Tensor]]], now: Callable[[], int]
) -> Iterator[tuple[int, Window]]:
    """The windows from one weight gradient of a part to the next; a shared weight counts for its first layer."""
    layer_of: dict[Tensor, int] = {}
    for layer, weights in parameters:
        layer_of = {**dict.fromkeys(weights, layer), **layer_of}
    ends: list[tuple[int | None, int]] = [(None, now())]  # without a layer: a part of it begins
    hooks = [
        x.register_post_accumulate_grad_hook(lambda x: ends.append((layer_of[x], now())))  # type: ignore[no-untyped-call]
        for x in layer_of
        if x.requires_grad
    ]
    for _ in rest.run_parts():
        ends.append((None, now()))
    for hook in hooks:
        hook.remove()
    for (_, start), (ended, end) in pairwise(ends):
        if ended is not None:
            yield ended, (start, end)


def halves_bytes(trace: AllocationTrace, passage: SplitPassage) -> tuple[HalvesBytes, ...]:
    """The memory of each layer, and last of the loss, from the trace of a passage.

    Pending are the gradients that the second half starts from, charged to the layer whose first half made them, less
    what the first half frees of the layer's stash.
    """
    found = [HalvesBytes()] * passage.first
    if not passage.weights:  # nothing is trained
        return (*found, *(HalvesBytes() for _ in passage.forwards))
    windows: list[list[Window]] = [[] for _ in range(passage.first + len(passage.forwards))]
    for layer, window in passage.weights:
        windows[layer].append(window)
    before, between = passage.inputs[-1][0], passage.between
    for layer, forward, backward in zip(count(passage.first), passage.forwards, passage.inputs):
        stash, kept = (sum(trace.alive(*forward, moment).values()) for moment in (before, between))
        start, end = (trace.peak_bytes(moment, moment) for moment in backward)
        begins = min((begin for begin, _ in windows[layer]), default=0)
        level = trace.peak_bytes(begins, begins)  # when the second half begins
        found.append(
            HalvesBytes(
                pending_bytes=kept - stash + sum(trace.alive(*backward, between).values()),
                input_workspace_bytes=trace.peak_bytes(*backward) - start,
                grown_bytes=max(0, end - start),
                weight_workspace_bytes=None
                if layer in passage.tied
                else max((trace.peak_bytes(*x) - level for x in windows[layer]), default=0),
            )
        )
    return tuple(found)
