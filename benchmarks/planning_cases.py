"""Made-up profiles for `benchmarks/planning.py`: chains, two towers, a transformer, and published graphs as profiles."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from published import PublishedGraph

from gplan.core import Device, Layer, LayerCost, Link, ModelId, Profile, StepCost, Timing, Value, ValueCost

GIB = 2**30
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


def towers_profile(num_each: int, *, seed: int) -> Profile:
    """Two chains side by side that meet at the model's output."""
    draw = np.random.default_rng(seed)
    layers = [made_layer(f"{t}{i}", forward_s=float(draw.uniform(1e-3, 6e-3))) for t in "ab" for i in range(num_each)]
    values = []
    for first in (0, num_each):
        for i in range(first, first + num_each):
            num_bytes = int(draw.integers(1, 10)) << 20
            cost = ValueCost(microbatch_size=1, num_bytes=num_bytes, gradient_bytes=num_bytes)
            reader = i + 1 if i + 1 < first + num_each else 2 * num_each
            values.append(Value(producer=i, consumers=(reader,), costs=(cost,)))
    return made_profile("two towers", layers, Link(latency_s=1e-5, bytes_per_s=1e10), values)


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
            moved[producer, *readers] = time * unit_s
    kept = {(producer, x) for producer, *readers in moved for x in readers}
    moved |= dict.fromkeys(sorted(after - kept), 0.0)
    values = []
    for (producer, *readers), seconds in moved.items():
        num_bytes = round(seconds / 2 * 1e9)
        cost = ValueCost(microbatch_size=1, num_bytes=num_bytes, gradient_bytes=num_bytes)
        values.append(Value(producer=producer, consumers=tuple(readers), costs=(cost,)))
    return made_profile(name, layers, Link(latency_s=0.0, bytes_per_s=1e9), values)


def transformer_profile(num_blocks: int, *, width: int = 4096, sequence: int = 2048) -> Profile:
    """An embedding, blocks and a head at three micro-batch sizes, by a rate of 400 TFLOP/s; 2-byte numbers, Adam."""
    sizes = (1, 2, 4)
    parameters = [50_000 * width, *[12 * width**2] * num_blocks, 50_000 * width]
    flops = [
        0.0,
        *[2.0 * x * sequence + 4.0 * sequence**2 * width for x in parameters[1:-1]],
        2.0 * parameters[-1] * sequence,
    ]
    activation = 2 * sequence * width
    names = ["embedding", *(f"blocks.{i}" for i in range(num_blocks)), "head"]
    layers = [
        Layer(
            name=name,
            kind=name.split(".")[0],
            num_parameters=count,
            weight_bytes=2 * count,
            gradient_bytes=2 * count,
            costs=tuple(
                layer_cost(
                    size,
                    forward_s=5e-5 + size * work / 4e14,
                    stash_bytes=size * (34 if "block" in name else 2) * activation // 2,
                    output_bytes=size * activation,
                )
                for size in sizes
            ),
        )
        for name, count, work in zip(names, parameters, flops, strict=True)
    ]
    return made_profile("transformer", layers, Link(latency_s=5e-6, bytes_per_s=5e10), state_share=6, optimizer_s=0.05)


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
    *,
    state_share: int = 2,
    optimizer_s: float = 0.0,
) -> Profile:
    """A profile of such layers, with an optimizer that keeps `state_share` bytes for each byte of weights."""
    return Profile(
        model=ModelId(name=name, settings=(), digest=name),
        device=Device(name="made up", kind="given"),
        layers=tuple(layers),
        shared_weights=(),
        loss=(),
        loss_reduction="mean",
        step=StepCost(
            optimizer=Timing.exactly(optimizer_s),
            zero_grad=Timing.exactly(0.0),
            optimizer_name="made up",
            state_bytes=state_share * sum(x.weight_bytes for x in layers),
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
