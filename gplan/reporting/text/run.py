"""A run as text: every predicted quantity beside the measured one, and the error of the step in parts that add up to it."""

from __future__ import annotations

from collections.abc import Collection

from rich.console import Group, RenderableType
from rich.text import Text

from gplan.core import EqualSpeed, GradientCheck, Run, WholeBatch
from gplan.core.units import bytes_text, error_text, percent_text, quantity_text, seconds_text
from gplan.evaluate.attribution import Attribution, ErrorCause, ErrorPart, attribute_error
from gplan.evaluate.compare import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    OPTIMIZER,
    PEAK_MEMORY,
    STEP_TIME,
    THROUGHPUT,
    WEIGHT_GRADIENT,
    Comparison,
    ComparisonRow,
    compare,
)
from gplan.reporting.text.fitted_table import FittedTable, Line, note_lines

_ERROR = (
    "(predicted - measured) / measured, of the bubble predicted - measured in percentage points; + is a prediction that was "
    "too high, the nearer to 0 the better"
)
_COARSE_TOLERANCE = 0.05
_LEAST_PERCENT = 1e-3  # relative differences below are not percentages
_MICROBATCH_QUANTITIES = (FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)

_LEAST_IN_TABLE, _LEAST_IN_SENTENCE, _ROUNDING = 5e-4, 5e-3, 1e-6  # of the measured step
_MOST_IN_SENTENCE = 4
_SMALLER_PARTS = "smaller parts together"
OTHER_ORDER = "the error cannot be divided into parts: the devices did not run the plan's actions in the plan's order"
_CAUSES = {
    ErrorCause.HOST_SPEED: "another speed of the host than in the profile",
    ErrorCause.ENGINE: "overhead of the engine between actions",
    ErrorCause.COMMUNICATION: "exposed transfers",
    ErrorCause.SINGLE_ACTIONS: "single actions that differ from their stage's mean",
    ErrorCause.STEP_EXTRAS: "optimizer and other work once per step",
    ErrorCause.WAITING: "waits caused by varying durations",
}


def run_view(run: Run, *, shown_notes: Collection[str] = ()) -> RenderableType:
    """Predicted beside measured; below, where the error comes from, the loss, the notes of plan and run that are not
    among `shown_notes`, and the verdict in three lines: gradients, memory, time."""
    check, pairs = run.check, enumerate(zip(run.reserved_bytes, run.peak_bytes, strict=False))
    predicted = [f" ({bytes_text(x)} predicted)" for x in run.plan.reserved_bytes] or [""] * run.plan.num_devices
    reserved = [f"device {i} {bytes_text(x)}{predicted[i]} for {bytes_text(y)}" for i, (x, y) in pairs]  # where known
    losses = f"loss {run.losses[0]:.4f} -> {run.losses[-1]:.4f} in {len(run.losses)} steps; " if run.losses else ""
    comparison = compare(run)
    return Group(
        comparison_table(run),
        Text(attribution_text(attribute_error(run))),
        *(
            [Text(f"memory that the allocator reserved for the measured peak: {', '.join(reserved)}")]
            if reserved
            else []
        ),
        Text(f"{losses}measured over {run.steps_text}"),
        *([Text(whole_batch_text(check.whole_batch))] if check and check.whole_batch else []),
        *note_lines([x for x in dict.fromkeys(run.all_notes) if x not in shown_notes]),
        Text(f"gradients {check_text(check)}", style=("green" if check.passed else "bold red") if check else ""),
        Text(peak_memory_text(comparison)),
        Text(step_text(run, comparison)),
    )


def peak_memory_text(comparison: Comparison) -> str:
    """The device whose peak memory was predicted worst, in bytes."""
    rows = [x for x in comparison.rows if x.quantity == PEAK_MEMORY]
    if not rows:
        return f"{PEAK_MEMORY} not measured"
    worst = max(rows, key=lambda x: abs(x.predicted - x.measured))
    largest = "largest difference, on " if len(rows) > 1 else ""
    return (
        f"{PEAK_MEMORY} predicted {bytes_text(int(worst.predicted))}, measured {bytes_text(int(worst.measured))}: "
        f"{error_text(worst.error, worst.unit)} ({largest}device {worst.device})"
    )


