"""The report: charts, one offline HTML page and a Chrome trace of a plan, or of a run beside its plan."""

from __future__ import annotations

from pathlib import Path

from gplan.files.json_files import check_writable, write_bytes
from gplan.reporting.charts.draw import CHARTS, draw
from gplan.reporting.chrome_trace import trace_json
from gplan.reporting.page.document import page
from gplan.reporting.subject import PlanAnalysis, Subject


def write_report(subject: Subject, directory: Path, *, analysis: PlanAnalysis) -> tuple[Path, ...]:
    """Write index.html, the charts as PNG and SVG, and trace.json; returns their paths, the page first.

    Charts left by an earlier report that this one does not have are removed. Raises FileError if the directory cannot
    be written.
    """
    check_writable(directory / "index.html")
    drawings = draw(subject, analysis)
    contents = {"index.html": page(subject, drawings, analysis).encode()}
    for drawing in drawings:
        contents |= {f"{drawing.name}.png": drawing.png, f"{drawing.name}.svg": drawing.svg}
    contents["trace.json"] = trace_json(subject)
    for name, content in contents.items():
        write_bytes(directory / name, content)
    for name in (f"{chart}.{kind}" for chart in CHARTS for kind in ("png", "svg")):
        if name not in contents:
            (directory / name).unlink(missing_ok=True)
    return tuple(directory / name for name in contents)
