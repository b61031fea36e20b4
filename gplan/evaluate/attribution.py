"""All that a step's length follows from, as a plan says it and as a measured timeline shows it.

The step is laid out as the simulator does: an action starts when its device is free and its input has arrived. Of a
timeline, transfers are seen only where a device waited for them, gaps only where it did not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from statistics import fmean
from typing import TypeAlias

from gplan.core import Action, ActionKind, Plan, Run, Span, StageCost, Timeline
from gplan.schedules.dependencies import ExecutionOrder, execution_order
from gplan.simulation.simulator import gap_s, laid_out, planned_s, schedule_of, simulate

StageKind: TypeAlias = tuple[int, ActionKind]
ByAction: TypeAlias = Mapping[Action, float]
ByKind: TypeAlias = Mapping[StageKind, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that a step's length follows from, in seconds."""

    durations: ByAction
    gaps: ByKind  # from the end of an action until its device can begin the next
    transfers: ByKind  # from then until what the action sends has arrived
    tails: tuple[float, ...]  # of each device, from the end of its last action to the end of its last update
    start_s: float = 0.0  # when the first action begins


def laid_out_s(flow: ExecutionOrder, facts: Facts) -> float:
    """The step laid out: an action starts when its device is free and its input has arrived."""
    durations = [facts.durations[action] for action in flow.actions]
    occupied = [x + facts.gaps[action.stage, action.kind] for x, action in zip(durations, flow.actions, strict=True)]
    starts, _ = laid_out(flow, occupied, facts.transfers)
    ends = [start_s + lasting_s for start_s, lasting_s in zip(starts, durations, strict=True)]
    last = dict(zip(flow.devices, ends, strict=True))
    return facts.start_s + max(last[device] + tail_s for device, tail_s in enumerate(facts.tails))


def predicted_facts(plan: Plan, flow: ExecutionOrder) -> Facts:
    """What the plan says."""
    costs, schedule = [stage.cost for stage in plan.stages], schedule_of(plan)
    duration_s, kinds = planned_s(schedule, costs, plan.recompute), {(x.stage, x.kind): x for x in flow.actions}
    return Facts(
        durations={action: duration_s(action) for action in flow.actions},
        gaps={kind: gap_s(action, costs[action.stage]) for kind, action in kinds.items()},
        transfers={
            (stage, kind): costs[stage].activation_s if kind is ActionKind.FORWARD else _returned_s(costs, stage)
            for stage, kind in kinds
        },
        tails=_tails(simulate(plan)),
    )


def _returned_s(costs: Sequence[StageCost], stage: int) -> float:
    """Seconds in which what a stage sends back arrives at the stage before."""
    return costs[stage - 1].gradient_s if stage else 0.0


def _tails(timeline: Timeline) -> tuple[float, ...]:
    ends, loop_ends = ([0.0] * timeline.num_devices for _ in range(2))
    for span in timeline.spans:
        ends[span.device] = max(ends[span.device], span.end_s)
        if span.action.kind is not ActionKind.OPTIMIZER:
            loop_ends[span.device] = max(loop_ends[span.device], span.end_s)
    return tuple(end_s - loop_s for end_s, loop_s in zip(ends, loop_ends, strict=True))


class Seen:
    """What a measured timeline says of the actions of a flow."""

    def __init__(self, flow: ExecutionOrder, measured: Timeline, predicted: Facts) -> None:
        self._spans = {span.action: span for span in measured.loop_spans}
        self._flow, self._measured, self._predicted = flow, measured, predicted

    def durations(self) -> dict[Action, float]:
        """Of every action."""
        return {action: self._spans[action].duration_s for action in self._flow.actions}

    def gaps(self) -> dict[StageKind, float]:
        """The mean time between an action and the next one of its device, where that had its input long before."""
        samples: dict[StageKind, list[float]] = {}
        for before, span, sent in self._meetings():
            if before is not None and (sent is None or sent.end_s <= before.start_s):
                samples.setdefault(_kind_of(before), []).append(span.start_s - before.end_s)
        return {kind: fmean(found) for kind, found in samples.items()}

    def transfers(self) -> dict[StageKind, float]:
        """The mean time from when a sender was done until its idle receiver began, by what was sent."""
        samples: dict[StageKind, list[float]] = {}
        gaps = {**self._predicted.gaps, **self.gaps()}
        for before, span, sent in self._meetings():
            ready_s = 0.0 if before is None else before.end_s + gaps[_kind_of(before)]
            if sent is not None and sent.end_s >= ready_s:
                samples.setdefault(_kind_of(sent), []).append(span.start_s - sent.end_s - gaps[_kind_of(sent)])
        return {kind: fmean(found) for kind, found in samples.items()}

    def tails(self) -> tuple[float, ...]:
        """Of each device."""
        return _tails(self._measured)

    def _meetings(self) -> Iterator[tuple[Span | None, Span, Span | None]]:
        """Every action's span between the one before it on its device and the one elsewhere whose output it takes."""
        latest: dict[int, Span] = {}
        for action, device, need in zip(self._flow.actions, self._flow.devices, self._flow.dependencies, strict=True):
            span = self._spans[action]
            is_sent = need >= 0 and self._flow.devices[need] != device
            yield latest.get(device), span, self._spans[self._flow.actions[need]] if is_sent else None
            latest[device] = span


