"""Timelines as rows of characters."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from gplan.core import Action, Timeline
from gplan.reporting.text.gantt import MOST_DEVICES, Gantt, boxes_of, seconds_per_column
from gplan.simulation.schedule_trial import GivenCosts, given_trial
from tests.reporting.text.printed import printed


def timeline_of(name: str, k: int, m: int, **costs: object) -> Timeline:
    return given_trial(name, GivenCosts(**costs), num_devices=k, num_microbatches=m).timeline  # type: ignore[arg-type]


def painted(timeline: Timeline, *, width: int = 80, no_color: bool = False) -> str:
    """What a terminal of true colour receives."""
    console = Console(
        width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor", no_color=no_color,
        highlight=False,
    )  # fmt: skip
    with console.capture() as captured:
        console.print(Gantt(timeline=timeline))
    return captured.get()


def test_letters_and_numbers_share_a_line_where_they_fit() -> None:
    assert printed(Gantt(timeline=timeline_of("1f1b", 3, 4, optimizer=(1.0,))), width=50) == [
        "0 |F0F1F2........B0  F3B1  ..B2  ..B3  O",
        "1 |..F0F1....B0  F2B1  F3B2  ..B3  O",
        "2 |....F0B0  F1B1  F2B2  F3B3  O",
        "   0         5         10        15",
        "F forward, B backward, O optimizer, . waiting",
        "numbers: micro-batches; one column is 0.5",
    ]


def test_letters_and_numbers_have_lines_of_their_own_where_boxes_are_narrow() -> None:
    lines = printed(Gantt(timeline=timeline_of("gpipe", 2, 4)), width=20)
    assert lines[:4] == ["0 |FFFF...BBBBBBBB", "  |0123   3 2 1 0", "1 |.FFFFBBBBBBBB", "  | 01233 2 1 0"]


def test_chunks_are_told_apart_by_case_or_from_three_on_by_a_line() -> None:
    two, three = (printed(Gantt(timeline=timeline_of(f"looped-bfs:{v}", 1, 1)), width=80) for v in (2, 3))
    assert re.fullmatch(r"0 \|F0 +f0 +b0 +B0 *", two[0])
    assert [re.sub(r"(.)\1*", r"\1", line[3:]) for line in three[:1]] == ["FB"]
    assert three[2].split() == ["|0", "1", "2", "2", "1", "0"]


@pytest.mark.parametrize("width", [10, 23, 80, 120])
@pytest.mark.parametrize(("name", "k", "m"), [("1f1b", 8, 16), ("zb-v", 4, 9), ("interleaved-1f1b:3", 2, 40)])
def test_no_line_is_wider_than_the_terminal(name: str, k: int, m: int, width: int) -> None:
    timeline = timeline_of(name, k, m, link=0.1)
    assert max(map(len, printed(Gantt(timeline=timeline), width=width))) <= width
    assert max(len(re.sub(r"\x1b\[[0-9;]*m", "", x)) for x in painted(timeline, width=width).splitlines()) <= width


@pytest.mark.parametrize("num_columns", [7, 30, 77, 200])
def test_boxes_are_as_long_as_their_actions_to_a_column(num_columns: int) -> None:
    timeline = timeline_of("zb-v", 3, 5, forward=(1.0, 1.7, 0.4), link=0.3)
    column_s = seconds_per_column(timeline, num_columns)
    assert timeline.step_s <= num_columns * column_s * (1 + 1e-9)
    spans = {x.action: x for x in timeline.spans}
    for device, row in enumerate(boxes_of(timeline, column_s)):
        for box in row:
            span = spans[Action((device, 5 - device)[box.chunk], box.kind, box.microbatch)]
            assert abs(span.start_s / column_s - box.first) <= 0.5 + 1e-9
            assert abs(span.end_s / column_s - box.end) <= 0.5 + 1e-9


def test_the_shortest_action_has_a_whole_number_of_columns() -> None:
    timeline = timeline_of("1f1b", 4, 8)
    assert seconds_per_column(timeline, 77) == 0.5
    assert seconds_per_column(timeline, 40) == 1.0
    assert seconds_per_column(timeline, 22) == 1.5


def test_numbers_give_way_where_most_boxes_would_have_no_room() -> None:
    lines = printed(Gantt(timeline=timeline_of("gpipe", 2, 64)), width=60)
    assert len([line for line in lines if re.match(r"[01 ] \|", line)]) == 2
    assert "too narrow for micro-batch numbers" in lines[4]


def test_colours_differ_by_kind_and_by_chunk_and_need_no_letters() -> None:
    text = painted(timeline_of("zb-v", 2, 4, optimizer=(1.0,)))
    row = text.splitlines()[1]
    assert len(set(re.findall(r"48;2;(\d+;\d+;\d+)", row))) == 7
    assert not re.search("[FfIiWw]", re.sub(r"\x1b\[[0-9;]*m", "", row))


def test_no_color_is_heeded() -> None:
    timeline = timeline_of("1f1b", 2, 4)
    assert "48;2" in painted(timeline)
    assert "48;2" not in painted(timeline, no_color=True)
    assert "F0" in painted(timeline, no_color=True)


def test_very_many_devices_are_not_all_drawn_and_it_is_said() -> None:
    lines = printed(Gantt(timeline=timeline_of("gpipe", MOST_DEVICES + 3, 1)), width=200)
    assert "not drawn: 3 more devices" in lines


@pytest.mark.parametrize(("name", "is_told"), [("zb-h1", True), ("zb-v", True), ("1f1b", False)])
def test_where_backwards_are_in_halves_stage_0_is_said_to_have_no_first(name: str, is_told: bool) -> None:
    text = " ".join(printed(Gantt(timeline=timeline_of(name, 2, 4)), width=200))
    assert ("on stage 0, whose input needs no gradient, W is the whole backward" in text) is is_told
