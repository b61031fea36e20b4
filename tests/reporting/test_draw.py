"""The drawings: whole files, the same every time, and no trace left in matplotlib's settings."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import matplotlib
import pytest

from gplan.reporting.analysis import analysis_of
from gplan.reporting.charts.canvas import Drawing, chart_style, to_svg
from gplan.reporting.charts.partition_chart import partition_chart
from gplan.reporting.report_folder import CHARTS, draw
from tests.reporting.subjects import make_plan, make_run, named


@pytest.fixture(scope="module")
def drawings() -> tuple[Drawing, ...]:
    names = ["<script>alert(1)</script>", 'quo"te', "amp&ersand", "a$b", *"efgh"]
    run = make_run(named(make_plan(8, num_stages=2, num_microbatches=2), names))
    return draw(run, analysis_of(run.plan, None))


def test_every_chart_is_drawn_once(drawings: tuple[Drawing, ...]) -> None:
    assert [drawing.name for drawing in drawings] == [x for x in CHARTS if x not in ("choices", "frontier")] == [
        "partition", "pipeline", "memory", "memory-timeline", "accuracy", "errors",
    ]  # fmt: skip


def test_png_files_are_whole_and_wide_enough_to_read(drawings: tuple[Drawing, ...]) -> None:
    for drawing in drawings:
        assert drawing.png.startswith(b"\x89PNG\r\n\x1a\n")
        assert drawing.png.endswith(b"IEND\xaeB`\x82")
        assert int.from_bytes(drawing.png[16:20], "big") in (1650, 840)


def test_svg_files_are_well_formed_and_their_text_is_text(drawings: tuple[Drawing, ...]) -> None:
    for drawing in drawings:
        root = ElementTree.fromstring(drawing.svg)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert [x.text for x in root.iter("{http://www.w3.org/2000/svg}text")]
    texts = [x.text for x in ElementTree.fromstring(drawings[0].svg).iter("{http://www.w3.org/2000/svg}text")]
    assert {"amp&ersand", "a$b", 'quo"te', "<script>alert(1)</script>"} & set(texts) >= {"amp&ersand", "a$b", 'quo"te'}


def test_the_same_subject_gives_the_same_bytes_and_matplotlib_keeps_its_settings() -> None:
    run, before = make_run(make_plan(3, num_stages=2)), dict(matplotlib.rcParams)

    def drawn() -> bytes:
        with chart_style("partition"):
            return to_svg(partition_chart(run), "partition")

    assert drawn() == drawn()
    assert dict(matplotlib.rcParams) == before
