"""Predicted against measured: a scatter chart with a mark for every compared quantity, and a chart of the errors."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullLocator

from gplan.core import ActionKind, Run
from gplan.core.units import UnitKind, bytes_axis, error_text, quantity_text, seconds_axis
from gplan.evaluate.compare import (
    BACKWARD,
    BUBBLE,
    FORWARD,
    INPUT_GRADIENT,
    OPTIMIZER,
    PEAK_MEMORY,
    STEP_TIME,
    THROUGHPUT,
    WEIGHT_GRADIENT,
    ComparisonRow,
    compare,
)
from gplan.reporting.charts.canvas import HALF_INCHES, blank_figure, headline, legend, tooltip
from gplan.reporting.looks import ACTIONS, FAINT, GRID, INK, MEASURED_PEAK
from gplan.reporting.subject import Subject
from gplan.reporting.text.run import quantity_name

Mark = tuple[str, str]  # shape and colour

_IDLE: Mark = ("D", FAINT.light)
_MARKS: dict[str, Mark] = {
    STEP_TIME: ("*", INK.light),
    BUBBLE: ("P", INK.light),
    FORWARD: ("^", ACTIONS[ActionKind.FORWARD].colour),
    BACKWARD: ("v", ACTIONS[ActionKind.BACKWARD].colour),
    INPUT_GRADIENT: ("<", ACTIONS[ActionKind.INPUT_GRADIENT].colour),
    WEIGHT_GRADIENT: (">", ACTIONS[ActionKind.WEIGHT_GRADIENT].colour),
    OPTIMIZER: ("s", ACTIONS[ActionKind.OPTIMIZER].colour),
    PEAK_MEMORY: ("o", MEASURED_PEAK.colour),
}
_NEAR = 0.1  # half width of the band around the line of equality
_FARTHEST = 1.0  # largest error on the axis; larger ones are drawn at its end
_LEAST_SHARE = 1e-4  # smallest value on the axes, as a share of the largest


def accuracy_chart(subject: Subject) -> Figure | None:
    """Predicted over measured, times on the left and memory on the right, both logarithmic; None for a plan."""
    if not isinstance(subject, Run):
        return None
    rows = [row for row in compare(subject).rows if row.predicted > 0 and row.measured > 0]
    figure = blank_figure(3.7, width_inches=HALF_INCHES)
    left, right = figure.subplots(1, 2)
    _draw_scatter(left, [row for row in rows if row.unit == "seconds"], "seconds")
    _draw_scatter(right, [row for row in rows if row.unit == "bytes"], "bytes")
    shown = {
        quantity_name(row.quantity) if row.quantity in _MARKS else "idle per step": _MARKS.get(row.quantity, _IDLE)
        for row in rows
        if row.unit in ("seconds", "bytes")
    }
    style = {"linestyle": "", "markeredgewidth": 0}
    handles = [
        Line2D([], [], marker=shape, color=colour, markersize=_size(shape), label=name, **style)  # type: ignore[arg-type]
        for name, (shape, colour) in shown.items()
    ]
    legend(figure, handles, most_in_a_row=3)
    headline(figure, "Predicted over measured")
    return figure


def errors_chart(subject: Subject) -> Figure | None:
    """The error of every compared quantity, a line for each; None for a plan."""
    if not isinstance(subject, Run):
        return None
    rows = [x for x in compare(subject).rows if x.quantity != THROUGHPUT]  # which the step tells
    rows = [row for row in rows if row.error is not None and (row.predicted or row.measured)]
    names = list(dict.fromkeys(row.quantity for row in rows))
    figure = blank_figure(1.0 + 0.21 * max(12, len(names)), width_inches=HALF_INCHES)
    axes = figure.subplots()
    reach = min(_FARTHEST, max(0.02, 1.15 * max(abs(row.error or 0.0) for row in rows)))
    axes.axvline(0.0, color=INK.light, linewidth=1.0)
    for row in rows:
        _draw_error(axes, row, y=names.index(row.quantity), reach=reach)
    axes.set_yticks(range(len(names)), [quantity_name(x) for x in names])
    axes.set(xlim=(-1.08 * reach, 1.08 * reach), ylim=(len(names) - 0.4, -0.6))
    axes.xaxis.set_major_formatter(lambda x, _: f"{100 * x:+.3g}" if abs(x) > 1e-9 else "0")
    axes.set_xlabel("error in % (bubble: in points); right: prediction too high")
    axes.grid(axis="both")
    axes.tick_params(axis="y", length=0)
    headline(figure, "Every error")
    return figure


def _draw_error(axes: Axes, row: ComparisonRow, *, y: float, reach: float) -> None:
    error, (shape, colour) = row.error or 0.0, _MARKS.get(row.quantity, _IDLE)
    x = max(-reach, min(reach, error))
    (mark,) = axes.plot(
        [x], [y], marker=shape, color=colour, alpha=0.85, markersize=_size(shape), markeredgewidth=0, clip_on=False
    )
    tooltip(mark, *_words(row))
    if x != error:
        side = 1 if error > 0 else -1
        text, place = error_text(error, row.unit), (-8 * side, 0)
        style = {"fontsize": 7.5, "color": FAINT.light, "va": "center", "ha": "right" if error > 0 else "left"}
        axes.annotate(text, (x, y), textcoords="offset points", xytext=place, **style)  # type: ignore[arg-type]


def _draw_scatter(axes: Axes, rows: Sequence[ComparisonRow], unit: UnitKind) -> None:
    largest = max((max(row.predicted, row.measured) for row in rows), default=1.0)
    shown = [row for row in rows if min(row.predicted, row.measured) >= _LEAST_SHARE * largest]
    name, scale = (seconds_axis if unit == "seconds" else bytes_axis)(largest)
    least = min((min(row.predicted, row.measured) for row in shown), default=largest / 2)
    margin = max(1.3, (largest / least) ** 0.08)
    low, high = least / scale / margin, largest / scale * margin
    axes.fill_between(
        [low, high], [low * (1 - _NEAR), high * (1 - _NEAR)], [low * (1 + _NEAR), high * (1 + _NEAR)],
        color=GRID.light, linewidth=0,
    )  # fmt: skip
    axes.plot([low, high], [low, high], color=FAINT.light, linewidth=0.9)
    for row in shown:
        shape, colour = _MARKS.get(row.quantity, _IDLE)
        at = [row.measured / scale], [row.predicted / scale]
        (mark,) = axes.plot(*at, marker=shape, color=colour, alpha=0.85, markersize=_size(shape), markeredgewidth=0)
        tooltip(mark, *_words(row))
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), aspect="equal")
    digits = "25" if high / low < 30 else ""
    for axis in (axes.xaxis, axes.yaxis):
        if high / low < 4:
            axis.set_major_locator(MaxNLocator(4))
            axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(lambda x, _: f"{x:g}")
        axis.set_minor_formatter(lambda x, _: f"{x:g}" if f"{x:.0e}"[0] in digits else "")
    axes.set(xlabel=f"measured, {name}", ylabel=f"predicted, {name}")
    axes.set_title("times" if unit == "seconds" else "memory", loc="left")


def _size(shape: str) -> float:
    """A star has a smaller area than other shapes, so it is larger."""
    return 10.0 if shape == "*" else 6.5


def _words(row: ComparisonRow) -> tuple[str, ...]:
    whose = "" if row.device is None else f" of device {row.device}" if row.stage is None else f" of stage {row.stage}"
    predicted, measured = (quantity_text(x, row.unit) for x in (row.predicted, row.measured))
    error = error_text(row.error, row.unit)
    return f"{quantity_name(row.quantity)}{whose}", f"predicted {predicted}, measured {measured}", f"error {error}"
