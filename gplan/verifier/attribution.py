"""Where the error of a predicted step comes from: measured minus predicted seconds, in parts that add up to it.

One thing after the other of the prediction is replaced by what was measured, and each time the step is laid out anew;
by how much it grows is that thing's part. In turn: each stage's mean seconds per action, the engine's gaps after
actions, the transfers, every single action's own seconds, and what is outside the micro-batch loop. What is left then
is waiting that no mean explains. A stage's part depends on which stages come before it, so it is the mean of both
orders of the stages.

    |-- predicted --|- stage 0 -|- stage 1 -|- engine -|- transfers -|- single actions -|- step extras -|- waiting -|
    |------------------------------------------------ measured --------------------------------------------------------|

Transfers are seen only where a device waited for them, gaps only where it did not: the others stay as predicted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise

from gplan.nouns import Plan, Run, Timeline
from gplan.schedules import Flow, flow_of
from gplan.simulator import schedule_of, simulate
from gplan.verifier.facts import Facts, Seen, laid_out_s, mean_durations, predicted_facts


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
    flow, predicted_s = flow_of(schedule_of(run.plan)), simulate(run.plan).step_s
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


def _states(plan: Plan, flow: Flow, measured: Timeline) -> Iterator[Facts]:
    """As predicted, then with one thing after the other as measured."""
    facts = predicted_facts(plan, flow)
    yield facts
    seen = Seen(flow, measured, facts)
    own = seen.durations()
    for change in (
        {"durations": mean_durations(facts.durations, own)},
        {"gaps": {**facts.gaps, **seen.gaps()}},
        {"transfers": {**facts.transfers, **seen.transfers()}},
        {"durations": own},
        {"tails": seen.tails(), "start_s": measured.loop_start_s},
    ):
        facts = replace(facts, **change)
        yield facts


def _compute_parts(flow: Flow, predicted: Facts, drifted: Facts) -> Iterator[ErrorPart]:
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
