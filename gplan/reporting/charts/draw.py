"""All charts of a report, each as a PNG and an SVG file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from matplotlib.figure import Figure

from gplan.reporting.charts.accuracy_chart import accuracy_chart, errors_chart
from gplan.reporting.charts.canvas import pens, to_png, to_svg
from gplan.reporting.charts.choices_chart import choices_chart, frontier_chart
from gplan.reporting.charts.memory_chart import holdings_chart, memory_chart
from gplan.reporting.charts.partition_chart import partition_chart
from gplan.reporting.charts.pipeline_chart import pipeline_chart
from gplan.reporting.subject import PlanAnalysis, Subject, plan_of

CHARTS: dict[str, Callable[[Subject], Figure | None]] = {
    "partition": partition_chart,
    "pipeline": pipeline_chart,
    "memory": memory_chart,
    "memory-timeline": holdings_chart,
    "accuracy": accuracy_chart,
    "errors": errors_chart,
}

_OF_PROFILE: dict[str, Callable[[Subject, PlanAnalysis], Figure | None]] = {
    "choices": lambda _, analysis: choices_chart(analysis),
    "frontier": lambda subject, analysis: frontier_chart(plan_of(subject), analysis),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """One chart in both formats."""

    name: str
    png: bytes
    svg: bytes


def draw(subject: Subject, analysis: PlanAnalysis) -> tuple[Drawing, ...]:
    """The charts of a plan or a run, without those that have nothing to show."""
    drawings = (_drawing(name, chart) for name, chart in _charts(subject, analysis))
    return tuple(drawing for drawing in drawings if drawing is not None)


def names_of_charts() -> tuple[str, ...]:
    """The names of all charts."""
    return (*CHARTS, *_OF_PROFILE)


def _charts(subject: Subject, analysis: PlanAnalysis) -> Iterator[tuple[str, Callable[[], Figure | None]]]:
    for name, chart in CHARTS.items():
        yield name, partial(chart, subject)
    for name, of_both in _OF_PROFILE.items():
        yield name, partial(of_both, subject, analysis)


def _drawing(name: str, chart: Callable[[], Figure | None]) -> Drawing | None:
    with pens(name):
        figure = chart()
        if figure is None:
            return None
        png = to_png(figure)
        figure.set_layout_engine("none")  # the layout of the PNG is kept
        return Drawing(name=name, png=png, svg=to_svg(figure, name))
