"""Bytes that cross a cut, or both cuts of a stage: distinct values made on one side and read on the other, each once.

Profiles here have one micro-batch size (`gplan/corrections`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from gplan.core import LayerCost, Profile, Value, ValueCost
from gplan.graph.down_sets import Bools, DownSets, Ints, Output, StageBytesOf, Way


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """Bytes across the cut at each position, [P] each; nothing crosses at both ends."""

    activation_bytes: Ints
    gradient_bytes: Ints
    unsaved_bytes: Ints  # of the activations, what no layer keeps; nothing at both ends
    saved_later_bytes: Ints  # of the activations, what only layers behind the cut keep; nothing at both ends
    kept_bytes: Ints  # the activations; at the last position the model's outputs that the loss keeps


def crossing_of(
    profile: Profile, layer_costs: Sequence[LayerCost], loss: LayerCost | None, downsets: DownSets
) -> Crossing:
    """What crosses the cut at every position: from the values of a profile, or without any from its layers.

    Nothing crosses before the first layer and after the last.
    """
    activations, gradients, unsaved, later = (np.zeros(downsets.size, dtype=np.int64) for _ in range(4))
    for way, num_bytes in saved_outputs(profile, layer_costs, only_later=True):
        later += num_bytes * is_crossing(way, downsets)
    if profile.values:
        for value in values_of(profile):
            cost, crosses = value.costs[0], is_crossing((value.producer, value.consumers), downsets)
            activations += crosses * cost.num_bytes
            gradients += crosses * cost.gradient_bytes
            unsaved += crosses * cost.unsaved_bytes
    else:
        activations[1:] = [x.output_bytes for x in layer_costs]
        gradients[1:] = [x.output_gradient_bytes for x in layer_costs]
        unsaved[1:] = [x.output_unsaved_bytes for x in layer_costs]
    unkept = loss.unkept_output_bytes if loss else 0
    inside = np.ones(downsets.size, dtype=np.int64)
    inside[[0, -1]] = 0
    return Crossing(
        activation_bytes=activations * inside,
        gradient_bytes=gradients * inside,
        unsaved_bytes=unsaved * inside,
        saved_later_bytes=later * inside,
        kept_bytes=np.concatenate([[0], activations[1:-1], np.maximum(0, activations[-1:] - unsaved[-1:] - unkept)]),
    )


def is_crossing(way: Way, downsets: DownSets) -> Bools:
    """[P]: whether a value has its producer on one side of the cut and any of its consumers on the other."""
    producer, consumers = way
    made = np.ones(downsets.size, dtype=np.bool_) if producer is None else downsets.is_before(producer)
    readers = [downsets.is_before(x) for x in consumers if x < downsets.num_layers]
    is_last_output = len(readers) < len(consumers)
    return made if is_last_output else made & ~np.logical_and.reduce(readers)


def saved_outputs(profile: Profile, layer_costs: Sequence[LayerCost], *, only_later: bool) -> list[Output]:
    """The part of the stash of each layer that its outputs are, by value.

    With `only_later` the part that the layer itself does not keep, up to the value's first reader: in a stage that ends
    before it, a recompute does not make it again.
    """
    left = [x.stash_bytes for x in layer_costs]
    found: list[Output] = []
    for value in values_of(profile):
        if value.producer is None:
            continue
        cost = value.costs[0]
        saved = min(left[value.producer], cost.num_bytes - cost.unsaved_bytes)
        left[value.producer] -= saved
        if only_later:
            found.append(((value.producer, value.consumers[:1]), min(saved, cost.saved_later_bytes)))
        else:
            found.append(((value.producer, value.consumers), saved))
    return [x for x in found if x[1]]


def unsaved_outputs(profile: Profile) -> list[Output]:
    """The outputs of layers that no layer keeps for its backward, by value."""
    sizes = ((x, x.costs[0].unsaved_bytes) for x in values_of(profile))
    return [((x.producer, x.consumers), size) for x, size in sizes if size and x.producer is not None]


def values_of(profile: Profile) -> tuple[Value, ...]:
    """The values of a profile by storage; without any, the outputs that each layer passes to the next."""
    if profile.values:
        return storages_of(profile)
    found = []
    for i, layer in enumerate(profile.layers[:-1]):
        costs = tuple(
            ValueCost(
                microbatch_size=x.microbatch_size,
                num_bytes=x.output_bytes,
                gradient_bytes=x.output_gradient_bytes,
                unsaved_bytes=x.output_unsaved_bytes,
                saved_later_bytes=x.output_saved_later_bytes,
            )
            for x in layer.costs
        )
        found.append(Value(producer=i, consumers=(i + 1,), costs=costs))
    return tuple(found)


def storages_of(profile: Profile) -> tuple[Value, ...]:
    """The values of a profile, a view and what it is a view of as one; a layer that makes only views reads nothing.

    A plain chain has none.
    """
    makers = {x.producer for x in profile.values if x.view_of is None}
    found = dict(enumerate(profile.values))
    views = [(x.producer or 0, place, x.view_of) for place, x in found.items() if x.view_of is not None]
    for _, place, place_of_viewed in sorted(views, reverse=True):
        view, viewed = found.pop(place), found[place_of_viewed]
        readers = viewed.consumers if view.producer in makers else ()
        costs = tuple(replace(x, viewed_bytes=y.viewed_bytes) for x, y in zip(viewed.costs, view.costs, strict=True))
        found[place_of_viewed] = replace(viewed, consumers=(*readers, *view.consumers), costs=costs)
    return tuple(found.values())


@dataclass(frozen=True, kw_only=True)
class PassThrough:
    """Values that cross both cuts of a stage; for stages as pairs of positions. A profile without values has none.

    The stage holds such an activation once: it is sent on from the buffer in which it was received. A gradient that no
    layer of the stage adds to is held twice, as autograd copies it from the receive buffer. So is a gradient that is
    only a part of the received one, as that of a skip which the stage's last layer concatenates. The first half of a
    split backward copies only the latter: it sends the others out of the receive buffer.
    """

    profile: Profile
    downsets: DownSets
    saved_later: Sequence[Output]

    def activation_bytes(self, first: Ints, end: Ints) -> tuple[Ints, Ints]:
        """[E] each: bytes of a micro-batch's activations that cross both cuts, all of them and those that no layer keeps."""
        every, unsaved = self._activations
        return every(first, end), unsaved(first, end)

    @cached_property
    def _activations(self) -> tuple[StageBytesOf, StageBytesOf]:
        every = [((x.producer, x.consumers), x.costs[0].num_bytes) for x in self._storages]
        unsaved = [((x.producer, x.consumers), x.costs[0].unsaved_bytes) for x in self._storages]
        return self._passing(every, is_unread=False), self._passing(unsaved, is_unread=False)

    @cached_property
    def saved_later_bytes(self) -> StageBytesOf:
        """Of the activations that cross both cuts, those that only layers behind the stage keep."""
        return self._passing(self.saved_later, is_unread=False)

    @cached_property
    def gradient_bytes(self) -> StageBytesOf:
        """Bytes of the gradients that autograd copies from the receive buffer to send them back.

        A gradient that is a view passes the consumer that makes the view: it counts as read by the layer after that.
        """
        sizes = dict[Way, int]()
        for value in self._storages:
            cost, consumers = value.costs[0], value.consumers
            is_read_next = len(consumers) == 1 and any(
                x.producer == consumers[0] and x.consumers[0] == consumers[0] + 1 for x in self._storages
            )
            viewed = cost.viewed_bytes if is_read_next else 0
            for way, size in (
                ((value.producer, consumers), cost.gradient_bytes - viewed),
                ((value.producer, (consumers[0] + 1,)), viewed),
            ):
                sizes[way] = sizes.get(way, 0) + size
        return self._passing(list(sizes.items()), is_unread=True)

    @cached_property
    def returned_bytes(self) -> StageBytesOf:
        """Bytes of the gradients that the first half of a split backward sends back as they were received."""
        sizes = [((x.producer, x.consumers), x.costs[0].gradient_bytes) for x in self._storages]
        return self._passing(sizes, is_unread=True)

    @cached_property
    def _storages(self) -> tuple[Value, ...]:
        return storages_of(self.profile)

    def _passing(self, outputs: Sequence[Output], *, is_unread: bool) -> StageBytesOf:
        """The bytes of what is made before and read after stages that are neither the first nor the last."""
        passing = self.downsets.pass_through([x for x in outputs if x[1]], is_unread=is_unread)
        last = self.downsets.size - 1
        return lambda first, end: ((first > 0) & (end < last)) * passing(first, end)
