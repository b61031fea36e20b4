"""What a report is about, and the numbers behind its charts as data frames, in seconds and bytes.

A row is one thing drawn. Column `side` is "predicted" or "measured"; a plan alone has only the first. The same
functions compute both sides.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TypeAlias

import pandas as pd

from gplan.core import ActionKind, Plan, Profile, Run, Timeline, runs_forward_again
from gplan.core.progress import Progress, no_progress
from gplan.corrections.contention import without_contention
from gplan.evaluate.explain.explain import explain
from gplan.evaluate.explain.explanation import Explanation
from gplan.evaluate.replanning import reprice
from gplan.reporting.choices import ScalingPoint, choices_of, planned_choices
from gplan.simulation.bubble import idle_pieces
from gplan.simulation.simulator import simulate

_OPTIONS_S = 8.0  # time limit of the explanation's options


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAnalysis:
    """Other choices than the plan, and with its profile the explanation of the plan."""

    choices: tuple[ScalingPoint, ...]
    explanation: Explanation | None = None  # None: there was no profile
    has_plans: bool = False  # whether the choices are plans of their own, or else the plan's stages


def analysis_of(
    subject: Subject,
    profile: Profile | None,
    *,
    progress: Progress = no_progress,
) -> PlanAnalysis:
    """The choices, and the explanation if there is a profile; raises FileError if the plan was not made from it.

    The plan of a run by the virtual engine has no contention, so the plans that it is compared with have none either.
    """
    plan = plan_of(subject)
    if profile is None:
        return PlanAnalysis(choices=choices_of(plan))
    is_alone = isinstance(subject, Run) and subject.engine == "virtual"
    known = without_contention(profile) if is_alone else profile
    reasons = explain(plan, known, options_s=_OPTIONS_S, sensitivities_s=0.0, progress=progress)
    if is_alone and reasons.notes and plan.prediction.gives(reprice(plan, profile, engine="virtual").prediction.step_s):
        reasons = replace(reasons, notes=())
    tried = reasons.options[0].outcome is not None
    choices = planned_choices(plan, known, progress=progress) if tried else choices_of(plan)
    return PlanAnalysis(choices=choices, explanation=reasons, has_plans=tried)


Subject: TypeAlias = Run | Plan
"""What a report is about: a plan, or a run with its plan."""

PREDICTED, MEASURED = "predicted", "measured"

BACKWARDS: dict[str, ActionKind] = {
    "backward_s": ActionKind.BACKWARD,
    "input_gradient_s": ActionKind.INPUT_GRADIENT,
    "weight_gradient_s": ActionKind.WEIGHT_GRADIENT,
}
"""The columns of backward seconds: whole, and its two halves."""

LOAD = ("forward_s", *BACKWARDS, "recompute_s", "communication_s")
"""The columns whose sum is a stage's load."""


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
    """The name of a side in charts and tables, with its origin."""
    if side == MEASURED and isinstance(subject, Run):
        return f"measured ({subject.engine} engine)"
    return "predicted (computed)"


def stages_frame(subject: Subject) -> pd.DataFrame:
    """One row per stage and side: side, stage, seconds per micro-batch.

    A backward is in `backward_s`, or its halves are in `input_gradient_s` and `weight_gradient_s`. `load_s` is the sum
    per micro-batch, with the transfers that the stage receives. A measured backward includes its recompute:
    `recompute_s` is then 0.
    """
    plan = plan_of(subject)
    timelines = timelines_of(subject)
    frames = [_side_stages(plan, timeline).assign(side=side) for side, timeline in timelines.items()]
    frames[0] = _recompute_apart(plan, timelines[PREDICTED], frames[0])
    frame = pd.concat(frames, ignore_index=True).sort_values("stage", kind="stable", ignore_index=True)
    return frame.assign(load_s=frame[list(LOAD)].sum(axis="columns"))


def spans_frame(timeline: Timeline) -> pd.DataFrame:
    """One row per action: device, stage, chunk (index among its device's stages), kind, microbatch, start_s,
    end_s."""
    rows = [
        (
            x.device,
            x.action.stage,
            timeline.chunks[x.action.stage],
            x.action.kind.value,
            x.action.microbatch,
            x.start_s,
            x.end_s,
        )
        for x in timeline.spans
    ]
    return pd.DataFrame(rows, columns=["device", "stage", "chunk", "kind", "microbatch", "start_s", "end_s"])


def transfers_frame(timeline: Timeline) -> pd.DataFrame:
    """One row per transfer: device (its source), start_s, end_s."""
    rows = [(x.source, x.start_s, x.end_s) for x in timeline.transfers]
    return pd.DataFrame(rows, columns=["device", "start_s", "end_s"])


def idle_frame(timeline: Timeline) -> pd.DataFrame:
    """One row per idle interval of the bubble: device, cause, start_s, end_s."""
    rows = [(x.device, x.cause.value, x.start_s, x.end_s) for x in idle_pieces(timeline)]
    return pd.DataFrame(rows, columns=["device", "cause", "start_s", "end_s"])


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


def _side_stages(plan: Plan, timeline: Timeline) -> pd.DataFrame:
    """One row per stage of one timeline; recomputing is part of the backward, or of the half that runs it."""
    stages, num_microbatches = range(plan.num_stages), timeline.num_microbatches
    kinds = {"forward_s": ActionKind.FORWARD, **BACKWARDS}
    return pd.DataFrame(
        {
            "stage": stages,
            **{
                column: [timeline.total_s(kind, stage=stage) / num_microbatches for stage in stages]
                for column, kind in kinds.items()
            },
            "recompute_s": 0.0,
            "communication_s": [timeline.received_s(stage) for stage in stages],
        }
    )


def _recompute_apart(plan: Plan, timeline: Timeline, predicted: pd.DataFrame) -> pd.DataFrame:
    """Move the recompute from the backwards, or from the halves that run it, to a column of its own."""
    columns = {kind: column for column, kind in BACKWARDS.items()}
    counts = Counter(
        (x.action.stage, columns[x.action.kind])
        for x in timeline.loop_spans
        if runs_forward_again(x.action, num_microbatches=plan.num_microbatches, recompute=plan.recompute)
    )
    apart = predicted.copy()
    for (stage, column), count in counts.items():
        seconds = count / plan.num_microbatches * plan.stage_costs[stage].recompute_s
        apart.loc[stage, [column, "recompute_s"]] += [-seconds, seconds]
    return apart
