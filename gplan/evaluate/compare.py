"""Predicted against measured: the step, the bubble and its causes, each stage's times, the peak memory.

Both sides are timelines, so a row is one statistic of the simulated and of the measured timeline. An error is positive
where the prediction is too high.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest

from gplan.core import Action, ActionKind, EqualSpeed, IdleCause, Plan, Profile, Run, Timeline
from gplan.core.errors import GplanError
from gplan.core.units import UnitKind, seconds_text
from gplan.corrections.host_speed import at_host_speed, few_readings_notes, speed_ratio
from gplan.evaluate.replanning import reprice, why_not_replannable, with_links_of
from gplan.simulation.bubble import idle_by_cause
from gplan.simulation.simulator import schedule_of, simulate, step_and_bubble

STEP_TIME = "step time"
THROUGHPUT = "throughput"
BUBBLE = "bubble"
FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, OPTIMIZER = (kind.words for kind in ActionKind)
PEAK_MEMORY = "peak memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonRow:
    """One quantity of a stage, a device or the whole step, predicted and measured."""

    quantity: str
    device: int | None  # None: the whole step
    stage: int | None  # None: a device with several stages, or the whole step
    predicted: float
    measured: float
    unit: UnitKind
    error: float | None  # see `prediction_error`
    equal_speed_error: float | None = None  # of step time and throughput: at the host's speed in the run; None: unknown
    reserved: float | None = None  # of peak memory: bytes that the GPU's allocator reserved for it; None: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderDifference:
    """The first action of a device that differs from the plan's."""

    device: int
    index: int  # in the device's order
    planned: Action | None  # None: the plan has no more actions
    ran: Action | None  # None: the device ran no more actions


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A plan's prediction and its run's measurement, as rows."""

    engine: str
    rows: tuple[ComparisonRow, ...]

    def row(self, quantity: str, *, stage: int | None = None, device: int | None = None) -> ComparisonRow:
        """The row of a quantity of the step, a stage or a device; raises ValueError where there is none."""
        if device is not None:
            where, rows = f"device {device}", [x for x in self.rows if x.device == device]
        elif stage is not None:
            where, rows = f"stage {stage}", [x for x in self.rows if x.stage == stage]
        else:
            where, rows = "the step", [x for x in self.rows if x.device is None and x.stage is None]
        for row in rows:
            if row.quantity == quantity:
                return row
        quantities = ", ".join(dict.fromkeys(row.quantity for row in self.rows))
        raise ValueError(f"no row for {quantity!r} of {where}; expected one of {quantities}")


def compare(run: Run) -> Comparison:
    """The step, the bubble by cause, then by device each stage's mean seconds per action and the peak memory;
    O(K^2 M)."""
    predicted = simulate(run.plan)
    return Comparison(engine=run.engine, rows=(*_step_rows(run, predicted), *_device_rows(run, predicted)))


def with_equal_speed(run: Run, profile: Profile) -> Run:
    """The run with its step predicted at the host's speed in it: the plan simulated again on `at_host_speed` of the profile,
    or with a note about too few readings of that speed.

    The same run where a speed is not known, or the plan was not made from this profile, or for a machine.
    """
    plan, ratio = run.plan, speed_ratio(profile.host_load, run.host_load)
    if why_not_replannable(plan):
        return run
    if ratio is None:
        return replace(run, notes=(*run.notes, *few_readings_notes(run.host_load)))
    profile = with_links_of(plan, profile)
    slowed = at_host_speed(profile, ratio[0])
    if run.engine == "virtual":  # which takes transfers and its own cost as planned
        slowed = replace(slowed, link=profile.link, engine=profile.engine)
    try:
        before, after = (reprice(plan, x, engine=run.engine).prediction for x in (profile, slowed))
    except GplanError:  # another model, or other micro-batch sizes
        return run
    if not plan.prediction.gives(before.step_s):
        return run
    speed = EqualSpeed(ratio=ratio[0], uncertainty=ratio[1], step_s=after.step_s)
    return replace(run, equal_speed=speed)


def stale_prediction_notes(plan: Plan) -> tuple[str, ...]:
    """A note where the plan's predicted step does not follow from its stages and schedule, since it was edited."""
    costs = plan.stage_costs
    step_s, _ = step_and_bubble(schedule_of(plan), costs, recompute=plan.recompute)
    if plan.prediction.gives(step_s):
        return ()
    return (
        f"the plan was changed after it was made, or made by another version of gplan: it predicts a step of "
        f"{seconds_text(plan.prediction.step_s)}, its stages and schedule give {seconds_text(step_s)}; balance again for a prediction that "
        "holds",
    )


