"""What crosses the cut at each position: the distinct values made on one side and read on the other, each once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gplan.downsets import Bools, DownSets, Floats, Ints
from gplan.interpolation import value_cost_at
from gplan.nouns import LayerCost, Profile, Value, ValueCost


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """Bytes and given seconds across the cut at each position, [P] each; nothing crosses at both ends."""

    activation_bytes: Ints
    gradient_bytes: Ints
    unsaved_bytes: Ints  # of the activations, what no layer keeps; nothing at both ends
    kept_bytes: Ints  # the activations; at the last position the model's outputs that the last layers or the loss keep
    activation_given_s: Floats  # seconds that the profile gives instead of bytes
    gradient_given_s: Floats


def crossing_of(
    profile: Profile, layer_costs: Sequence[LayerCost], downsets: DownSets, microbatch_size: int
) -> Crossing:
    """What crosses at every position of a profile: by its values, or, of a chain without any, by its layers."""
    if profile.values:
        return _of_values(profile, downsets, microbatch_size)
    nothing = np.zeros(downsets.size)
    outputs, gradients, unsaved = (
        np.array([0, *(getattr(x, field) for x in layer_costs)], dtype=np.int64)
        for field in ("output_bytes", "output_gradient_bytes", "output_unsaved_bytes")
    )
    return _ended(outputs, gradients, unsaved, nothing, nothing)


def is_crossing(value: Value, downsets: DownSets) -> Bools:
    """[P]: whether the value has its producer on one side of the cut and any of its consumers on the other."""
    made = np.ones(downsets.size, dtype=np.bool_) if value.producer is None else downsets.contain(value.producer)
    readers = [downsets.contain(x) for x in value.consumers if x < downsets.num_layers]
    if value.is_gradient:
        is_read: Bools = np.logical_or.reduce(readers)
        return ~made & is_read
    is_last_output = len(readers) < len(value.consumers)
    return made if is_last_output else made & ~np.logical_and.reduce(readers)


def _of_values(profile: Profile, downsets: DownSets, microbatch_size: int) -> Crossing:
    activations, gradients, unsaved = (np.zeros(downsets.size, dtype=np.int64) for _ in range(3))
    given_s, given_back_s = np.zeros(downsets.size), np.zeros(downsets.size)
    for value in profile.values:
        cost, crosses = value_cost_at(value.costs, microbatch_size), is_crossing(value, downsets)
        if value.is_gradient:
            gradients += crosses * (cost.num_bytes if value.transfer_s is None else 0)
            given_back_s += crosses * (value.transfer_s or 0.0)
            continue
        activations += crosses * (cost.num_bytes if value.transfer_s is None else 0)
        given_s += crosses * (value.transfer_s or 0.0)
        gradients += crosses * cost.gradient_bytes
        unsaved += crosses * cost.unsaved_bytes
    return _ended(activations, gradients, unsaved, given_s, given_back_s)


def _ended(activations: Ints, gradients: Ints, unsaved: Ints, given_s: Floats, given_back_s: Floats) -> Crossing:
    """With nothing crossing before the first layer and after the last."""
    inside = np.ones(len(activations), dtype=np.int64)
    inside[[0, -1]] = 0
    return Crossing(
        activation_bytes=activations * inside,
        gradient_bytes=gradients * inside,
        unsaved_bytes=unsaved * inside,
        kept_bytes=np.concatenate([[0], activations[1:-1], np.maximum(0, activations[-1:] - unsaved[-1:])]),
        activation_given_s=given_s * inside,
        gradient_given_s=given_back_s * inside,
    )


def values_of(profile: Profile) -> tuple[Value, ...]:
    """The values of a profile; of a chain without any, those that its layers hand to the next."""
    if profile.values:
        return profile.values
    return tuple(
        Value(producer=i, consumers=(i + 1,), costs=tuple(_handed_on(x) for x in layer.costs))
        for i, layer in enumerate(profile.layers[:-1])
    )


def _handed_on(cost: LayerCost) -> ValueCost:
    return ValueCost(
        microbatch_size=cost.microbatch_size,
        num_bytes=cost.output_bytes,
        gradient_bytes=cost.output_gradient_bytes,
        unsaved_bytes=cost.output_unsaved_bytes,
    )
