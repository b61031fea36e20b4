"""The numbers behind the Gantt chart: whole ticks that lose nothing that anyone sees."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from gplan.core import IdleCause
from gplan.core.units import seconds_text
from gplan.reporting.looks import ACTIONS, IDLE
from gplan.reporting.page.figures import MEANINGS, pipeline_json
from gplan.reporting.subject import Subject, timelines_of
from gplan.reporting.text.run import devices_table
from gplan.simulation.bubble import idle_pieces
from gplan.simulation.simulator import simulate
from tests.reporting.subjects import make_plan, make_run, make_scheduled_plan, named


def chart_of(subject: Subject) -> dict[str, Any]:
    return json.loads(pipeline_json(subject))  # type: ignore[no-any-return]


def pieces(flat: list[int], num_own: int) -> Iterator[tuple[int, ...]]:
    """The own numbers, the start and the end of each piece, added up as the script does."""
    at = 0
    for *own, gap, length in zip(*[iter(flat)] * (num_own + 2), strict=True):
        yield (*own, at + gap, at + gap + length)
        at += gap + length


def test_a_tick_is_a_power_of_ten_and_small_beside_an_action() -> None:
    plan = make_plan()
    tick_s = chart_of(plan)["tick"]
    assert tick_s in (1e-7, 1e-6, 1e-5)
    assert tick_s < min(x.duration_s for x in simulate(plan).loop_spans) / 300


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved-1f1b:2", "zb-v"])
def test_every_action_transfer_and_wait_is_there_at_its_time(schedule: str) -> None:
    run = make_run(make_scheduled_plan(schedule))
    plan, chart = run.plan, chart_of(run)
    for timeline, side in zip(timelines_of(run).values(), chart["sides"], strict=True):
        found = [
            (device, list(ACTIONS)[kind], plan.stages_of(device)[chunk].index, *rest)
            for device, boxes in enumerate(side["boxes"])
            for kind, chunk, *rest in pieces(boxes, 3)
        ]
        ticks = [(round(x.start_s / chart["tick"]), round(x.end_s / chart["tick"])) for x in timeline.spans]
        actions = [(x.device, x.action.kind, x.action.stage, x.action.microbatch) for x in timeline.spans]
        expected = [(*action, *at) for action, at in zip(actions, ticks, strict=True)]
        assert sorted(found) == sorted(expected)
        waited = sum(end - start for waits in side["waits"] for _, start, end in pieces(waits, 1)) * chart["tick"]
        assert waited == pytest.approx(sum(x.duration_s for x in idle_pieces(timeline)), rel=1e-3)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b:2", "zb-v"])
def test_a_device_idles_as_long_in_the_chart_as_in_the_table(schedule: str) -> None:
    run = make_run(make_scheduled_plan(schedule))
    chart = chart_of(run)
    measured = list(timelines_of(run)).index("measured")
    for waits, line in zip(chart["sides"][measured]["waits"], devices_table(run).lines, strict=True):
        idle_s = sum(end - start for _, start, end in pieces(waits, 1)) * chart["tick"]
        device = int(line.cells["device"])
        assert idle_s == pytest.approx(run.timeline.idle_s(device), rel=1e-3)
        assert line.cells["idle"] == seconds_text(run.timeline.idle_s(device))


@pytest.mark.parametrize("schedule", ["gpipe", "zb-v"])
def test_each_transfer_begins_and_ends_at_its_time_after_its_action(schedule: str) -> None:
    plan = make_scheduled_plan(schedule)
    chart, timeline = chart_of(plan), simulate(plan)
    (side,) = chart["sides"]
    found = []
    for boxes, sends in zip(side["boxes"], side["sends"], strict=True):
        place, own = 0, list(pieces(boxes, 3))
        for step, gap, length in zip(*[iter(sends)] * 3, strict=True):
            place += step
            found.append((own[place][-1] + gap, own[place][-1] + gap + length))
    expected = [(round(x.start_s / chart["tick"]), round(x.end_s / chart["tick"])) for x in timeline.transfers]
    assert sorted(found) == sorted(expected)


def test_both_sides_are_there_for_a_run_and_one_for_a_plan() -> None:
    assert [x["name"] for x in chart_of(make_run())["sides"]] == ["predicted", "measured (torch engine)"]
    assert [x["name"] for x in chart_of(make_plan())["sides"]] == ["predicted"]


def test_no_name_can_end_the_element_that_it_is_in() -> None:
    text = pipeline_json(named(make_plan(4, num_stages=2), ["</script><b>", "<!--", "a&b", '"']))
    assert not set("<>&") & set(text)
    assert json.loads(text)["stages"][0][1] == "layers: </script><b> … <!-- (2)"


def test_every_cause_of_waiting_has_a_meaning_and_a_colour() -> None:
    assert set(IDLE) == set(MEANINGS) == set(IdleCause)


def test_boxes_of_a_device_follow_each_other() -> None:
    for side in chart_of(make_run())["sides"]:
        for boxes in side["boxes"]:
            assert all(before[-1] <= after[-2] for before, after in pairwise(pieces(boxes, 3)))
