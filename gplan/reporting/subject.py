"""What a report is about, its timelines by side, the load of each stage and the memory limit.

A side is "predicted" or "measured"; a plan alone has only the first. The same functions compute both sides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from gplan.core import ActionKind, Plan, Run, Timeline, runs_forward_again
from gplan.simulation.simulator import simulate

Subject: TypeAlias = Run | Plan
"""What a report is about: a plan, or a run with its plan."""

PREDICTED, MEASURED = "predicted", "measured"

PASSES: dict[str, ActionKind] = {
    "forward_s": ActionKind.FORWARD,
    "backward_s": ActionKind.BACKWARD,
    "input_gradient_s": ActionKind.INPUT_GRADIENT,
    "weight_gradient_s": ActionKind.WEIGHT_GRADIENT,
}

Load: TypeAlias = dict[str, float]
"""Seconds of a stage per micro-batch: a backward, or its halves, of `PASSES`; `recompute_s`; `communication_s`, the
transfers that it receives."""


def plan_of(subject: Subject) -> Plan:
    """The plan that the report is about."""
    return subject.plan if isinstance(subject, Run) else subject


def measured_peaks(subject: Subject) -> tuple[int, ...]:
    """The measured peak memory of each device; empty for a plan, or a run without memory measurements."""
    return subject.peak_bytes if isinstance(subject, Run) and any(subject.peak_bytes) else ()


def timelines_of(subject: Subject) -> dict[str, Timeline]:
    """The predicted timeline and, for a run, the measured one, by side."""
    predicted = {PREDICTED: simulate(plan_of(subject))}
    return {**predicted, MEASURED: subject.timeline} if isinstance(subject, Run) else predicted


def side_text(subject: Subject, side: str) -> str:
    """The name of a side in charts and tables, a measured one with its engine."""
    if side == MEASURED and isinstance(subject, Run):
        return f"measured ({subject.engine} engine)"
    return "predicted"


def stage_loads(subject: Subject) -> dict[str, list[Load]]:
    """The load of each stage, by side; a measured backward includes its recompute, so `recompute_s` is 0 there."""
    plan = plan_of(subject)
    timeline = simulate(replace(plan, recompute="never"))
    again = Counter(
        x.action.stage
        for x in timeline.loop_spans
        if runs_forward_again(x.action, num_microbatches=plan.num_microbatches, recompute=plan.recompute)
    )
    recompute_s = [again[x.index] / plan.num_microbatches * x.cost.recompute_s for x in plan.stages]
    loads = {PREDICTED: _loads(timeline, recompute_s)}
    return {**loads, MEASURED: _loads(subject.timeline, [0.0] * plan.num_stages)} if isinstance(subject, Run) else loads


def _loads(timeline: Timeline, recompute_s: Sequence[float]) -> list[Load]:
    return [
        {
            **{part: timeline.total_s(x, stage=stage) / timeline.num_microbatches for part, x in PASSES.items()},
            "recompute_s": again_s,
            "communication_s": timeline.received_s(stage),
        }
        for stage, again_s in enumerate(recompute_s)
    ]


def capacity_bytes(plan: Plan) -> int | None:
    """The memory limit of each device: the one that was set, else the device's memory, None if unknown.

    Of a plan for a machine, that of the device with the least memory.
    """
    known = [limit for stage in plan.stages if (limit := plan.limit_of(stage)) is not None]
    return min(known, default=None if plan.is_for_machine else plan.device.memory_bytes)


def capacity_name(plan: Plan) -> str:
    """What `capacity_bytes` is, in words."""
    if plan.memory_limit_bytes is not None:
        return "limit of each device"
    return "smallest memory of a device" if plan.is_for_machine else "memory of each device"
