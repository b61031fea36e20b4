"""The pipeline as a small picture in the page: what is printed, and what is seen where scripts do not run.

Boxes of one look are one path of thick strokes, eight characters each, so that tens of thousands of them stay small.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Protocol

from gplan.nouns import ActionKind
from gplan.reporting.colours import COMMUNICATION, IDLE
from gplan.reporting.page.chart_data import CAUSES, KINDS, Box, ChartData, Side, cause_variable, kind_look

_WIDTH, _LEFT = 10_800, 760  # in tenths of a pixel
_TITLE, _GAP, _AXIS = 270, 140, 40
_TALLEST, _LOWEST, _ALL_ROWS = 280, 90, 3000
_SEAM, _ROOM_FOR_SEAM = 6, 40
_DIGIT = 72  # width, with some room
_HATCHES = {
    "/": "M-10 80 80-10", "\\": "M-10-10 80 80", "x": "M-10 80 80-10M-10-10 80 80", ".": "M30 35h12", "-": "M0 35h70",
    "|": "M35 0v70",
}  # fmt: skip


class Piece(Protocol):
    """Anything from a start to an end, in ticks."""

    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...


def picture(chart: ChartData) -> str:
    """The SVG element: a panel for each side, a row for each device."""
    row = max(_LOWEST, min(_TALLEST, _ALL_ROWS // len(chart.sides[0].rows)))
    panel = _TITLE + row * len(chart.sides[0].rows) + _GAP
    height = panel * len(chart.sides) - _GAP + _AXIS
    label = "; ".join(f"{side.name}: {side.facts}" for side in chart.sides)
    panels = (
        f'<g transform="translate(0 {place * panel})">{"".join(_panel(chart, place, row))}</g>'
        for place in range(len(chart.sides))
    )
    return (
        f'<svg class="picture" role="img" aria-label="{escape(label)}" viewBox="0 0 {_WIDTH} {height}">'
        f"<defs>{''.join(_patterns())}</defs>{''.join(panels)}</svg>"
    )


def _panel(chart: ChartData, place: int, row: int) -> Iterator[str]:
    side, strip = chart.sides[place], max(15, row // 7) if chart.has_sends else 0
    name = escape(side.name[:1].upper() + side.name[1:])
    yield f'<text class="name" x="{_LEFT}" y="150">{name}</text>'
    yield f'<text x="{_WIDTH}" y="150" text-anchor="end">{escape(side.facts)}</text>'
    size = min(125, row - 10)
    for device in range(0, len(side.rows), 1 if row > 130 else 2):
        middle = _TITLE + device * row + (row - strip + size * 2 // 3) // 2
        yield f'<text class="device" x="{_LEFT - 90}" y="{middle}" font-size="{size}">device {device}</text>'
    yield from _boxes(chart, side, row, row - strip - (30 if row > 140 else 10))
    sends = ([x for x in y.sends if x.end > x.start] for y in side.rows)
    path = _path(chart, sends, row=row, middle=row - strip // 2 - 10)
    yield f'<path d="{path}" stroke="{COMMUNICATION.colour}" stroke-width="{strip}"/>' if path else ""
    for end, style in ((side.end, ""), *([(chart.sides[0].end, ' stroke-dasharray="30 30"')] if place else [])):
        line = f"M{_x(chart, end) - 5} {_TITLE}v{row * len(side.rows)}"
        yield f'<path d="{line}" style="stroke:var(--ink)" stroke-width="9"{style}/>'


def _boxes(chart: ChartData, side: Side, row: int, height: int) -> Iterator[str]:
    middle = height // 2
    for i, cause in enumerate(CAUSES):
        path = _path(chart, ([x for x in y.waits if x.cause == i] for y in side.rows), row=row, middle=middle)
        if path:
            yield f'<path d="{path}" style="stroke:var(--{cause_variable(cause)})" stroke-width="{height}"/>'
            if IDLE[cause].hatch:
                yield f'<path d="{path}" stroke="url(#hatch-{i})" stroke-width="{height}"/>'
    for kind, letter in enumerate(KINDS):
        for chunk in range(chart.num_chunks):
            own = [[x for x in y.boxes if (x.kind, x.chunk) == (kind, chunk) and x.end > x.start] for y in side.rows]
            look = kind_look(chart, kind, chunk)
            path = _path(chart, own, row=row, middle=middle)
            if path:
                yield f'<path d="{path}" stroke="{look.colour}" stroke-width="{height}"/>'
                yield from _lines(letter, own, chart, row=row, height=height)
            if letter is not ActionKind.OPTIMIZER and row >= 140:
                yield f'<g fill="{look.text}" font-size="115" text-anchor="middle">'
                yield from _numbers(chart, own, row=row, middle=middle)
                yield "</g>"


def _lines(
    letter: ActionKind, own: Sequence[Sequence[Piece]], chart: ChartData, *, row: int, height: int
) -> Iterator[str]:
    """The dark line at the foot of a backward, at the head of an input gradient, at both of a weight gradient."""
    thick = max(10, height // 9)
    foot, head = letter in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT), letter.value in "IW"
    for middle in [height - thick // 2] * foot + [thick // 2] * head:
        path = _path(chart, own, row=row, middle=middle)
        yield f'<path d="{path}" stroke="#141828" stroke-opacity=".55" stroke-width="{thick}"/>'


def _numbers(chart: ChartData, own: Sequence[Sequence[Box]], *, row: int, middle: int) -> Iterator[str]:
    """The micro-batches in boxes that have room for them, a text element for each row."""
    for device, boxes in enumerate(own):
        wide = [x for x in boxes if _x(chart, x.end) - _x(chart, x.start) > _DIGIT * len(str(x.microbatch))]
        if wide:
            spans = (f'<tspan x="{(_x(chart, x.start) + _x(chart, x.end)) // 2}">{x.microbatch}</tspan>' for x in wide)
            yield f'<text y="{_TITLE + device * row + middle + 42}">{"".join(spans)}</text>'


def _path(chart: ChartData, rows: Iterable[Sequence[Piece]], *, row: int, middle: int) -> str:
    """Strokes from start to end in the row of each device, relative to each other."""
    parts = []
    for device, pieces in enumerate(rows):
        at: int | None = None
        for piece in pieces:
            left, right = _x(chart, piece.start), _x(chart, piece.end)
            right -= _SEAM if right - left > _ROOM_FOR_SEAM else 0
            if right <= left:
                right = left + 1
            parts.append(f"M{left} {_TITLE + device * row + middle}" if at is None else f"m{left - at} 0")
            parts.append(f"h{right - left}")
            at = right
    return "".join(parts)


def _x(chart: ChartData, moment: int) -> int:
    return round(_LEFT + moment / chart.end * (_WIDTH - _LEFT - 10))


def _patterns() -> Iterator[str]:
    for i, cause in enumerate(CAUSES):
        line = _HATCHES.get(IDLE[cause].hatch[:1])
        if line:
            yield (
                f'<pattern id="hatch-{i}" width="70" height="70" patternUnits="userSpaceOnUse">'
                f'<path d="{line}" style="stroke:var(--hatch)" stroke-width="9"/></pattern>'
            )
