"""The numbers behind the Gantt chart: whole ticks that lose nothing that anyone sees."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from gplan.core import IdleCause
from gplan.reporting.page.chart_data import CAUSES, KINDS, MEANINGS, ChartData, chart_data, embedded
from gplan.simulation.bubble import idle_pieces
from gplan.simulation.simulator import simulate
from tests.reporting.subjects import make_plan, make_run, make_scheduled_plan, named


def test_a_tick_is_a_power_of_ten_and_small_beside_an_action() -> None:
    plan = make_plan()
    chart = chart_data(plan)
    shortest_s = min(x.duration_s for x in simulate(plan).loop_spans)
    assert chart.tick_s in (1e-7, 1e-6, 1e-5)
    assert chart.tick_s < shortest_s / 300


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved-1f1b:2", "zb-v"])
def test_every_action_transfer_and_wait_is_there_at_its_time(schedule: str) -> None:
    plan = make_scheduled_plan(schedule)
    timeline, chart = simulate(plan), chart_data(plan)
    (side,) = chart.sides
    found = [
        (device, KINDS[x.kind], plan.stages_of(device)[x.chunk].index, x.microbatch, x.start, x.end)
        for device, row in enumerate(side.rows)
        for x in row.boxes
    ]
    ticks = [(round(x.start_s / chart.tick_s), round(x.end_s / chart.tick_s)) for x in timeline.spans]
    expected = [
        (x.device, x.action.kind, x.action.stage, x.action.microbatch, *at)
        for x, at in zip(timeline.spans, ticks, strict=True)
    ]
    assert sorted(found) == sorted(expected)
    assert sum(len(row.sends) for row in side.rows) == len(timeline.transfers)
    waited = sum(x.end - x.start for row in side.rows for x in row.waits) * chart.tick_s
    assert waited == pytest.approx(sum(x.duration_s for x in idle_pieces(timeline)), rel=1e-3)


def test_what_is_embedded_can_be_added_up_again() -> None:
    chart = chart_data(make_run(make_scheduled_plan("zb-v")))
    data = json.loads(embedded(chart))
    for side, written in zip(chart.sides, data["sides"], strict=True):
        for row, boxes, sends in zip(side.rows, written["boxes"], written["sends"], strict=True):
            at, found = 0, []
            for kind, chunk, microbatch, gap, length in zip(*[iter(boxes)] * 5, strict=True):
                found.append((kind, chunk, microbatch, at + gap, at + gap + length))
                at += gap + length
            assert found == [(x.kind, x.chunk, x.microbatch, x.start, x.end) for x in row.boxes]
            assert sum(sends[::3]) == row.sends[-1].box


def test_both_sides_are_there_for_a_run_and_one_for_a_plan() -> None:
    assert [side.name for side in chart_data(make_run()).sides] == ["predicted (computed)", "measured (torch engine)"]
    assert [side.name for side in chart_data(make_plan()).sides] == ["predicted (computed)"]


def test_no_name_can_end_the_element_that_it_is_in() -> None:
    chart = chart_data(named(make_plan(4, num_stages=2), ["</script><b>", "<!--", "a&b", '"']))
    text = embedded(chart)
    assert not set("<>&") & set(text)
    assert json.loads(text)["stages"][0][1] == "layers 0–1: </script><b> … <!--"


def test_every_cause_of_waiting_has_a_meaning_and_a_colour() -> None:
    assert set(CAUSES) == set(MEANINGS) == set(IdleCause)


def test_boxes_of_a_device_follow_each_other() -> None:
    chart: ChartData = chart_data(make_run())
    for row in (row for side in chart.sides for row in side.rows):
        assert all(before.end <= after.start for before, after in pairwise(row.boxes))