def order_difference(plan: Plan, timeline: Timeline) -> OrderDifference | None:
    """The first action that is not in the plan's order, on the first such device; None: all are. O(K M log M).

    Actions that start at the same time may be in any order.
    """
    for device, order in enumerate(schedule_of(plan).orders):
        indices = {action: i for i, action in enumerate(order)}
        spans = [x for x in timeline.loop_spans if x.device == device]
        spans.sort(key=lambda x: (x.start_s, indices.get(x.action, len(indices))))
        for i, (planned, span) in enumerate(zip_longest(order, spans)):
            ran = None if span is None else span.action
            if planned != ran:
                return OrderDifference(device=device, index=i, planned=planned, ran=ran)
    return None


def prediction_error(predicted: float, measured: float, unit: UnitKind) -> float | None:
    """The difference of shares; of other units the relative difference, or None where just one of both is 0.

    >>> prediction_error(0.25, 0.5, "share"), prediction_error(0.25, 0.5, "seconds"), prediction_error(0, 1, "bytes")
    (-0.25, -0.5, None)
    """
    if unit == "share" or predicted == measured:
        return predicted - measured
    if not predicted or not measured:
        return None
    return predicted / measured - 1.0


def idle_quantity(cause: IdleCause) -> str:
    """The name of the row with the idle seconds of a cause, all devices together."""
    return f"idle: {cause.value}"


def samples_per_s(plan: Plan, step_s: float) -> float:
    """Samples per second for a step of that length; 0 for a step of no length."""
    return plan.batch_size / step_s if step_s else 0.0


def _step_rows(run: Run, predicted: Timeline) -> Iterator[ComparisonRow]:
    plan, prediction, measured, speed = run.plan, run.plan.prediction, run.timeline, run.equal_speed
    steps_s = [prediction.step_s, measured.step_s, *([] if speed is None else [speed.step_s])]
    if speed is not None and not speed.is_certain:
        steps_s[2] = prediction.step_s  # no correction within the uncertainty: the raw error is the error
    yield _row(STEP_TIME, steps_s, "seconds")
    yield _row(THROUGHPUT, [samples_per_s(plan, x) for x in steps_s], "samples_per_s")
    yield _row(BUBBLE, (prediction.bubble, measured.bubble), "share")
    idle, measured_idle = idle_by_cause(predicted), idle_by_cause(measured)
    for cause in IdleCause:
        yield _row(idle_quantity(cause), (idle[cause], measured_idle[cause]), "seconds")


def _device_rows(run: Run, predicted: Timeline) -> Iterator[ComparisonRow]:
    """The rows of every device and its stages; the first stage computes no input gradient, so it has no row for it."""
    plan, timelines = run.plan, (predicted, run.timeline)
    kinds = {(span.action.stage, span.action.kind) for span in timelines[0].spans} - {(0, ActionKind.INPUT_GRADIENT)}
    for device in range(plan.num_devices):
        stages = [stage.index for stage in plan.stages_of(device)]
        only = stages[0] if len(stages) == 1 else None
        for stage in stages:
            for kind in ActionKind:
                if kind is not ActionKind.OPTIMIZER and (stage, kind) in kinds:
                    means = (x.mean_s(kind, stage=stage) for x in timelines)
                    yield _row(kind.words, means, "seconds", device=device, stage=stage)
        updates = (x.update_s(device) for x in timelines)
        yield _row(OPTIMIZER, updates, "seconds", device=device, stage=only)
        if peak_bytes := run.peak_bytes[device]:
            row = _row(PEAK_MEMORY, (plan.device_peak_bytes[device], peak_bytes), "bytes", device=device, stage=only)
            yield replace(row, reserved=run.reserved_bytes[device]) if run.reserved_bytes else row


def _row(
    quantity: str, values: Iterable[float], unit: UnitKind, *, device: int | None = None, stage: int | None = None
) -> ComparisonRow:
    """`values`: predicted, measured and, where it is known, predicted at the host's speed in the run."""
    predicted, measured, *at_speed = values
    return ComparisonRow(
        quantity=quantity,
        device=device,
        stage=stage,
        predicted=predicted,
        measured=measured,
        unit=unit,
        error=prediction_error(predicted, measured, unit),
        equal_speed_error=prediction_error(at_speed[0], measured, unit) if at_speed else None,
    )
