"""What one of several replicas holds and takes where they divide a stage among them, as a profile.

All costs of a plan come from a profile, so solvers, bounds and programs need nothing else to plan with sharding. Replicas
divide by torch's FSDP2 (`gplan/runtime/sharded_replicas.py`): of each parameter a replica holds one of R equal parts along
the first dimension, padded, and the optimizer's state for that part. Gradients are summed whole over the micro-batches of
a step and then reduce-scattered. With P the padded parameters and p = P / R, G and g the same of gradients, it holds
    optimizer   p + P from the first action to the last: the stage is gathered when a step begins
                (with master weights p is a part of those, which the optimizer's state holds already)
    weights     p, and P of a layer while it runs: it is gathered for its forward, its recompute and its backward
A layer begins with 2 P, the message and the parameters made of it. On a GPU the message of a forward stays until the
next layer's parameters are made, and in a backward the layer before is received meanwhile; the first layer of a stage is
taken as if the stage before were here. A recompute leaves its last layer gathered for the backward. While gradients are
reduced, there is a copy of them (of the stage; with "weights" of one layer), and then g is left. On a GPU only what a
gather takes longer than computing counts.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import TypeVar

from gplan.core import Layer, LayerCost, Profile, Sharding, SharedWeight, Timing
from gplan.core.checks import CollectiveKind
from gplan.core.profile import ParameterSize, ReplicaShare

EXCHANGED: dict[Sharding, tuple[tuple[CollectiveKind, str], ...]] = {
    "none": (("all_reduce", "gradient_bytes"),),
    "optimizer": (("reduce_scatter", "gradient_bytes"), ("all_gather", "gathered_bytes")),
    "weights": (("reduce_scatter", "gradient_bytes"),),
}
"""The collectives of a stage's replicas once a step, and of which bytes of its layers."""

Held = TypeVar("Held", Layer, SharedWeight)


def sharded(profile: Profile, *, num_replicas: int, sharding: Sharding) -> Profile:
    """The profile of one of R replicas; itself where nothing is divided."""
    if num_replicas == 1 or sharding == "none":
        return profile
    in_place = profile.sums_in_place and sharding == "optimizer"

    def divided(held: Held) -> Held:
        return _divided(held, num_replicas, sharding, in_place=in_place, has_masters=profile.precision.master_weights)

    layers, shared_weights = [divided(x) for x in profile.layers], [divided(x) for x in profile.shared_weights]
    if sharding == "weights":
        gathered = [x.gathered_bytes for x in layers]
        for weight in shared_weights:
            for user in weight.layers:
                gathered[user] += weight.gathered_bytes
        before = accumulate(gathered, lambda found, x: x or found, initial=0)
        seconds, overlaps = (
            profile.link.of_replicas.collectives_s("all_gather", gathered, num_replicas),
            profile.device.kind != "cpu",
        )
        each = list(zip(gathered, before, map(float, seconds), strict=False))
        layers = [
            replace(layer, costs=tuple(_gathering(cost, *x, overlaps=overlaps) for cost in layer.costs))
            for layer, x in zip(layers, each, strict=True)
        ]
    return replace(profile, layers=tuple(layers), shared_weights=tuple(shared_weights))


def division_gains(profile: Profile, *, num_replicas: int) -> bool:
    """Whether every stage takes less time, and no more memory, with a divided optimizer than whole.

    Exact for each layer and shared weight, so for all stages; False where seconds are not linear in bytes.
    """
    link, step, total_bytes = profile.link.of_replicas, profile.step, profile.trained_bytes
    if link.points or link.collectives or not total_bytes:
        return False
    replica = sharded(profile, num_replicas=num_replicas, sharding="optimizer")
    whole_amount = profile.whole_update_amount
    state = step.state_bytes / total_bytes
    message_s = (num_replicas - 1) / num_replicas / link.bytes_per_s
    pairs = zip((*profile.layers, *profile.shared_weights), (*replica.layers, *replica.shared_weights), strict=True)
    gains = []
    for whole, part in pairs:
        saved_bytes = whole.gradient_bytes - part.updated_bytes
        copied_bytes = max(0, part.reduced_bytes - part.gathered_bytes)
        saved_s = step.spread_s * (whole.update_amount - part.update_amount) / whole_amount
        gains.append(saved_s - message_s * (part.gathered_bytes - whole.gradient_bytes))
        if part.weight_bytes - whole.weight_bytes + copied_bytes > state * saved_bytes:
            return False
    return min(gains) >= 0 and sum(gains) > 0


