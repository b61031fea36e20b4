"""All charts of a report, each as a PNG and an SVG file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.figure import Figure

from gplan.reporting.canvas import pens, to_png, to_svg
from gplan.reporting.frames import Subject
from gplan.reporting.memory_chart import memory_chart
from gplan.reporting.partition_chart import partition_chart
from gplan.reporting.pipeline_chart import pipeline_chart

CHARTS: dict[str, Callable[[Subject], Figure]] = {
    "partition": partition_chart,
    "pipeline": pipeline_chart,
    "memory": memory_chart,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """One chart in both formats."""

    name: str
    png: bytes
    svg: bytes


def draw(subject: Subject) -> tuple[Drawing, ...]:
    """The partition, pipeline and memory charts of a plan or a run."""
    return tuple(_drawing(name, chart, subject) for name, chart in CHARTS.items())


def _drawing(name: str, chart: Callable[[Subject], Figure], subject: Subject) -> Drawing:
    with pens(name):
        figure = chart(subject)
        return Drawing(name=name, png=to_png(figure), svg=to_svg(figure, name))
