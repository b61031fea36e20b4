"""Predicted against measured, row by row: the step, the bubble and its causes, every stage's times and peak memory.

Both sides are the same nouns, so each row asks the simulated and the measured timeline the same question. An error is
signed: positive where the prediction was too high.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gplan.bubble import idle_by_cause
from gplan.nouns import ActionKind, IdleCause, Plan, Run, Timeline
from gplan.simulator import simulate
from gplan.units import UnitKind

STEP_TIME = "step time"
THROUGHPUT = "throughput"
BUBBLE = "bubble"
FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
PEAK_MEMORY = "peak memory"

_ACTIONS = {FORWARD: ActionKind.FORWARD, BACKWARD: ActionKind.BACKWARD, OPTIMIZER: ActionKind.OPTIMIZER}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One quantity, predicted and measured, of one stage or of the whole step."""

    quantity: str
    stage: int | None  # None: of the whole step
    predicted: float
    measured: float
    unit: UnitKind
    error: float | None  # see `prediction_error`


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How far a plan's prediction was from what its run measured."""

    engine: str
    rows: tuple[Row, ...]

    def row(self, quantity: str, *, stage: int | None = None) -> Row:
        """The row of that quantity; raises ValueError where there is none."""
        for row in self.rows:
            if row.quantity == quantity and row.stage == stage:
                return row
        known = ", ".join(dict.fromkeys(row.quantity for row in self.rows))
        raise ValueError(f"no row for {quantity!r} of stage {stage}; expected one of {known}")


def compare(run: Run) -> Comparison:
    """The step, the bubble by cause, then each stage: mean seconds per action and peak memory; O(K^2 M)."""
    predicted, measured = simulate(run.plan), run.timeline
    rows = (*_step_rows(run), *_idle_rows(predicted, measured), *_stage_rows(run, predicted))
    return Comparison(engine=run.engine, rows=rows)


def prediction_error(predicted: float, measured: float, unit: UnitKind) -> float | None:
    """Of a share the difference; of all else the difference over the measured, or None where just one of them is 0.

    >>> prediction_error(0.25, 0.5, "share"), prediction_error(0.25, 0.5, "seconds"), prediction_error(0, 1, "bytes")
    (-0.25, -0.5, None)
    """
    if unit == "share" or predicted == measured:
        return predicted - measured
    if not predicted or not measured:
        return None
    return predicted / measured - 1.0


def idle_quantity(cause: IdleCause) -> str:
    """The name of the row with the idle seconds of one cause, all devices together."""
    return f"idle: {cause.value}"


def samples_per_s(plan: Plan, step_s: float) -> float:
    """Samples that a step of that length trains per second; 0 for a step of no length."""
    return plan.batch_size / step_s if step_s else 0.0


def _step_rows(run: Run) -> Iterator[Row]:
    """What the plan promised beside what the run measured."""
    plan, promise, measured = run.plan, run.plan.prediction, run.timeline
    yield _row(STEP_TIME, promise.step_s, measured.step_s, "seconds")
    rate, found_rate = samples_per_s(plan, promise.step_s), samples_per_s(plan, measured.step_s)
    yield _row(THROUGHPUT, rate, found_rate, "samples_per_s")
    yield _row(BUBBLE, promise.bubble, measured.bubble, "share")


def _idle_rows(predicted: Timeline, measured: Timeline) -> Iterator[Row]:
    idle, found = idle_by_cause(predicted), idle_by_cause(measured)
    for cause in IdleCause:
        yield _row(idle_quantity(cause), idle[cause], found[cause], "seconds")


def _stage_rows(run: Run, predicted: Timeline) -> Iterator[Row]:
    for stage, peak_bytes in zip(run.plan.stages, run.peak_bytes, strict=True):
        for quantity, kind in _ACTIONS.items():
            mean_s, found_s = (x.mean_s(stage=stage.index, kind=kind) for x in (predicted, run.timeline))
            yield _row(quantity, mean_s, found_s, "seconds", stage=stage.index)
        yield _row(PEAK_MEMORY, stage.memory.peak_bytes, peak_bytes, "bytes", stage=stage.index)


def _row(quantity: str, predicted: float, measured: float, unit: UnitKind, *, stage: int | None = None) -> Row:
    error = prediction_error(predicted, measured, unit)
    return Row(quantity=quantity, stage=stage, predicted=predicted, measured=measured, unit=unit, error=error)
