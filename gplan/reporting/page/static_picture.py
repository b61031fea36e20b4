"""The pipeline as a small SVG picture: for printing, and for browsers without scripts.

Boxes of one look are one path of thick strokes, about nine characters per box, so the file stays small with tens of
thousands of boxes. All lengths are in tenths of a pixel.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Protocol

from gplan.core import ActionKind
from gplan.core.units import seconds_axis
from gplan.reporting.charts.canvas import COMMUNICATION, IDLE
from gplan.reporting.page.chart_data import CAUSES, KINDS, Box, ChartData, Side, cause_variable, kind_look

_WIDTH, _LEFT = 10_800, 760
_TITLE, _GAP, _BELOW = 270, 140, 210
_MOST_MOMENTS = 10  # named on the axis
_TALLEST, _LOWEST, _ALL_ROWS = 280, 90, 3000
_SEAM, _ROOM_FOR_SEAM = 6, 40
_ROOMY = 140  # rows of that height have numbers, lines, and pieces that are hardly seen
_HARDLY_SEEN = 15
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
    num_devices = len(chart.sides[0].rows)
    row = max(_LOWEST, min(_TALLEST, _ALL_ROWS // num_devices))
    panel = _TITLE + row * num_devices + _GAP
    height = panel * len(chart.sides) - _GAP + _BELOW
    label = "; ".join(f"{side.name}: {side.facts}" for side in chart.sides)
    panels = (_Panel(chart=chart, place=place, row=row) for place in range(len(chart.sides)))
    drawn = (f'<g transform="translate(0 {x.place * panel})">{"".join(x.elements())}</g>' for x in panels)
    return (
        f'<svg class="picture" role="img" aria-label="{escape(label)}" viewBox="0 0 {_WIDTH} {height}">'
        f"<defs>{''.join(_patterns())}</defs>{''.join(drawn)}{''.join(_axis(chart, height - 60))}</svg>"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Panel:
    """One side of the chart, with rows of a height."""

    chart: ChartData
    place: int
    row: int

    @property
    def side(self) -> Side:
        return self.chart.sides[self.place]

    @property
    def strip(self) -> int:
        """Height of the transfers below the boxes."""
        return max(15, self.row // 7) if self.chart.has_sends else 0

    @property
    def height(self) -> int:
        """Of the boxes."""
        return self.row - self.strip - (30 if self.is_roomy else 10)

    @property
    def is_roomy(self) -> bool:
        return self.row >= _ROOMY

    def elements(self) -> Iterator[str]:
        """Names, idle time, boxes, transfers, and the ends of the step."""
        yield from self._names()
        yield from self._waits()
        for kind in range(len(KINDS)):
            for chunk in range(self.chart.num_chunks):
                yield from self._boxes(kind, chunk)
        sends = self._path((self._seen(x.sends) for x in self.side.rows), middle=self.row - self.strip // 2 - 10)
        yield f'<path d="{sends}" stroke="{COMMUNICATION.colour}" stroke-width="{self.strip}"/>' if sends else ""
        dashed = ' stroke-dasharray="30 30"'
        for end, style in ((self.side.end, ""), *([(self.chart.sides[0].end, dashed)] if self.place else [])):
            line = f"M{self._x(end) - 5} {_TITLE}v{self.row * len(self.side.rows)}"
            yield f'<path d="{line}" style="stroke:var(--ink)" stroke-width="9"{style}/>'

    def _names(self) -> Iterator[str]:
        name = escape(self.side.name[:1].upper() + self.side.name[1:])
        yield f'<text class="name" x="{_LEFT}" y="150">{name}</text>'
        yield f'<text x="{_WIDTH}" y="150" text-anchor="end">{escape(self.side.facts)}</text>'
        size = min(125, self.row - 10)
        for device in range(0, len(self.side.rows), 1 if self.is_roomy else 2):
            y = _TITLE + device * self.row + (self.row - self.strip + size * 2 // 3) // 2
            yield f'<text class="device" x="{_LEFT - 90}" y="{y}" style="font-size:{size}px">device {device}</text>'

    def _waits(self) -> Iterator[str]:
        for i, cause in enumerate(CAUSES):
            own = (self._seen([x for x in row.waits if x.cause == i]) for row in self.side.rows)
            path, name = self._path(own, middle=self.height // 2), f"waits-{self.place}-{i}"
            if path:
                strokes = f"var(--{cause_variable(cause)})", *([f"url(#hatch-{i})"] if IDLE[cause].hatch else [])
                yield f'<defs><path id="{name}" d="{path}"/></defs>'
                yield from (f'<use href="#{name}" style="stroke:{x}" stroke-width="{self.height}"/>' for x in strokes)

    def _boxes(self, kind: int, chunk: int) -> Iterator[str]:
        rows = self.side.rows
        own = [[x for x in row.boxes if (x.kind, x.chunk) == (kind, chunk) and x.end > x.start] for row in rows]
        if not any(own):
            return
        look, letter = kind_look(self.chart, kind, chunk), KINDS[kind]
        path = self._path(own, middle=self.height // 2)
        yield f'<path d="{path}" stroke="{look.colour}" stroke-width="{self.height}"/>'
        if not self.is_roomy:
            return
        yield from self._lines(letter, own)
        if letter is not ActionKind.OPTIMIZER:
            numbers = "".join(self._numbers(own))
            yield f'<g fill="{look.text}" font-size="115" text-anchor="middle">{numbers}</g>'

    def _lines(self, letter: ActionKind, own: Sequence[Sequence[Box]]) -> Iterator[str]:
        """The dark line at the foot of a backward, at the head of an input gradient, at both of a weight gradient."""
        thick = max(10, self.height // 9)
        foot, head = letter in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT), letter.value in "IW"
        for middle in [self.height - thick // 2] * foot + [thick // 2] * head:
            path = self._path(own, middle=middle)
            yield f'<path d="{path}" stroke="#141828" stroke-opacity=".55" stroke-width="{thick}"/>'

    def _numbers(self, own: Sequence[Sequence[Box]]) -> Iterator[str]:
        """The micro-batches in boxes that have room for all of them, a text element for each row."""
        num_digits = len(str(self.chart.plan.num_microbatches - 1))
        for device, boxes in enumerate(own):
            ends = [(self._x(x.start), self._x(x.end), str(x.microbatch)) for x in boxes]
            wide = [((left + right) // 2, text) for left, right, text in ends if right - left > _DIGIT * num_digits]
            spans = "".join(f'<tspan x="{middle}">{text}</tspan>' for middle, text in wide)
            y = _TITLE + device * self.row + self.height // 2 + 42
            yield f'<text y="{y}">{spans}</text>' if spans else ""

    def _seen(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        """Without those that would hardly be seen, where there are many rows."""
        if self.is_roomy:
            return pieces
        return [x for x in pieces if self._x(x.end) - self._x(x.start) >= _HARDLY_SEEN]

    def _path(self, rows: Iterable[Sequence[Piece]], *, middle: int) -> str:
        """Strokes from start to end in the row of each device, relative to each other."""
        parts = []
        for device, pieces in enumerate(rows):
            at: int | None = None
            for piece in pieces:
                left, right = self._x(piece.start), self._x(piece.end)
                right = max(left + 1, right - (_SEAM if right - left > _ROOM_FOR_SEAM else 0))
                y = _TITLE + device * self.row + middle
                parts.append(f"M{left} {y}h{right - left}" if at is None else f"m{left - at} 0h{right - left}")
                at = right
        return "".join(parts)

    def _x(self, moment: int) -> int:
        return _x_of(self.chart, moment)


def _x_of(chart: ChartData, moment: float) -> int:
    return round(_LEFT + moment / chart.end * (_WIDTH - _LEFT - 10))


def _axis(chart: ChartData, y: int) -> Iterator[str]:
    """Moments of the step at even distances."""
    longest_s = chart.end * chart.tick_s
    power = 10.0 ** math.floor(math.log10(longest_s / _MOST_MOMENTS))
    step_s = next(n * power for n in (1, 2, 5, 10) if longest_s / (n * power) <= _MOST_MOMENTS)
    unit, scale = seconds_axis(longest_s)
    for n in range(int(longest_s / step_s) + 1):
        x = _x_of(chart, n * step_s / chart.tick_s)
        anchor = "start" if n == 0 else "end" if x > _WIDTH - 300 else "middle"
        yield f'<text class="moment" x="{x}" y="{y}" text-anchor="{anchor}">{n * step_s / scale:.4g} {unit}</text>'


def _patterns() -> Iterator[str]:
    for i, cause in enumerate(CAUSES):
        line = _HATCHES.get(IDLE[cause].hatch[:1])
        if line:
            yield (
                f'<pattern id="hatch-{i}" width="70" height="70" patternUnits="userSpaceOnUse">'
                f'<path d="{line}" style="stroke:var(--hatch)" stroke-width="9"/></pattern>'
            )