def step_text(run: Run, comparison: Comparison) -> str:
    """The error of the step, and what is left of it without a change of the host's speed, where that is known and the
    steps were undisturbed."""
    step, speed = comparison.row(STEP_TIME), run.equal_speed
    text = (
        f"{STEP_TIME} predicted {seconds_text(step.predicted)}, measured {seconds_text(step.measured)}: "
        f"{error_text(step.error, step.unit)}"
    )
    if run.num_disturbed and run.num_counted == run.num_settled:
        return f"{text}, in disturbed steps, so this error is not that of the prediction"
    return text if speed is None else f"{text}; {equal_speed_text(speed, step)}"


def equal_speed_text(speed: EqualSpeed, step: ComparisonRow) -> str:
    """How fast the host was, against the profile, and the step's error without that."""
    ratio = f"{speed.ratio:.3f} ± {speed.uncertainty:.3f}"
    if not speed.is_certain:
        return f"the host was as fast as in the profile (fixed work took {ratio} times as long)"
    pace = "slower" if speed.ratio > 1 else "faster"
    return (
        f"{error_text(step.equal_speed_error, step.unit)} at equal host speed: the host was {pace} than in the profile "
        f"(fixed work took {ratio} times as long)"
    )


def comparison_table(run: Run) -> FittedTable:
    """A row for the step (not for samples per second, the same fact), the bubble and its causes, every stage's times and each
    device's memory."""
    virtual = " (virtual: one process computes all stages, the devices are simulated)"
    return FittedTable(
        title=f"predicted versus measured, engine {run.engine}{virtual if run.engine == 'virtual' else ''}",
        lines=tuple(_line(row, run.plan.has_chunks) for row in compare(run).rows if row.quantity != THROUGHPUT),
        legend={"error": _ERROR},
        below="idle time is of all devices together",
    )


def devices_table(run: Run) -> FittedTable:
    """Measured seconds of each device in a step; predicted ones are in the table of stages, by the same definitions."""
    timeline = run.timeline
    return FittedTable(
        title="measured, per step",
        lines=tuple(
            Line(
                cells={
                    "device": str(device),
                    "stages": " ".join(str(x.index) for x in run.plan.stages_of(device)),
                    "compute": seconds_text(timeline.busy_s(device)),
                    "optimizer": seconds_text(timeline.update_s(device)),
                    "idle": seconds_text(timeline.idle_s(device)),
                }
            )
            for device in range(run.plan.num_devices)
        ),
        groups={"per step": ("compute", "optimizer", "idle")},
    )


def _line(row: ComparisonRow, has_chunks: bool) -> Line:
    places = {"device": row.device, "stage": row.stage} if has_chunks else {"stage": row.stage}
    cells = {
        "quantity": quantity_name(row.quantity),
        **{name: "" if place is None else str(place) for name, place in places.items()},
        "predicted": quantity_text(row.predicted, row.unit),
        "measured": quantity_text(row.measured, row.unit),
        "error": error_text(row.error, row.unit),
    }
    return Line(cells=cells, shorter=(row.quantity, row.quantity.removeprefix("idle: ")))


def quantity_name(quantity: str) -> str:
    """What a row of a comparison is called: its seconds are per micro-batch or per step.

    >>> quantity_name("forward"), quantity_name("optimizer"), quantity_name("idle: drain")
    ('forward per micro-batch', 'optimizer per step', 'idle per step: drain')
    """
    if quantity in _MICROBATCH_QUANTITIES:
        return f"{quantity} per micro-batch"
    return "optimizer per step" if quantity == OPTIMIZER else quantity.replace("idle:", "idle per step:")


