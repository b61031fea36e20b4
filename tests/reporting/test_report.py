"""The whole report on disk."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from gplan.core.errors import FileError
from gplan.reporting.analysis import analysis_of
from gplan.reporting.report_folder import write_report
from tests.reporting.subjects import make_plan, make_run

NAMES = [
    "index.html", "partition.png", "partition.svg", "pipeline.png", "pipeline.svg", "memory.png", "memory.svg",
    "memory-timeline.png", "memory-timeline.svg", "accuracy.png", "accuracy.svg", "errors.png", "errors.svg",
    "stages.csv", "actions.csv", "trace.json",
]  # fmt: skip
OF_RUNS = {"accuracy.png", "accuracy.svg", "errors.png", "errors.svg"}


PLAN = make_plan(3, num_stages=2, num_microbatches=1)
CHOICES = analysis_of(PLAN, None)


def test_a_report_is_its_files_and_replaces_an_earlier_one(tmp_path: Path) -> None:
    (tmp_path / "mine.png").write_bytes(b"not a chart of a report")
    paths = write_report(make_run(PLAN), tmp_path, analysis=CHOICES)
    assert [path.name for path in paths] == NAMES
    html = paths[0].read_text(encoding="utf-8")
    assert html.startswith("<!DOCTYPE html>") and html.endswith("</html>\n")
    assert "How it was measured" in html
    for path in paths:
        if path.suffix == ".svg":
            ElementTree.parse(path)
        if path.suffix == ".png":
            assert path.read_bytes().endswith(b"IEND\xaeB`\x82")
    assert json.loads(paths[-1].read_text())["traceEvents"]
    index, *others = write_report(PLAN, tmp_path, analysis=CHOICES)
    assert "How it was measured" not in index.read_text(encoding="utf-8")
    assert {x.name for x in tmp_path.iterdir()} == {*NAMES, "mine.png"} - OF_RUNS
    assert len(others) == len(NAMES) - len(OF_RUNS) - 1


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(FileError, match=r"file/index\.html cannot be written"):
        write_report(PLAN, tmp_path / "file", analysis=CHOICES)
