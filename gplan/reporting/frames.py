"""The numbers behind every chart, as data frames: one row per thing drawn, in seconds and bytes.

Column `side` says "predicted" or "measured"; a Plan alone has only the first. Both timelines go through the same
functions, so a difference between the sides is never one of definition.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import pandas as pd

from gplan.bubble import idle_pieces
from gplan.nouns import ActionKind, Plan, Run, Stage, Timeline
from gplan.reporting.colours import MEASURED_PEAK, MEMORY
from gplan.simulator import is_recomputed, simulate

Subject: TypeAlias = Run | Plan
"""What a report is about: a plan alone, or a run with its plan."""

PREDICTED, MEASURED = "predicted", "measured"


def plan_of(subject: Subject) -> Plan:
    """The plan that the report is about."""
    return subject.plan if isinstance(subject, Run) else subject


def timelines_of(subject: Subject) -> dict[str, Timeline]:
    """The predicted timeline, and after it the measured one of a run, by side."""
    predicted = {PREDICTED: simulate(plan_of(subject))}
    return {**predicted, MEASURED: subject.timeline} if isinstance(subject, Run) else predicted


def side_text(subject: Subject, side: str) -> str:
    """What a side is called wherever it is shown: how its figures came about."""
    if side == MEASURED and isinstance(subject, Run):
        return f"measured ({subject.engine} engine)"
    return "predicted (computed)"


def layers_frame(subject: Subject) -> pd.DataFrame:
    """One row per layer, in order: layer, name, stage, forward_s, backward_s (per micro-batch)."""
    rows = [
        (stage.first_layer + i, name, stage.index, forward_s, backward_s)
        for stage in plan_of(subject).stages
        for i, (name, forward_s, backward_s) in enumerate(
            zip(stage.layer_names, stage.layer_forward_s, stage.layer_backward_s, strict=True)
        )
    ]
    return pd.DataFrame(rows, columns=["layer", "name", "stage", "forward_s", "backward_s"])


def stages_frame(subject: Subject) -> pd.DataFrame:
    """One row per stage and side: its layers, mean seconds per micro-batch, optimizer and idle seconds, peak bytes.

    `load_s` is the device time that a micro-batch occupies, what the stage receives included. A measured backward is
    not split: its `recompute_s` is 0.
    """
    plan = plan_of(subject)
    sides = timelines_of(subject).items()
    rows = [_stage_row(subject, side, timeline, stage) for stage in plan.stages for side, timeline in sides]
    frame = pd.DataFrame(rows)
    parts = ["forward_s", "backward_s", "recompute_s", "communication_s"]
    return frame.assign(load_s=frame[parts].sum(axis="columns"))


def spans_frame(subject: Subject) -> pd.DataFrame:
    """One row per action: side, device, stage, kind, microbatch, start_s, end_s."""
    rows = [
        (side, x.device, x.action.stage, x.action.kind.value, x.action.microbatch, x.start_s, x.end_s)
        for side, timeline in timelines_of(subject).items()
        for x in timeline.spans
    ]
    columns = ["side", "device", "stage", "kind", "microbatch", "start_s", "end_s"]
    return pd.DataFrame(rows, columns=columns)


def transfers_frame(subject: Subject) -> pd.DataFrame:
    """One row per transfer: side, source, target, kind and microbatch of its action, start_s, end_s, num_bytes."""
    rows = [
        (side, x.source, x.target, x.action.kind.value, x.action.microbatch, x.start_s, x.end_s, x.num_bytes)
        for side, timeline in timelines_of(subject).items()
        for x in timeline.transfers
    ]
    columns = ["side", "source", "target", "kind", "microbatch", "start_s", "end_s", "num_bytes"]
    return pd.DataFrame(rows, columns=columns)


def idle_frame(subject: Subject) -> pd.DataFrame:
    """One row per idle piece of the micro-batch loop: side, device, cause, start_s, end_s, duration_s."""
    rows = [
        (side, x.device, x.cause.value, x.start_s, x.end_s, x.duration_s)
        for side, timeline in timelines_of(subject).items()
        for x in idle_pieces(timeline)
    ]
    return pd.DataFrame(rows, columns=["side", "device", "cause", "start_s", "end_s", "duration_s"])


def memory_frame(subject: Subject) -> pd.DataFrame:
    """One row per stage and category of the predicted peak; with a run one more for its measured peak."""
    rows = [
        (stage.index, PREDICTED, category, getattr(stage.memory, category))
        for stage in plan_of(subject).stages
        for category in MEMORY
    ]
    if isinstance(subject, Run):
        rows += [(stage, MEASURED, MEASURED_PEAK.name, peak) for stage, peak in enumerate(subject.peak_bytes)]
    return pd.DataFrame(rows, columns=["stage", "side", "category", "num_bytes"])


def capacity_bytes(plan: Plan) -> int | None:
    """What each device may hold: the limit that was set, else what the device has, else None."""
    return plan.memory_limit_bytes if plan.memory_limit_bytes is not None else plan.device.memory_bytes


def _stage_row(subject: Subject, side: str, timeline: Timeline, stage: Stage) -> dict[str, object]:
    recompute_s = _recompute_s(plan_of(subject), stage) if side == PREDICTED else 0.0
    peaks = subject.peak_bytes if side == MEASURED and isinstance(subject, Run) else None
    return {
        "stage": stage.index,
        "side": side,
        "first_layer": stage.first_layer,
        "end_layer": stage.end_layer,
        "forward_s": timeline.mean_s(stage=stage.index, kind=ActionKind.FORWARD),
        "backward_s": timeline.mean_s(stage=stage.index, kind=ActionKind.BACKWARD) - recompute_s,
        "recompute_s": recompute_s,
        "communication_s": _received_s(timeline, stage.index),
        "optimizer_s": timeline.mean_s(stage=stage.index, kind=ActionKind.OPTIMIZER),
        "idle_s": _idle_s(timeline, stage.index),
        "peak_bytes": peaks[stage.index] if peaks else stage.memory.peak_bytes,
    }


def _recompute_s(plan: Plan, stage: Stage) -> float:
    """Mean seconds per micro-batch that recomputing adds to the backward of a stage."""
    num_microbatches = plan.num_microbatches
    again = [
        is_recomputed(i, num_microbatches=num_microbatches, recompute=plan.recompute) for i in range(num_microbatches)
    ]
    return float(np.mean(again)) * stage.cost.recompute_s


def _received_s(timeline: Timeline, stage: int) -> float:
    """Mean seconds per micro-batch during which something is on its way to a stage."""
    received = [x.end_s - x.start_s for x in timeline.transfers if _receiver(x.action.stage, x.action.kind) == stage]
    return sum(received) / timeline.num_microbatches


def _receiver(stage: int, kind: ActionKind) -> int:
    return stage + 1 if kind is ActionKind.FORWARD else stage - 1


def _idle_s(timeline: Timeline, stage: int) -> float:
    """Idle seconds, within the micro-batch loop, of the device that holds a stage."""
    device = next(span.device for span in timeline.spans if span.action.stage == stage)
    busy_s = sum(span.duration_s for span in timeline.loop_spans if span.device == device)
    return timeline.loop_end_s - timeline.loop_start_s - busy_s
