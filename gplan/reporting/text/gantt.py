"""A timeline as rows of characters, one per device, scaled to the width of the terminal.

With colours, a box is the micro-batch's number on the colour of its kind, paler for later chunks of a device. Without
colours, a letter is before the number, in lower case for the second of two chunks; if that does not fit into every box,
letters, numbers and (for three or more) chunks have lines of their own:

    0 |FFFF....BBBBBBBB        letters
      |0123    0 1 2 3         numbers
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.style import Style
from rich.text import Text

from gplan.core import ActionKind, Timeline
from gplan.core.units import counted
from gplan.reporting.looks import ACTIONS, of_chunk
from gplan.simulation.schedule_trial import has_whole_backward

MOST_DEVICES = 64
_WAITING = "."
_TICK_COLUMNS = 10
_LEGIBLE = 0.5
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionCell:
    """Columns [first, end) of a row."""

    first: int
    end: int
    kind: ActionKind
    microbatch: int
    chunk: int

    @property
    def width(self) -> int:
        """Columns."""
        return self.end - self.first

    @property
    def number(self) -> str:
        """The micro-batch; only the last digits if there is no room for more."""
        return "" if self.kind is ActionKind.OPTIMIZER else str(self.microbatch)[-self.width :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gantt:
    """A timeline that rich prints in any width; `time_text` formats the times of the axis."""

    timeline: Timeline
    time_text: Callable[[float], str] = "{:g}".format

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """A row or more for each device, an axis, and a legend."""
        margin = len(str(self.timeline.num_devices - 1)) + 2
        num_columns = max(1, options.max_width - margin)
        column_s = seconds_per_column(self.timeline, num_columns)
        is_coloured = console.color_system is not None and not console.no_color
        drawing = _drawing_of(self.timeline, column_s, is_coloured)
        for device, row in enumerate(drawing.rows[:MOST_DEVICES]):
            head = f"{device:>{margin - 2}} |"
            for line in drawing.lines(row):
                yield Text(head, no_wrap=True) + line
                head = " " * (margin - 1) + "|"
        times = axis(num_columns, column_s, self.timeline.step_s, self.time_text)
        yield Text(" " * margin + times, style="dim", no_wrap=True)
        if len(drawing.rows) > MOST_DEVICES:
            yield Text(f"not drawn: {counted(len(drawing.rows) - MOST_DEVICES, 'more device')}", style="dim")
        yield drawing.legend()
        yield Text("; ".join((*drawing.words(), f"one column is {self.time_text(column_s)}")))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawing:
    """The rows of boxes, and how they are printed."""

    rows: list[list[ActionCell]]
    num_chunks: int
    columns: float  # of the shortest action
    is_coloured: bool
    has_whole_backward: bool

    @property
    def has_numbers(self) -> bool:
        """Whether nearly all boxes have room for one."""
        return self.columns >= _LEGIBLE

    @property
    def is_stacked(self) -> bool:
        """Whether letters and numbers have lines of their own."""
        return self.num_chunks > 2 or any(len(self._label(x)) > x.width for row in self.rows for x in row)

    def lines(self, row: Sequence[ActionCell]) -> list[Text]:
        """A device's line, or its lines."""
        if self.is_coloured:
            return [self._painted(row)]
        if not self.is_stacked:
            return [_filled(row, self._label, _WAITING)]
        letters = _filled(row, lambda box: self._label(box)[0] * box.width, _WAITING)
        numbers = _filled(row, lambda box: box.number, " ")
        chunks = _filled(row, lambda box: str(box.chunk)[-1], " ")
        return [letters, numbers, chunks][: (3 if self.num_chunks > 2 else 2) if self.has_numbers else 1]

    def legend(self) -> Text:
        """Every kind of action with its letter or colours."""
        kinds = [kind for kind in ActionKind if any(x.kind is kind for row in self.rows for x in row)]
        if not self.is_coloured:
            return Text(", ".join((*(f"{kind.value} {kind.words}" for kind in kinds), f"{_WAITING} waiting")))
        line = Text()
        for kind in kinds:
            for chunk in range(self.num_chunks):
                line.append("  ", style=_style(kind, chunk, self.num_chunks))
            line.append(f" {kind.words}  ")
        return line

    def words(self) -> Iterator[str]:
        """The meaning of numbers, shades and lower-case letters."""
        if not self.has_numbers:
            yield "too narrow for micro-batch numbers"
        elif self.is_stacked and not self.is_coloured:
            yield "below: micro-batches" + (", and which of a device's stages" if self.num_chunks > 2 else "")
        else:
            yield "numbers: micro-batches"
        if self.num_chunks > 1 and self.is_coloured:
            yield "later stages of a device are paler"
        elif self.num_chunks == 2:
            yield "lower case: a device's second stage"
        if self.has_whole_backward:
            yield "on stage 0, whose input needs no gradient, W is the whole backward"
        if self.columns < 1:
            yield "some actions are too short to be visible"

    def _label(self, box: ActionCell) -> str:
        letter = box.kind.value.lower() if self.num_chunks == 2 and box.chunk else box.kind.value
        return letter if box.kind is ActionKind.OPTIMIZER else f"{letter}{box.microbatch}"

    def _painted(self, row: Sequence[ActionCell]) -> Text:
        line = Text()
        for box in row:
            text = "O" if box.kind is ActionKind.OPTIMIZER else box.number if self.has_numbers else ""
            line.append(" " * (box.first - len(line)))
            line.append(text.ljust(box.width), style=_style(box.kind, box.chunk, self.num_chunks))
        return line


