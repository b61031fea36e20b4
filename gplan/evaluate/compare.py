"""Predicted against measured, row by row: the step, the bubble and its causes, each stage's times, the memory.

Both sides are the same nouns, so each row asks the simulated and the measured timeline the same question. An error is
signed: positive where the prediction was too high. Where the actions ran in another order than the plan's,
`order_difference` says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

from gplan.core import Action, ActionKind, IdleCause, Plan, Run, Timeline
from gplan.core.units import UnitKind, seconds_text
from gplan.simulation.bubble import idle_by_cause
from gplan.simulation.simulator import schedule_of, simulate, step_and_bubble

STEP_TIME = "step time"
THROUGHPUT = "throughput"
BUBBLE = "bubble"
FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, OPTIMIZER = (kind.words for kind in ActionKind)
PEAK_MEMORY = "peak memory"

_ROUNDING = 1e-6  # share of a step
_ACTIONS = {kind.words: kind for kind in ActionKind if kind is not ActionKind.OPTIMIZER}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One quantity, predicted and measured, of one stage, one device or the whole step."""

    quantity: str
    device: int | None  # None: of the whole step
    stage: int | None  # None: of a device with several stages, or the whole step
    predicted: float
    measured: float
    unit: UnitKind
    error: float | None  # see `prediction_error`


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderDifference:
    """The first action of a device that is not the one which the plan has there."""

    device: int
    place: int  # in the device's order, from 0
    planned: Action | None  # None: the plan has no more
    ran: Action | None  # None: the device did no more


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How far a plan's prediction was from what its run measured."""

    engine: str
    rows: tuple[Row, ...]

    def row(self, quantity: str, *, stage: int | None = None, device: int | None = None) -> Row:
        """The row of that quantity of the step, of a stage, or of a device; raises ValueError where there is none."""
        for row in self.rows:
            found = row.device if device is not None else row.stage
            if row.quantity == quantity and found == (stage if device is None else device):
                return row
        known = ", ".join(dict.fromkeys(row.quantity for row in self.rows))
        where = f"device {device}" if device is not None else f"stage {stage}"
        raise ValueError(f"no row for {quantity!r} of {where}; expected one of {known}")


def compare(run: Run) -> Comparison:
    """The step, the bubble by cause, then by device each stage's mean seconds per action and the peak memory;
    O(K^2 M)."""
    predicted, measured = simulate(run.plan), run.timeline
    rows = (*_step_rows(run), *_idle_rows(predicted, measured), *_device_rows(run, predicted))
    return Comparison(engine=run.engine, rows=rows)


def stale_prediction_notes(plan: Plan) -> tuple[str, ...]:
    """Where a plan's predicted step is not that of its own stages and schedule: that it was changed afterwards."""
    costs = [stage.cost for stage in plan.stages]
    said_s, (step_s, _) = plan.prediction.step_s, step_and_bubble(schedule_of(plan), costs, recompute=plan.recompute)
    if abs(said_s - step_s) <= _ROUNDING * step_s:
        return ()
    return (
        f"the plan was changed after it was made, or made by another version of gplan: it predicts a step of "
        f"{seconds_text(said_s)}, its stages and schedule give {seconds_text(step_s)}; balance again for a prediction that "
        "holds",
    )


def order_difference(plan: Plan, timeline: Timeline) -> OrderDifference | None:
    """Where a timeline first leaves the order of the plan, on the first device that does; None: nowhere.

    Of actions that start at one time any order will do. O(K M log M).
    """
    for device, order in enumerate(schedule_of(plan).orders):
        places = {action: i for i, action in enumerate(order)}
        spans = [x for x in timeline.loop_spans if x.device == device]
        spans.sort(key=lambda x: (x.start_s, places.get(x.action, len(places))))
        for i, (planned, span) in enumerate(zip_longest(order, spans)):
            ran = None if span is None else span.action
            if planned != ran:
                return OrderDifference(device=device, place=i, planned=planned, ran=ran)
    return None


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


def _device_rows(run: Run, predicted: Timeline) -> Iterator[Row]:
    peaks = zip(run.plan.device_peak_bytes, run.peak_bytes, strict=True)
    nothing = (0, ActionKind.INPUT_GRADIENT)  # the first stage's inputs want no gradient
    done = {(span.action.stage, span.action.kind) for span in predicted.spans} - {nothing}
    for device, (peak_bytes, found_peak_bytes) in enumerate(peaks):
        stages = run.plan.stages_of(device)
        alone = stages[0].index if len(stages) == 1 else None
        for stage in stages:
            for quantity, kind in _ACTIONS.items():
                if (stage.index, kind) in done:
                    mean_s, found_s = (x.mean_s(kind, stage=stage.index) for x in (predicted, run.timeline))
                    yield _row(quantity, mean_s, found_s, "seconds", device=device, stage=stage.index)
        update_s, found_s = (x.update_s(device) for x in (predicted, run.timeline))
        yield _row(OPTIMIZER, update_s, found_s, "seconds", device=device, stage=alone)
        if found_peak_bytes:
            yield _row(PEAK_MEMORY, peak_bytes, found_peak_bytes, "bytes", device=device, stage=alone)


def _row(
    quantity: str,
    predicted: float,
    measured: float,
    unit: UnitKind,
    *,
    device: int | None = None,
    stage: int | None = None,
) -> Row:
    return Row(
        quantity=quantity,
        device=device,
        stage=stage,
        predicted=predicted,
        measured=measured,
        unit=unit,
        error=prediction_error(predicted, measured, unit),
    )
