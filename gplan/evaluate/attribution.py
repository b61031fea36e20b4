"""Where the error of a predicted step comes from: measured minus predicted seconds, in parts that add up to it.

One group of times after the other is changed from predicted to measured, and the step is laid out again as the
simulator does; each change of its length is one part. Last comes waiting that no mean explains:

    |-- predicted --|- host -|- stage 0 -|- stage 1 -|- engine -|- transfers -|- single actions -|- step extras -|- waiting -|
    |---------------------------------------------------- measured ---------------------------------------------------------|

The host's part is known where the speed of the host is (`Run.equal_speed`). The other parts, errors of the model of
costs, start from the times at the speed in the run. A timeline shows a transfer only where a device waited for it, and an engine gap only where it did not; the
others stay as predicted.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise
from statistics import fmean
from typing import TypeAlias

from gplan.core import Action, ActionKind, Plan, Run, Span, Timeline
from gplan.evaluate.compare import order_difference
from gplan.simulation.kernel import ActionProgram, TiedDevices, action_times, when_updates_begin, whole_program
from gplan.simulation.simulator import gap_s, planned_s, schedule_of, simulate, tied_devices_of, transfer_s

StageKind: TypeAlias = tuple[int, ActionKind]
ByAction: TypeAlias = Mapping[Action, float]
ByKind: TypeAlias = Mapping[StageKind, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """The seconds that determine a step's length."""

    durations: ByAction
    gaps: ByKind  # from the end of an action until its device can begin the next
    transfers: ByKind  # from then until the action's output has arrived
    tails: tuple[float, ...]  # of each device, from the last action that its updates wait for to their end
    tied: TiedDevices  # these wait for each other before their updates
    start_s: float = 0.0  # when the first action begins


def predicted_times(plan: Plan) -> StepTimes:
    """The times that the plan predicts."""
    costs, schedule = plan.stage_costs, schedule_of(plan)
    tied = tied_devices_of(schedule, costs)
    actions, duration_s = whole_program(schedule, plan.recompute).actions, planned_s(schedule, costs, plan.recompute)
    kinds = {(x.stage, x.kind): x for x in actions}
    return StepTimes(
        durations={action: duration_s(action) for action in actions},
        gaps={kind: gap_s(action, costs[action.stage]) for kind, action in kinds.items()},
        transfers={kind: transfer_s(action, costs) for kind, action in kinds.items()},
        tails=_tails(simulate(plan), tied),
        tied=tied,
    )


def _tails(timeline: Timeline, tied: TiedDevices) -> tuple[float, ...]:
    ends, loop_ends = ([0.0] * timeline.num_devices for _ in range(2))
    for span in timeline.spans:
        ends[span.device] = max(ends[span.device], span.end_s)
        if span.action.kind is not ActionKind.OPTIMIZER:
            loop_ends[span.device] = max(loop_ends[span.device], span.end_s)
    return tuple(map(operator.sub, ends, when_updates_begin(tied, loop_ends)))


def layout_step_s(program: ActionProgram, times: StepTimes) -> float:
    """The step's length with these times: an action starts when its device is free and its input has arrived."""
    durations = [times.durations[action] for action in program.actions]
    occupied = [x + times.gaps[action.stage, action.kind] for x, action in zip(durations, program.actions, strict=True)]
    transfers = [times.transfers[action.stage, action.kind] for action in program.actions]
    last = [0.0] * len(times.tails)
    rows = action_times(program.individual, occupied, transfers, zero=0.0)
    for entry, (start_s, _, _), duration_s in zip(program.entries, rows, durations, strict=True):
        last[entry.device] = start_s + duration_s
    begins = when_updates_begin(times.tied, last)
    return max(times.start_s + begin_s + tail_s for begin_s, tail_s in zip(begins, times.tails, strict=True))


def measured_waits(program: ActionProgram, predicted: StepTimes, spans: Mapping[Action, Span]) -> tuple[ByKind, ByKind]:
    """The mean gap and the mean transfer, by stage and kind of action, where a timeline shows them.

    A gap is the time between an action and the next one of its device, if that had its input before the action. A
    transfer lasts from the sender's end and gap, or from the arrival before over the same link, until the waiting
    receiver begins.
    """
    latest: dict[int, Span] = {}
    neighbours = []  # of every action: the span before it on its device, its own, and that of the device that sends to it
    for action, (device, dependency, *_) in zip(program.actions, program.entries, strict=True):
        sender = spans[program.actions[dependency]] if dependency >= 0 else None
        neighbours.append((latest.get(device), spans[action], sender))
        latest[device] = spans[action]
    found: dict[StageKind, list[float]] = {}
    for before, span, sender in neighbours:
        if before is not None and (sender is None or sender.end_s <= before.start_s):
            found.setdefault(_stage_kind(before), []).append(span.start_s - before.end_s)
    gaps = {kind: fmean(seconds) for kind, seconds in found.items()}
    usual, found, arrived = {**predicted.gaps, **gaps}, {}, dict[tuple[int, int], float]()
    for before, span, sender in neighbours:
        free_s = 0.0 if before is None else before.end_s + usual[_stage_kind(before)]
        if sender is not None and sender.end_s >= free_s:
            kind = _stage_kind(sender)
            sent_s, link = sender.end_s + usual[kind], (sender.device, span.device)
            found.setdefault(kind, []).append(span.start_s - max(sent_s, arrived.get(link, sent_s)))
            arrived[link] = span.start_s
    return gaps, {kind: fmean(seconds) for kind, seconds in found.items()}


