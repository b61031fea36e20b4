"""The report: charts, one offline HTML page, tables and a Chrome trace of a plan, or of a run beside its plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from gplan.files.json_files import check_writable, write_bytes
from gplan.reporting.analysis import PlanAnalysis
from gplan.reporting.charts.accuracy_chart import accuracy_chart, errors_chart
from gplan.reporting.charts.canvas import Drawing, chart_style, to_png, to_svg
from gplan.reporting.charts.choices_chart import choices_chart, frontier_chart
from gplan.reporting.charts.memory_chart import holdings_chart, memory_chart
from gplan.reporting.charts.partition_chart import partition_chart
from gplan.reporting.charts.pipeline_chart import pipeline_chart
from gplan.reporting.chrome_trace import trace_json
from gplan.reporting.memory_snapshot import SNAPSHOT
from gplan.reporting.page.document import page
from gplan.reporting.subject import Subject, plan_of, stage_loads, timelines_of

CHARTS: dict[str, Callable[[Subject, PlanAnalysis], Figure | None]] = {
    "partition": lambda subject, _: partition_chart(subject),
    "pipeline": lambda subject, _: pipeline_chart(subject),
    "memory": lambda subject, _: memory_chart(subject),
    "memory-timeline": lambda subject, _: holdings_chart(subject),
    "accuracy": lambda subject, _: accuracy_chart(subject),
    "errors": lambda subject, _: errors_chart(subject),
    "choices": lambda subject, analysis: choices_chart(plan_of(subject), analysis),
    "frontier": lambda subject, analysis: frontier_chart(plan_of(subject), analysis),
}


def write_report(subject: Subject, directory: Path, *, analysis: PlanAnalysis) -> tuple[Path, ...]:
    """Write index.html, the charts as PNG and SVG, tables as CSV, trace.json, and for GPUs what their allocators do.

    Returns their paths, the page first. What an earlier report left and this one does not have is removed. Raises FileError if the directory cannot
    be written.
    """
    check_writable(directory / "index.html")
    drawings = draw(subject, analysis)
    contents = {"index.html": page(subject, drawings, analysis).encode()}
    for drawing in drawings:
        contents |= {f"{drawing.name}.png": drawing.png, f"{drawing.name}.svg": drawing.svg}
    contents |= {f"{name}.csv": table.to_csv(index=False).encode() for name, table in tables(subject).items()}
    contents["trace.json"] = trace_json(subject)
    if analysis.memory_snapshot:
        contents[SNAPSHOT] = analysis.memory_snapshot
    for name, content in contents.items():
        write_bytes(directory / name, content)
    for name in (SNAPSHOT, *(f"{chart}.{kind}" for chart in CHARTS for kind in ("png", "svg"))):
        if name not in contents:
            (directory / name).unlink(missing_ok=True)
    return tuple(directory / name for name in contents)


def tables(subject: Subject) -> dict[str, pd.DataFrame]:
    """The numbers behind the charts, in seconds: the loads of stages per micro-batch, and all actions of a step, by side."""
    loads = [
        {"side": side, "stage": stage, **load}
        for side, found in stage_loads(subject).items()
        for stage, load in enumerate(found)
    ]
    actions = [
        {
            "side": side,
            "device": x.device,
            "stage": x.action.stage,
            "kind": x.action.kind.value,
            "microbatch": x.action.microbatch,
            "start_s": x.start_s,
            "end_s": x.end_s,
        }
        for side, timeline in timelines_of(subject).items()
        for x in timeline.spans
    ]
    return {"stages": pd.DataFrame(loads), "actions": pd.DataFrame(actions)}


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
