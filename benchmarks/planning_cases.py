"""Made-up profiles for `benchmarks/planning.py`: chains, and published graphs as profiles."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from published import PublishedGraph

from gplan.core import Device, Layer, LayerCost, Link, ModelId, Profile, StepCost, Timing, Value, ValueCost

UNITS_S = {"ms": 1e-3, "s": 1.0}


def chain_profile(num_layers: int, *, has_transfers: bool, seed: int = 0) -> Profile:
    """Layers of random cost, weights and activations; a backward takes twice its forward."""
    draw = np.random.default_rng(seed)
    layers = [
        made_layer(
            f"layer{i}",
            forward_s=float(draw.uniform(1e-3, 6e-3)),
            weight_bytes=int(draw.integers(1, 100)) << 20,
            stash_bytes=int(draw.integers(1, 100)) << 20,
            output_bytes=int(draw.integers(1, 10)) << 20 if has_transfers else 0,
        )
        for i in range(num_layers)
    ]
    return made_profile(f"chain of {num_layers}", layers, Link(latency_s=1e-5, bytes_per_s=1e10))


def published_profile(name: str, graph: PublishedGraph) -> Profile:
    """A published graph as a profile: a backward takes twice its forward, values move at 1 GB/s, half of it back."""
    order, unit_s = graph.running_order, UNITS_S[graph.unit]
    place = {layer: i for i, layer in enumerate(order)}
    layers = [made_layer(graph.nodes[x][0], forward_s=graph.compute[x] * unit_s / 3) for x in order]
    after = {(place[a], place[b]) for a, b in graph.precedence}
    moved: dict[tuple[int, ...], float] = {}
    for ends, time in graph.shared.items():
        producer, *readers = sorted(place[x] for x in ends)
        if all((producer, x) in after for x in readers):
            moved[(producer, *readers)] = time * unit_s
    kept = {(producer, x) for producer, *readers in moved for x in readers}
    moved |= dict.fromkeys(sorted(after - kept), 0.0)
    values = []
    for (producer, *readers), seconds in moved.items():
        num_bytes = round(seconds / 2 * 1e9)
        cost = ValueCost(microbatch_size=1, num_bytes=num_bytes, gradient_bytes=num_bytes)
        values.append(Value(producer=producer, consumers=tuple(readers), costs=(cost,)))
    return made_profile(name, layers, Link(latency_s=0.0, bytes_per_s=1e9), values)


def made_layer(
    name: str, *, forward_s: float, weight_bytes: int = 0, stash_bytes: int = 0, output_bytes: int = 0
) -> Layer:
    """A layer at micro-batch size 1."""
    return Layer(
        name=name,
        kind="made",
        num_parameters=weight_bytes // 4,
        weight_bytes=weight_bytes,
        gradient_bytes=weight_bytes,
        costs=(layer_cost(1, forward_s=forward_s, stash_bytes=stash_bytes, output_bytes=output_bytes),),
    )


def layer_cost(microbatch_size: int, *, forward_s: float, stash_bytes: int, output_bytes: int) -> LayerCost:
    """What a layer costs whose backward takes twice its forward."""
    return LayerCost(
        microbatch_size=microbatch_size,
        forward=Timing.exactly(forward_s),
        backward=Timing.exactly(2 * forward_s),
        stash_bytes=stash_bytes,
        forward_workspace_bytes=0,
        backward_workspace_bytes=0,
        output_bytes=output_bytes,
        output_gradient_bytes=output_bytes,
        output_unsaved_bytes=0,
    )


def made_profile(
    name: str,
    layers: Sequence[Layer],
    link: Link,
    values: Sequence[Value] = (),
) -> Profile:
    """A profile of such layers; the optimizer keeps two bytes for each byte of weights."""
    return Profile(
        model=ModelId(name=name, settings=(), digest=name),
        device=Device(name="made up", kind="given"),
        layers=tuple(layers),
        shared_weights=(),
        loss=(),
        loss_reduction="mean",
        step=StepCost(
            optimizer=Timing.exactly(0.0),
            zero_grad=Timing.exactly(0.0),
            optimizer_name="made up",
            state_bytes=2 * sum(x.weight_bytes for x in layers),
            workspace_bytes=0,
        ),
        link=link,
        overhead_s=0.0,
        whole_model=(),
        created="2000-01-01T00:00:00+00:00",
        versions=(),
        origin="given",
        values=tuple(values),
    )
