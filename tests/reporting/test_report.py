"""The whole report on disk."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from gplan.core.errors import FileError
from gplan.reporting.report_folder import write_report
from gplan.reporting.subject import Subject, background_of
from tests.reporting.subjects import make_plan, make_run

NAMES = [
    "index.html", "partition.png", "partition.svg", "pipeline.png", "pipeline.svg", "memory.png", "memory.svg",
    "memory-timeline.png", "memory-timeline.svg", "accuracy.png", "accuracy.svg", "errors.png", "errors.svg",
    "choices.png", "choices.svg", "trace.json",
]  # fmt: skip
OF_RUNS = {"accuracy.png", "accuracy.svg", "errors.png", "errors.svg"}


PLAN = make_plan(3, num_stages=2, num_microbatches=1)


ALONE = background_of(PLAN, None)


@pytest.mark.parametrize("subject", [PLAN, make_run(PLAN)])
def test_a_report_is_whole_files_and_nothing_else(subject: Subject, tmp_path: Path) -> None:
    names = [name for name in NAMES if subject is not PLAN or name not in OF_RUNS]
    paths = write_report(subject, tmp_path / "report", background=ALONE)
    assert [path.name for path in paths] == names
    assert sorted(path.name for path in (tmp_path / "report").iterdir()) == sorted(names)
    html = paths[0].read_text(encoding="utf-8")
    assert html.startswith("<!DOCTYPE html>")
    assert html.endswith("</html>\n")
    for path in paths:
        if path.suffix == ".svg":
            ElementTree.parse(path)
        if path.suffix == ".png":
            assert path.read_bytes().endswith(b"IEND\xaeB`\x82")
    assert json.loads(paths[-1].read_text())["traceEvents"]


def test_a_second_report_replaces_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gplan.reporting.report_folder.draw", lambda *_: ())
    write_report(PLAN, tmp_path, background=ALONE)
    index, *_ = write_report(make_run(PLAN), tmp_path, background=ALONE)
    assert "How it was measured" in index.read_text(encoding="utf-8")
    assert {x.name for x in tmp_path.iterdir()} == {"index.html", "trace.json"}


def test_charts_that_an_earlier_report_left_are_removed_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "accuracy.png").write_bytes(b"of an older run")
    (tmp_path / "mine.png").write_bytes(b"not a chart of a report")
    write_report(PLAN, tmp_path, background=ALONE)
    assert not (tmp_path / "accuracy.png").exists() and (tmp_path / "mine.png").exists()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gplan.reporting.report_folder.draw", lambda *_: ())
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(FileError, match=r"file/index\.html cannot be written"):
        write_report(PLAN, tmp_path / "file", background=ALONE)
