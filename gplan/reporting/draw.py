"""All charts of a report, each as a PNG and an SVG file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.figure import Figure

from gplan.reporting.canvas import pens, to_png, to_svg
from gplan.reporting.frames import Subject
from gplan.reporting.holdings_chart import holdings_chart
from gplan.reporting.memory_chart import memory_chart
from gplan.reporting.partition_chart import partition_chart
from gplan.reporting.pipeline_chart import pipeline_chart

CHARTS: dict[str, Callable[[Subject], Figure | None]] = {
    "partition": partition_chart,
    "pipeline": pipeline_chart,
    "memory": memory_chart,
    "memory-timeline": holdings_chart,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """One chart in both formats."""

    name: str
    png: bytes
    svg: bytes


def draw(subject: Subject) -> tuple[Drawing, ...]:
    """The charts of a plan or a run, but for those that it has no figures for."""
    drawings = (_drawing(name, chart, subject) for name, chart in CHARTS.items())
    return tuple(drawing for drawing in drawings if drawing is not None)


def _drawing(name: str, chart: Callable[[Subject], Figure | None], subject: Subject) -> Drawing | None:
    with pens(name):
        figure = chart(subject)
        return Drawing(name=name, png=to_png(figure), svg=to_svg(figure, name)) if figure else None
