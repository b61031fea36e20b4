"""All charts of a report, each as a PNG and an SVG file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.figure import Figure

from gplan.reporting.charts.accuracy_chart import accuracy_chart, errors_chart
from gplan.reporting.charts.canvas import chart_style, to_png, to_svg
from gplan.reporting.charts.choices_chart import choices_chart, frontier_chart
from gplan.reporting.charts.memory_chart import holdings_chart, memory_chart
from gplan.reporting.charts.partition_chart import partition_chart
from gplan.reporting.charts.pipeline_chart import pipeline_chart
from gplan.reporting.subject import PlanAnalysis, Subject, plan_of

CHARTS: dict[str, Callable[[Subject, PlanAnalysis], Figure | None]] = {
    "partition": lambda subject, _: partition_chart(subject),
    "pipeline": lambda subject, _: pipeline_chart(subject),
    "memory": lambda subject, _: memory_chart(subject),
    "memory-timeline": lambda subject, _: holdings_chart(subject),
    "accuracy": lambda subject, _: accuracy_chart(subject),
    "errors": lambda subject, _: errors_chart(subject),
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
    drawings = []
    for name, chart in CHARTS.items():
        with chart_style(name):
            figure = chart(subject, analysis)
            if figure is not None:
                png = to_png(figure)
                figure.set_layout_engine("none")  # the layout of the PNG is kept
                drawings.append(Drawing(name=name, png=png, svg=to_svg(figure, name)))
    return tuple(drawings)
