"""A run as text: what was predicted beside what was measured, as it came."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from gplan.core import GradientCheck, Run
from gplan.core.units import error_text, quantity_text
from gplan.evaluate.attribution import attribute_error
from gplan.evaluate.compare import Row, compare, order_difference
from gplan.reporting.text.attribution import OTHER_ORDER, attribution_text
from gplan.reporting.text.fitted_table import Column, FittedTable, Line, note_lines

_COARSE = 0.05  # a tolerance


def run_view(run: Run) -> RenderableType:
    """Predicted beside measured; below, where the error comes from, the loss, the gradients and what to know."""
    losses = f"loss {run.losses[0]:.4f} -> {run.losses[-1]:.4f} in {len(run.losses)} steps; " if run.losses else ""
    return Group(
        comparison_table(run),
        Text(OTHER_ORDER if order_difference(run.plan, run.timeline) else attribution_text(attribute_error(run))),
        Text(f"{losses}measured over {run.steps_text}"),
        *_check_lines(run),
        *note_lines(run.notes),
    )


def comparison_table(run: Run) -> FittedTable:
    """A row for the step, the bubble and its causes, every stage's times and each device's memory."""
    virtual = " (virtual: one process computes all stages, the devices exist on the clock only)"
    has_chunks = run.plan.num_stages > run.plan.num_devices
    return FittedTable(
        title=f"predicted versus measured, engine {run.engine}{virtual if run.engine == 'virtual' else ''}",
        columns=(
            Column(key="quantity", is_left=True, is_flexible=True),
            *(
                Column(key=name)
                for name in (*(["device"] if has_chunks else []), "stage", "predicted", "measured", "error")
            ),
        ),
        lines=tuple(_line(row, has_chunks) for row in compare(run).rows),
    )


def _line(row: Row, has_chunks: bool) -> Line:
    numbers = (quantity_text(row.predicted, row.unit), quantity_text(row.measured, row.unit))
    places = ["" if place is None else str(place) for place in (row.device, row.stage)]
    cells = (row.quantity, *(places if has_chunks else places[1:]), *numbers, error_text(row.error, row.unit))
    return Line(cells=cells, shorter=(row.quantity.removeprefix("idle: "),))


def _coarse_text(check: GradientCheck) -> str:
    return " (numbers this coarse show gross errors only)" if check.tolerance >= _COARSE else ""


def _check_lines(run: Run) -> Iterator[Text]:
    check = run.check
    if check is None:
        return
    verdict = "equal" if check.passed else "DIFFER"
    yield Text(
        f"gradients {verdict}: largest relative difference {check.max_relative_error:.1e} "
        f"({check.worst_parameter}) over {check.num_parameters} parameters, tolerance {check.tolerance:.0e}"
        f"{_coarse_text(check)}; loss {check.loss:.6f} against {check.plain_loss:.6f}; plain model run on {check.reference}",
        style="green" if check.passed else "bold red",
    )