def _stage_kind(span: Span) -> StageKind:
    return span.action.stage, span.action.kind


class ErrorCause(str, Enum):
    """The cause of a part of the error."""

    __str__ = str.__str__

    HOST_SPEED = "host speed"
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

    def parts_from(self, least: float) -> tuple[list[ErrorPart], float]:
        """The parts of at least this share of the measured step, and the seconds of all others together."""
        parts = [x for x in self.parts if abs(x.seconds) >= least * self.measured_s]
        return parts, self.error_s - sum(x.seconds for x in parts)


def attribute_error(run: Run) -> Attribution | None:
    """The parts of the error of a run's step, for every schedule and both engines; O(K^2 M).

    None for a run with an `order_difference`: another order is not a longer step of the predicted one. A stage's part
    depends on the order in which stages are changed, so it is the mean over both orders.
    """
    plan, timeline, speed = run.plan, run.timeline, run.equal_speed
    if order_difference(plan, timeline):
        return None
    program, spans = whole_program(schedule_of(plan), plan.recompute), {x.action: x for x in timeline.loop_spans}
    predicted, host_parts = predicted_times(plan), list[ErrorPart]()
    gaps, transfers = measured_waits(program, predicted, spans)
    if speed is not None and speed.is_certain:
        drift_s = speed.step_s - simulate(plan).step_s
        host_parts.append(ErrorPart(cause=ErrorCause.HOST_SPEED, stage=None, seconds=drift_s))
        # The virtual engine takes transfers and its own cost as planned, whatever the speed.
        ratio, on_host = speed.ratio, 1.0 if run.engine == "virtual" else speed.ratio
        predicted = replace(
            predicted,
            durations={action: ratio * x for action, x in predicted.durations.items()},
            gaps={kind: on_host * x for kind, x in predicted.gaps.items()},
            transfers={kind: on_host * x for kind, x in predicted.transfers.items()},
            tails=tuple(ratio * x for x in predicted.tails),
        )
    means = timeline.mean_durations(plan.recompute)
    changes: dict[ErrorCause, dict[str, object]] = {
        ErrorCause.COMPUTE: {"durations": means},
        ErrorCause.ENGINE: {"gaps": {**predicted.gaps, **gaps}},
        ErrorCause.COMMUNICATION: {"transfers": {**predicted.transfers, **transfers}},
        ErrorCause.SINGLE_ACTIONS: {"durations": {action: span.duration_s for action, span in spans.items()}},
        ErrorCause.STEP_EXTRAS: {"tails": _tails(timeline, predicted.tied), "start_s": timeline.loop_start_s},
    }
    _, *seconds = _increments_s(program, predicted, list(changes.values()))
    parts = [
        *host_parts,
        *_compute_parts(program, predicted, means),
        *(ErrorPart(cause=x, stage=None, seconds=y) for x, y in zip(list(changes)[1:], seconds, strict=True)),
    ]
    measured_s, predicted_s = timeline.step_s, simulate(plan).step_s
    rest_s = math.fsum([measured_s, -predicted_s, *(-part.seconds for part in parts)])
    rest = ErrorPart(cause=ErrorCause.WAITING, stage=None, seconds=rest_s)
    return Attribution(predicted_s=predicted_s, measured_s=measured_s, parts=(*parts, rest))


def _compute_parts(program: ActionProgram, predicted: StepTimes, means: ByAction) -> Iterator[ErrorPart]:
    stages = sorted({action.stage for action in program.actions})
    added = dict.fromkeys(stages, 0.0)
    for changed in (stages, stages[::-1]):
        durations, changes = predicted.durations, list[Mapping[str, object]]()
        for stage in changed:
            durations = {**durations, **{action: x for action, x in means.items() if action.stage == stage}}
            changes.append({"durations": durations})
        for stage, seconds in zip(changed, _increments_s(program, predicted, changes), strict=True):
            added[stage] += seconds / 2
    for stage, seconds in added.items():
        yield ErrorPart(cause=ErrorCause.COMPUTE, stage=stage, seconds=seconds)


def _increments_s(program: ActionProgram, times: StepTimes, changes: Sequence[Mapping[str, object]]) -> Iterator[float]:
    """By how much each change, on top of the changes before it, lengthens the step."""
    lengths = [layout_step_s(program, times)]
    for change in changes:
        times = replace(times, **change)  # type: ignore[arg-type]
        lengths.append(layout_step_s(program, times))
    return (after - before for before, after in pairwise(lengths))
