"""Plans and profiles by their names alone: what matters to an export, with costs of no interest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from gplan.core import (
    Device,
    ModelId,
    Plan,
    Prediction,
    Profile,
    Proof,
    SharedWeight,
    Stage,
    StageCost,
    StageMemory,
    Value,
    ValueCost,
)
from gplan.schedules.registry import make_schedule, num_devices_of
from tests.made import FREE_LINK, make_profile

COST = StageCost(
    forward_s=1.0, backward_s=2.0, recompute_s=1.0, optimizer_s=0.0, activation_bytes=0, gradient_bytes=0,
    activation_s=0.0, gradient_s=0.0,
)  # fmt: skip
MEMORY = StageMemory(
    weight_bytes=1, gradient_bytes=1, optimizer_bytes=1, activation_bytes=1, workspace_bytes=1, buffer_bytes=1,
    moment="F0",
)  # fmt: skip


def planned(*stages: Sequence[str], **changed: Any) -> Plan:
    """A plan of stages given by the names of their layers, 8 micro-batches of 2 samples; `changed` are fields of it.

    The stages lie on the devices where its schedule, 1f1b if nothing is said, has them.
    """
    ends = [sum(map(len, stages[: i + 1])) for i in range(len(stages))]
    devices = devices_of(changed.get("schedule", "1f1b"), len(stages), changed.get("num_microbatches", 8))
    made = tuple(
        Stage(
            index=i, first_layer=end - len(names), end_layer=end, layer_names=tuple(names), cost=COST, memory=MEMORY,
            layer_forward_s=(1.0,) * len(names), layer_backward_s=(2.0,) * len(names), device=devices[i],
        )
        for i, (names, end) in enumerate(zip(stages, ends, strict=True))
    )  # fmt: skip
    plan = Plan(
        model=ModelId(name="made", settings=(), digest="made"), device=Device(name="made", kind="cpu"), link=FREE_LINK,
        stages=made, schedule="1f1b", num_microbatches=8, microbatch_size=2, recompute="never", minimize="step-time",
        memory_limit_bytes=None, loss_reduction="mean", prediction=Prediction(step_s=1.0, bubble=0.1, ideal_bubble=0.1),
        proof=Proof(solver="dp", objective_s=1.0, lower_bound_s=1.0, solve_s=0.0),
    )  # fmt: skip
    return replace(plan, **changed)


def devices_of(schedule: str, num_stages: int, num_microbatches: int) -> tuple[int, ...]:
    """The device of each of so many stages."""
    num_devices = num_devices_of(schedule, num_stages)
    return make_schedule(schedule, num_devices=num_devices, num_microbatches=num_microbatches).devices


def cut(names: Sequence[str], cuts: Sequence[int], **changed: Any) -> Plan:
    """The layers cut at these places."""
    ends = [0, *cuts, len(names)]
    return planned(*(names[first:end] for first, end in pairwise(ends)), **changed)


def profiled(names: Sequence[str], **changed: Any) -> Profile:
    """A profile of layers with these names; `changed` are fields of it."""
    made = make_profile([1.0] * len(names), microbatch_sizes=(2,))
    layers = tuple(replace(layer, name=name) for layer, name in zip(made.layers, names, strict=True))
    return replace(made, layers=layers, **changed)


def value(producer: int | None, *consumers: int, **changed: Any) -> Value:
    """What one layer makes and others read."""
    return Value(producer=producer, consumers=consumers, costs=(ValueCost(microbatch_size=2, num_bytes=4),), **changed)


def shared(*layers: int) -> SharedWeight:
    """A parameter of several layers."""
    return SharedWeight(name="tied.weight", layers=layers, num_parameters=1, weight_bytes=4, gradient_bytes=4)


def transformer(num_blocks: int, *, path: str = "layers") -> list[str]:
    """The layers of a language model as torchtitan names them."""
    return ["tok_embeddings", *(f"{path}.{i}" for i in range(num_blocks)), "norm", "output"]


@st.composite
def cuts_of(draw: st.DrawFn, num_layers: int) -> list[int]:
    """Where to cut that many layers, into 1 to 6 stages."""
    places = st.integers(1, num_layers - 1)
    return sorted(draw(st.sets(places, max_size=min(5, num_layers - 1))))
