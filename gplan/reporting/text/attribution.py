"""The error of a predicted step in parts that add up to it: as a table, or the largest parts in a sentence."""

from __future__ import annotations

from collections.abc import Sequence

from gplan.core import Run
from gplan.core.units import percent_text, seconds_text
from gplan.evaluate.attribution import Attribution, ErrorCause, ErrorPart, attribute_error
from gplan.evaluate.compare import order_difference
from gplan.reporting.text.fitted_table import FittedTable, Line, columns

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


def attribution_table(run: Run) -> FittedTable | None:
    """From the predicted step, part by part, to the measured one; parts below 0.05 % are one row.

    None where the devices ran the actions in another order than the plan's (`OTHER_ORDER`).
    """
    if order_difference(run.plan, run.timeline):
        return None
    attribution = attribute_error(run)
    measured_s = attribution.measured_s
    parts = [x for x in attribution.parts if abs(x.seconds) >= _LEAST_IN_TABLE * measured_s]
    rows = [(_part_text(x), x.seconds) for x in parts]
    remainder_s = _remainder_s(attribution, parts)
    if abs(remainder_s) > _ROUNDING * measured_s:
        rows.append((_SMALLER_PARTS, remainder_s))
    return FittedTable(
        title="from the predicted step to the measured one",
        columns=columns("part", "seconds per step", "of measured"),
        lines=(
            _sum_line("predicted step", attribution.predicted_s, measured_s),
            *(
                Line(cells=(text, _signed_text(seconds), percent_text(seconds / measured_s, signed=True)))
                for text, seconds in rows
            ),
            _sum_line("measured step", measured_s, measured_s),
        ),
    )


def _remainder_s(attribution: Attribution, parts: Sequence[ErrorPart]) -> float:
    """Seconds of the error that are in none of `parts`."""
    return attribution.error_s - sum(x.seconds for x in parts)


def _sum_line(text: str, seconds: float, measured_s: float) -> Line:
    return Line(cells=(text, seconds_text(seconds), percent_text(seconds / measured_s)), style="bold")


def _part_text(part: ErrorPart) -> str:
    return f"compute of stage {part.stage}" if part.cause is ErrorCause.COMPUTE else _CAUSES[part.cause]


def _signed_text(seconds: float) -> str:
    return f"{'+' if seconds >= 0 else ''}{seconds_text(seconds)}"


def attribution_text(run: Run) -> str:
    """The largest parts in a sentence; `OTHER_ORDER` where the error has none."""
    return OTHER_ORDER if order_difference(run.plan, run.timeline) else largest_parts_text(attribute_error(run))


def largest_parts_text(attribution: Attribution) -> str:
    """At most four parts of at least 0.5 % of the measured step, then the sum of the others if that is at least 0.5 % too."""
    least_s = _LEAST_IN_SENTENCE * attribution.measured_s
    parts = sorted(attribution.parts, key=lambda part: -abs(part.seconds))
    parts = [x for x in parts if abs(x.seconds) >= least_s][:_MOST_IN_SENTENCE]
    texts = [f"{_part_text(x)} {_signed_text(x.seconds)}" for x in parts]
    remainder_s = _remainder_s(attribution, parts)
    if texts and abs(remainder_s) >= least_s:
        texts.append(f"{_SMALLER_PARTS} {_signed_text(remainder_s)}")
    step = f"the step took {seconds_text(abs(attribution.error_s))} {'more' if attribution.error_s > 0 else 'less'}"
    return f"{step} than predicted" + (f": {', '.join(texts)}" if texts else "")
