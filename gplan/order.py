"""A profile with its layers in another order: how a plan for a model with branches becomes a plan for a chain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from gplan.nouns import Layer, Profile, Value


def in_order(profile: Profile, order: Sequence[int]) -> Profile:
    """The same profile with layer `order[i]` at place i;
    raises ValueError where a layer would come before what it needs."""
    if list(order) == list(range(len(profile.layers))):
        return profile
    place = {layer: i for i, layer in enumerate(order)}
    place[len(profile.layers)] = len(profile.layers)  # the model's output
    layers = [_renumbered(profile.layers[i], i, place) for i in order]
    return replace(
        profile,
        layers=tuple(x if x.same_as is None else replace(x, same_as=place[x.same_as]) for x in layers),
        shared_weights=tuple(
            replace(x, layers=tuple(sorted(place[i] for i in x.layers))) for x in profile.shared_weights
        ),
        values=tuple(moved(x, place) for x in profile.values),
    )


def _renumbered(layer: Layer, index: int, place: Mapping[int, int]) -> Layer:
    """The layer where those whose backward makes what waits in its own have other numbers."""
    costs = tuple(x.renumbered(lambda num_later: place[index + num_later] - place[index]) for x in layer.costs)
    return replace(layer, costs=costs)


def moved(value: Value, place: Mapping[int, int]) -> Value:
    """The value where each layer has another number, `place[layer]`; the model's output too, if it reads the value."""
    producer = None if value.producer is None else place[value.producer]
    return replace(value, producer=producer, consumers=tuple(sorted(place[x] for x in value.consumers)))
