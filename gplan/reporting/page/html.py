"""Tables of the page as HTML: the comparison of the whole step, stages, devices, and lists of facts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from gplan.core import Run
from gplan.reporting.subject import MEASURED, PREDICTED, Subject
from gplan.reporting.summary_tables import (
    DEVICE_COLUMNS,
    STAGE_COLUMNS,
    Fact,
    Figures,
    device_lines,
    stage_lines,
    step_rows,
)
from gplan.reporting.text.run import EQUAL_SPEED


def comparison(run: Run) -> str:
    """The comparison of the whole step, with the definition of an error."""
    rows = (
        (quantity, predicted, f"<b>{measured}</b>", *errors)
        for quantity, predicted, measured, *errors in ((escape(x) for x in row) for row in step_rows(run))
    )
    heads = ("whole step", PREDICTED, MEASURED, "error", *([EQUAL_SPEED] if run.slowdown is not None else []))
    return (
        "<p>An error is the difference between prediction and measurement, divided by the measurement; for the bubble it "
        "is the difference in percentage points. A positive error is a prediction that was too high. Idle time is the sum "
        "over all devices.</p>"
        f'<div class="compared">{table(heads, rows)}</div>'
    )


def stages(subject: Subject) -> str:
    """One row per stage: its layers and its seconds per micro-batch."""
    rows = []
    for line in stage_lines(subject):
        names = (f'<span class="name">{escape(x)}</span>' for x in dict.fromkeys((line.first_layer, line.last_layer)))
        rows.append(
            _row(line.name, f'{escape(line.indices)}<span class="names"><br>{" to ".join(names)}</span>', line.figures)
        )
    what = "<p>Forward and backward are means over the micro-batches; the backward includes its recompute.</p>"
    return what + table(("stage", "layers", "", *STAGE_COLUMNS), rows, num_texts=2)


def devices(subject: Subject) -> str:
    """One row per device: its stages, its seconds per step, its peak memory."""
    rows = [_row(line.name, escape(line.stages), line.figures) for line in device_lines(subject)]
    what = "<p>Compute and idle time are counted from the first forward to the last backward of all devices.</p>"
    return what + table(("device", "stages", "", *DEVICE_COLUMNS), rows, num_texts=2)


def facts_list(facts: Iterable[Fact]) -> str:
    """Names with their values."""
    pairs = "\n".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts)
    return f'<dl class="facts">{pairs}</dl>'


def table(names: Iterable[str], rows: Iterable[Sequence[str]], *, num_texts: int = 1) -> str:
    """A table whose first columns are texts and whose others are numbers; names are escaped, cells are HTML."""
    kinds = [' class="text"'] * num_texts
    head = "".join(f"<th{_at(kinds, i)}>{escape(name)}</th>" for i, name in enumerate(names))
    body = (f"<tr>{''.join(f'<td{_at(kinds, i)}>{cell}</td>' for i, cell in enumerate(row))}</tr>" for row in rows)
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def _at(kinds: Sequence[str], place: int) -> str:
    return kinds[place] if place < len(kinds) else ""


def _row(name: str, what: str, figures: Figures) -> tuple[str, ...]:
    """A row of predicted figures and, for a run, measured ones and errors; `what` is HTML."""
    sides = ("predicted", "measured", "error")[: len(figures[0])]
    return escape(name), what, *(_stacked(lines) for lines in (sides, *figures))


def _stacked(lines: Sequence[str]) -> str:
    """A cell with the predicted figure and, for a run, the measured one and the error below it."""
    tags = zip(("span", "b", "small"), lines, strict=False)
    return "<br>".join(f"<{tag}>{escape(line)}</{tag}>" for tag, line in tags)
