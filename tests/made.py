"""Profiles made by hand: a test builds its case in three lines from plain values."""

from __future__ import annotations

from collections.abc import Sequence

from gplan.core import (
    Device,
    EngineCost,
    Layer,
    LayerCost,
    Link,
    LinkPoint,
    ModelId,
    Profile,
    SharedWeight,
    StepCost,
    Timing,
)

FREE_LINK = Link(latency_s=0.0, bytes_per_s=1e30)
SLOW_ENGINE = EngineCost(
    action_s=0.25,
    step_s=1.5,
    sending=Link(
        latency_s=0.5,
        bytes_per_s=4.0,
        points=(LinkPoint(num_bytes=1, seconds=0.5), LinkPoint(num_bytes=3, seconds=0.75)),
    ),
)


def make_profile(
    forward_s: Sequence[float],
    backward_s: Sequence[float] | None = None,
    *,
    weight_bytes: Sequence[int] | int = 0,
    stash_bytes: Sequence[int] | int = 0,
    output_bytes: Sequence[int] | int = 0,
    workspace_bytes: Sequence[int] | int = 0,
    link: Link = FREE_LINK,
    optimizer_s: float = 0.0,
    fixed_s: float = 0.0,
    overhead_s: float = 0.0,
    engine: EngineCost | None = None,
    shared_weights: tuple[SharedWeight, ...] = (),
    microbatch_sizes: Sequence[int] = (1,),
) -> Profile:
    """A profile of layers named a, b, c, ...; costs grow in proportion to the micro-batch size; numbers fill lists."""
    num_layers = len(forward_s)
    backward_s = [2 * x for x in forward_s] if backward_s is None else backward_s
    weights, stashes, outputs, workspaces = (
        [value] * num_layers if isinstance(value, int) else list(value)
        for value in (weight_bytes, stash_bytes, output_bytes, workspace_bytes)
    )
    layers = tuple(
        Layer(
            name=name_of(i),
            kind="Layer",
            num_parameters=weights[i] // 4,
            weight_bytes=weights[i],
            gradient_bytes=weights[i],
            costs=tuple(
                LayerCost(
                    microbatch_size=size,
                    forward=Timing.exactly(size * forward_s[i]),
                    backward=Timing.exactly(size * backward_s[i]),
                    stash_bytes=size * stashes[i],
                    forward_workspace_bytes=size * workspaces[i],
                    backward_workspace_bytes=size * workspaces[i],
                    output_bytes=size * outputs[i],
                    output_gradient_bytes=size * outputs[i],
                    output_unsaved_bytes=0,
                )
                for size in microbatch_sizes
            ),
        )
        for i in range(num_layers)
    )
    return Profile(
        model=ModelId(name="made", settings=(), digest="made"),
        device=Device(name="made", kind="cpu"),
        layers=layers,
        shared_weights=shared_weights,
        loss=(),
        loss_reduction="mean",
        step=StepCost(
            optimizer=Timing.exactly(optimizer_s),
            zero_grad=Timing.exactly(0.0),
            optimizer_name="made",
            state_bytes=2 * sum(weights),
            workspace_bytes=0,
            fixed_s=fixed_s,
        ),
        link=link,
        overhead_s=overhead_s,
        engine=engine,
        whole_model=(),
        created="2000-01-01T00:00:00+00:00",
        versions=(),
        origin="given",
    )


def name_of(index: int) -> str:
    """The name of a layer by its place."""
    return chr(ord("a") + index) if index < 26 else f"layer{index}"