def _divided(held: Held, num_replicas: int, sharding: Sharding, *, in_place: bool, has_masters: bool) -> Held:
    """A layer or a shared weight with what one replica holds of it."""
    known = held.parameters
    if not known and (held.num_parameters or held.gradient_bytes):  # else all of it is buffers, which stay whole
        size = held.weight_bytes  # of parameters of unknown sizes, as if they could be divided anywhere
        known = (ParameterSize(num_rows=size, num_bytes=size, is_trained=held.gradient_bytes > 0),) if size else ()
    divided = [x for x in known if x.num_rows and (x.is_trained or sharding == "weights")]
    trained = [x for x in divided if x.is_trained]
    part_bytes, updated_bytes = (sum(x.part_bytes(num_replicas) for x in some) for some in (divided, trained))
    trained_bytes = sum(x.num_bytes for x in known if x.is_trained)
    per_byte = held.gradient_bytes / trained_bytes if trained_bytes else 0.0  # gradients may be of another type
    undivided_bytes = trained_bytes - sum(x.num_bytes for x in trained)
    gathered_bytes = num_replicas * part_bytes
    share = ReplicaShare(
        gathered_bytes=gathered_bytes,
        reduced_bytes=0 if in_place else round(per_byte * num_replicas * updated_bytes),
        updated_bytes=round(per_byte * (updated_bytes + undivided_bytes)),
    )
    own_bytes = 0 if in_place else part_bytes - has_masters * updated_bytes
    kept_bytes = own_bytes + (gathered_bytes if sharding == "optimizer" else 0)
    weight_bytes = held.weight_bytes - sum(x.num_bytes for x in divided) + kept_bytes
    if isinstance(held, SharedWeight):
        return replace(held, weight_bytes=weight_bytes, share=share)
    largest = (
        (round(per_byte * x.part_bytes(num_replicas)) for x in trained)
        if held.parameters
        else [-(-held.largest_trained_bytes // num_replicas)]
    )
    return replace(held, weight_bytes=weight_bytes, share=share, largest_trained_bytes=max(largest, default=0))


def _gathering(cost: LayerCost, num_bytes: int, before_bytes: int, gather_s: float, *, overlaps: bool) -> LayerCost:
    """A layer that is gathered whenever it runs, in `gather_s` seconds; `before_bytes` are those of the one gathered before.

    `overlaps`: whether devices compute meanwhile.
    """

    def longer(timing: Timing) -> Timing:
        return timing.plus(max(0.0, gather_s - (timing.median_s if overlaps else 0.0)))

    def longer_if(timing: Timing | None) -> Timing | None:
        return timing and longer(timing)

    message_bytes, before_bytes = (num_bytes or before_bytes, before_bytes) if overlaps else (0, 0)
    made_bytes = before_bytes + 2 * num_bytes - cost.stash_bytes  # before the forward
    running_bytes = num_bytes + before_bytes + cost.backward_workspace_bytes
    return replace(
        cost,
        forward=longer(cost.forward),
        backward=longer(cost.backward),
        recompute=longer(cost.known_recompute),
        last_recompute=longer_if(cost.last_recompute),
        first_backward=longer_if(cost.first_backward),
        input_gradient=longer_if(cost.input_gradient),
        # the first half of a backward gathers; without one the second does
        weight_gradient=cost.weight_gradient if cost.input_gradient else longer_if(cost.weight_gradient),
        forward_workspace_bytes=max(message_bytes + num_bytes + cost.forward_workspace_bytes, made_bytes),
        backward_workspace_bytes=max(2 * num_bytes, running_bytes),
        gathering_bytes=max(0, 2 * num_bytes - running_bytes),
    )