def check_text(check: GradientCheck | None) -> str:
    """The result of comparing the gradients with the plain model's."""
    if check is None:
        return "not compared with the plain model's"
    coarse = " (too coarse to show small errors)" if check.tolerance >= _COARSE_TOLERANCE else ""
    result = "equal to" if check.passed else "DIFFER from"
    pieces = " micro-batch by micro-batch" if check.whole_batch is not None else ""
    where, losses = "", ""
    if not check.passed:
        where = f" ({check.worst_parameter})"
        losses = f"; loss {check.loss:.6f} against {check.plain_loss:.6f}"
    return (
        f"{result} the plain model's{pieces}: largest relative difference {check.max_relative_error:.1e}{where} over "
        f"{check.num_parameters} tensors, tolerance {check.tolerance:.0e}{coarse}{losses}"
    )


def whole_batch_text(whole: WholeBatch) -> str:
    """How far the plain model on the mini-batch in one piece is from a plain loop over the micro-batches."""
    error = whole.max_relative_error
    apart = percent_text(error) if error >= _LEAST_PERCENT else f"{error:.1e}"
    return (
        f"in one piece the mini-batch has loss {whole.loss:.6f} and gradients that differ by up to {apart} "
        f"({whole.worst_parameter}), because of {whole.reason}"
    )


def attribution_table(run: Run) -> FittedTable | None:
    """From the predicted step, part by part, to the measured one; parts below 0.05 % are one row.

    None where the devices ran the actions in another order than the plan's (`OTHER_ORDER`).
    """
    attribution = attribute_error(run)
    if attribution is None:
        return None
    measured_s = attribution.measured_s

    def line(text: str, seconds: float, *, is_sum: bool = False) -> Line:
        sign = "" if is_sum or seconds < 0 else "+"
        share = percent_text(seconds / measured_s, signed=not is_sum)
        cells = {"part": text, "seconds per step": sign + seconds_text(seconds), "of measured": share}
        return Line(cells=cells, style="bold" if is_sum else "")

    parts, remainder_s = attribution.parts_from(_LEAST_IN_TABLE)
    rows = [(_part_text(x), x.seconds) for x in parts]
    if abs(remainder_s) > _ROUNDING * measured_s:
        rows.append((_SMALLER_PARTS, remainder_s))
    return FittedTable(
        title="from the predicted step to the measured one",
        lines=(
            line("predicted step", attribution.predicted_s, is_sum=True),
            *(line(text, seconds) for text, seconds in rows),
            line("measured step", measured_s, is_sum=True),
        ),
    )


def _part_text(part: ErrorPart) -> str:
    return f"compute of stage {part.stage}" if part.cause is ErrorCause.COMPUTE else _CAUSES[part.cause]


def _signed_text(seconds: float) -> str:
    return f"{'+' if seconds >= 0 else ''}{seconds_text(seconds)}"


def attribution_text(attribution: Attribution | None) -> str:
    """The largest parts in a sentence, at most four of at least 0.5 % of the measured step, then the sum of the others if
    that is at least 0.5 % too; `OTHER_ORDER` where the error has no parts."""
    if attribution is None:
        return OTHER_ORDER
    parts, remainder_s = attribution.parts_from(_LEAST_IN_SENTENCE)
    parts.sort(key=lambda part: -abs(part.seconds))
    remainder_s += sum(x.seconds for x in parts[_MOST_IN_SENTENCE:])
    texts = [f"{_part_text(x)} {_signed_text(x.seconds)}" for x in parts[:_MOST_IN_SENTENCE]]
    if texts and abs(remainder_s) >= _LEAST_IN_SENTENCE * attribution.measured_s:
        texts.append(f"{_SMALLER_PARTS} {_signed_text(remainder_s)}")
    step = f"the step took {seconds_text(abs(attribution.error_s))} {'more' if attribution.error_s > 0 else 'less'}"
    return f"{step} than predicted" + (f": {', '.join(texts)}" if texts else "")