def _kind_of(span: Span) -> StageKind:
    return span.action.stage, span.action.kind


# Where the error of a predicted step comes from: measured minus predicted seconds, in parts that add up to it.
#
# One thing after the other of the prediction is replaced by what was measured, and each time the step is laid out anew;
# by how much it grows is that thing's part. In turn: each stage's mean seconds per action, the engine's gaps after
# actions, the transfers, every single action's own seconds, and what is outside the micro-batch loop. What is left then
# is waiting that no mean explains. A stage's part depends on which stages come before it, so it is the mean of both
# orders of the stages.
#
#     |-- predicted --|- stage 0 -|- stage 1 -|- engine -|- transfers -|- single actions -|- step extras -|- waiting -|
#     |------------------------------------------------ measured --------------------------------------------------------|
#
# Transfers are seen only where a device waited for them, gaps only where it did not: the others stay as predicted.


class ErrorCause(StrEnum):
    """What a part of the error comes from."""

    COMPUTE = "compute"
    ENGINE = "engine"
    COMMUNICATION = "communication"
    SINGLE_ACTIONS = "single actions"
    STEP_EXTRAS = "optimizer and step extras"
    WAITING = "waiting"


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorPart:
    """Seconds by which the measured step is longer, by one cause; negative: shorter."""

    cause: ErrorCause
    stage: int | None  # of compute; else None
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """The error of a step and its parts."""

    predicted_s: float
    measured_s: float
    parts: tuple[ErrorPart, ...]

    @property
    def error_s(self) -> float:
        """Measured minus predicted; the sum of the parts."""
        return self.measured_s - self.predicted_s


def attributed(run: Run) -> Attribution:
    """The error of the run's step, in parts; for every schedule and both engines, O(K^2 M).

    Only for a run without a `departure_of` the plan's order: another order is not a longer step of the one predicted.
    """
    flow, predicted_s = execution_order(schedule_of(run.plan)), simulate(run.plan).step_s
    states = list(_states(run.plan, flow, run.timeline))
    lengths = [laid_out_s(flow, facts) for facts in states]
    grown = [b - a for a, b in pairwise(lengths)]
    causes = (ErrorCause.ENGINE, ErrorCause.COMMUNICATION, ErrorCause.SINGLE_ACTIONS, ErrorCause.STEP_EXTRAS)
    parts = [
        *_compute_parts(flow, states[0], states[1]),
        *(ErrorPart(cause=x, stage=None, seconds=y) for x, y in zip(causes, grown[1:], strict=True)),
    ]
    measured_s = run.timeline.step_s
    rest_s = math.fsum([measured_s, -predicted_s, *(-part.seconds for part in parts)])
    rest = ErrorPart(cause=ErrorCause.WAITING, stage=None, seconds=rest_s)
    return Attribution(predicted_s=predicted_s, measured_s=measured_s, parts=(*parts, rest))


def _states(plan: Plan, flow: ExecutionOrder, measured: Timeline) -> Iterator[Facts]:
    """As predicted, then with one thing after the other as measured."""
    facts = predicted_facts(plan, flow)
    yield facts
    seen = Seen(flow, measured, facts)
    own = seen.durations()
    for change in (
        {"durations": measured.mean_durations(plan.recompute)},
        {"gaps": {**facts.gaps, **seen.gaps()}},
        {"transfers": {**facts.transfers, **seen.transfers()}},
        {"durations": own},
        {"tails": seen.tails(), "start_s": measured.loop_start_s},
    ):
        facts = replace(facts, **change)
        yield facts


def _compute_parts(flow: ExecutionOrder, predicted: Facts, drifted: Facts) -> Iterator[ErrorPart]:
    """What the stages' mean seconds add, each stage's the mean over both orders in which they are replaced."""
    stages = sorted({action.stage for action in flow.actions})
    added = dict.fromkeys(stages, 0.0)
    for order in (stages, stages[::-1]):
        facts, length_s = predicted, laid_out_s(flow, predicted)
        for stage in order:
            own = {action: x for action, x in drifted.durations.items() if action.stage == stage}
            facts = replace(facts, durations={**facts.durations, **own})
            length_s, before_s = laid_out_s(flow, facts), length_s
            added[stage] += (length_s - before_s) / 2
    for stage, seconds in added.items():
        yield ErrorPart(cause=ErrorCause.COMPUTE, stage=stage, seconds=seconds)
