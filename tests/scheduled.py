"""Plans made by hand for any schedule, so that what reads plans can be tried without what makes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gplan.core import Device, ModelId, Plan, Prediction, Proof, RecomputeMode, Stage, StageCost, StageMemory
from gplan.schedules.registry import SCHEDULES, make_schedule, num_stages_of
from gplan.simulation.simulator import equal_bubble, step_and_bubble
from tests.made import FREE_LINK, name_of

OWN = "custom:0F0 0F1 2F0 2B0 2F1 2I1 0B0 2W1 0I1 0W1 / 1F0 1F1 1B0 1I1 1W1"
"""Three stages on two devices, two micro-batches, one backward whole and one in halves."""

ONE_OF_EACH = tuple(f"{word}:2" if rule.number else word for word, rule in SCHEDULES.items())
"""A schedule of each rule, those with a number after their name with 2."""

EVERY_SCHEDULE = (*ONE_OF_EACH, "interleaved-1f1b:3", OWN)


def scheduled_plan(
    schedule: str,
    *,
    num_devices: int = 2,
    num_microbatches: int = 2,
    times_s: Sequence[float] = (1.0, 2.0, 0.5, 1.5, 3.0),
    transfer_s: float = 0.25,
    recompute: RecomputeMode = "never",
    **changed: Any,
) -> Plan:
    """One layer a stage, whose forward, I, W and recompute take one of the times each;
    `changed` are fields of the plan."""
    made = make_schedule(schedule, num_devices=num_devices, num_microbatches=num_microbatches)
    stages = tuple(
        stage_of(i, times_s[i % len(times_s)], transfer_s=transfer_s if i < made.num_stages - 1 else 0.0, device=device)
        for i, device in enumerate(made.devices)
    )
    costs = [stage.cost for stage in stages]
    step_s, bubble = step_and_bubble(made, costs, recompute=recompute)
    plan = Plan(
        model=ModelId(name="made", settings=(), digest="made"), device=Device(name="made", kind="cpu"), link=FREE_LINK,
        stages=stages, schedule=schedule, num_microbatches=num_microbatches, microbatch_size=1, recompute=recompute,
        minimize="step-time", memory_limit_bytes=None, loss_reduction="mean",
        prediction=Prediction(
            step_s=step_s, bubble=bubble, ideal_bubble=equal_bubble(made, costs, recompute=recompute)
        ),
        proof=Proof(solver="dp", objective_s=step_s, lower_bound_s=step_s, solve_s=0.0),
    )  # fmt: skip
    return replace(plan, **changed)


def stage_of(index: int, time_s: float, *, transfer_s: float, device: int) -> Stage:
    """Layer `index` alone, named like those of `make_profile`."""
    cost = StageCost(
        forward_s=time_s, backward_s=2 * time_s, recompute_s=time_s, optimizer_s=0.1, activation_bytes=8,
        gradient_bytes=8, activation_s=transfer_s, gradient_s=2 * transfer_s, input_gradient_s=time_s,
        weight_gradient_s=time_s,
    )  # fmt: skip
    memory = StageMemory(
        weight_bytes=100 + index, gradient_bytes=0, optimizer_bytes=0, activation_bytes=0, workspace_bytes=0,
        buffer_bytes=0, moment="0F0",
    )  # fmt: skip
    return Stage(
        index=index, first_layer=index, end_layer=index + 1, layer_names=(name_of(index),), cost=cost, memory=memory,
        layer_forward_s=(time_s,), layer_backward_s=(2 * time_s,), device=device,
    )  # fmt: skip


def num_stages(schedule: str, *, num_devices: int = 2) -> int:
    """How many layers a profile needs for `scheduled_plan`."""
    return num_stages_of(schedule, num_devices)