def _drawing_of(timeline: Timeline, column_s: float, is_coloured: bool) -> _Drawing:
    return _Drawing(
        rows=boxes_of(timeline, column_s),
        num_chunks=timeline.num_chunks,
        columns=_shortest_s(timeline) / column_s * (1 + _ROUNDING),
        is_coloured=is_coloured,
        has_whole_backward=has_whole_backward(timeline),
    )


def seconds_per_column(timeline: Timeline, num_columns: int) -> float:
    """The smallest scale at which the step fits and the shortest forward or backward has a whole number of columns."""
    least_s, shortest_s = timeline.step_s / num_columns, _shortest_s(timeline)
    columns = math.floor(shortest_s / least_s * (1 + _ROUNDING))
    return shortest_s / columns if columns else least_s


def _shortest_s(timeline: Timeline) -> float:
    """The shortest forward or backward longer than 0."""
    return min((x.duration_s for x in timeline.loop_spans if x.duration_s > 0), default=timeline.step_s)


def boxes_of(timeline: Timeline, column_s: float) -> list[list[ActionCell]]:
    """For each device its actions that take a column or more, from left to right."""
    rows: list[list[ActionCell]] = [[] for _ in range(timeline.num_devices)]
    for span in timeline.spans:
        first, end = (round(moment / column_s) for moment in (span.start_s, span.end_s))
        if end > first:
            rows[span.device].append(
                ActionCell(
                    first=first,
                    end=end,
                    kind=span.action.kind,
                    microbatch=span.action.microbatch,
                    chunk=timeline.chunks[span.action.stage],
                )
            )
    return rows


def axis(num_columns: int, column_s: float, step_s: float, time_text: Callable[[float], str]) -> str:
    """Times at round numbers, each beginning at its column.

    >>> axis(24, 0.5, 12.0, "{:g}".format)
    '0         5         10'
    """
    wanted_s = _TICK_COLUMNS * column_s
    power = 10.0 ** math.floor(math.log10(wanted_s))
    tick_s = next(x * power for x in (1, 2, 5, 10) if x * power >= wanted_s * (1 - _ROUNDING))
    line = ""
    for i in range(math.floor(step_s / tick_s * (1 + _ROUNDING)) + 1):
        column, text = round(i * tick_s / column_s), time_text(i * tick_s)
        if len(line) <= column <= num_columns - len(text):
            line = line.ljust(column) + text
    return line


def _filled(row: Sequence[ActionCell], text: Callable[[ActionCell], str], waiting: str) -> Text:
    """A line of boxes with these texts, filled with `waiting` between them."""
    line = ""
    for box in row:
        line = line.ljust(box.first, waiting) + text(box).ljust(box.width)
    return Text(line.rstrip())


def _style(kind: ActionKind, chunk: int, num_chunks: int) -> Style:
    look = of_chunk(ACTIONS[kind], chunk, num_chunks=num_chunks)
    return Style(color=look.text, bgcolor=look.colour)
