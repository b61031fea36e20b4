"""The picture of the pipeline for paper and for readers without scripts."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

from gplan.reporting.page.chart_data import chart_data
from gplan.reporting.page.static_picture import picture
from tests.reporting.subjects import make_plan, make_run, make_scheduled_plan


def texts(svg: str) -> list[str]:
    return ["".join(x.itertext()) for x in ElementTree.fromstring(svg).iter() if x.tag == "text"]


def test_the_picture_names_sides_devices_moments_and_micro_batches() -> None:
    found = texts(picture(chart_data(make_run(make_plan(num_microbatches=4)))))
    assert found.count("Predicted (computed)") == found.count("Measured (torch engine)") == 1
    assert found.count("device 3") == 2
    assert found.count("0123") == 2 * 2 * 4, "a forward and a backward on each device of each side"
    assert found[-1].endswith(" ms")


def test_each_box_is_one_stroke() -> None:
    svg = picture(chart_data(make_plan(num_stages=2, num_microbatches=3)))
    (forward,) = re.findall(r'd="([^"]*)" stroke="#397af2"', svg)
    assert forward.count("h") == 2 * 3
    assert forward.count("M") == 2, "a row for each device"


def test_halves_of_a_backward_are_told_apart_by_lines_too() -> None:
    svg = picture(chart_data(make_scheduled_plan("zb-h1")))
    assert svg.count('stroke="#141828"') == 1 + 2, "at the head of an input gradient, at both of a weight gradient"


def test_a_name_cannot_leave_its_attribute() -> None:
    svg = picture(chart_data(replace(make_run(), engine='"><script>')))
    assert "script" not in [x.tag for x in ElementTree.fromstring(svg).iter()]


def test_thousands_of_boxes_stay_small() -> None:
    run = make_run(make_plan(16, num_stages=8, num_microbatches=128))
    num_boxes = 2 * len(run.timeline.spans)
    assert num_boxes > 4_000
    assert len(picture(chart_data(run))) < 30 * num_boxes
