"""Tables that fit the width of the terminal.

Numbers are never cut. Columns that do not fit are dropped, the least needed first, and named below the table; then the
one flexible column, which holds names, is shortened. Columns can have a common head, such as "per step", above their
own. Long tables keep their first rows, or their first and last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

MOST_LINES = 60
_GAP = "  "
_NAMES_SHARE = 0.24  # of the width: names get this much before a spare column is kept
_LEAST_NAME_WIDTH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column; columns with the same `key` are dropped together, and the key names them below the table."""

    key: str
    title: str | None = None  # None: the key
    group: str = ""  # a head above neighbouring columns of the same group
    is_left: bool = False
    is_flexible: bool = False

    @property
    def heading(self) -> str:
        """The column's head."""
        return self.key if self.title is None else self.title


def columns(names: str, *numbers: str, group: str = "") -> tuple[Column, ...]:
    """The flexible column of names, and columns of numbers with a common head."""
    return (Column(key=names, is_left=True, is_flexible=True), *(Column(key=x, group=group) for x in numbers))


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One row: a cell for every column, and shorter forms of the flexible cell, the longest first."""

    cells: tuple[str, ...]
    shorter: tuple[str, ...] = ()
    style: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedTable:
    """A table that rich prints in any width; `spare` lists the keys that may be dropped, in this order.

    One column is flexible; `below` is printed under the table.
    """

    title: str
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    spare: tuple[str, ...] = ()
    below: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The title, the columns that fit, and which were left out."""
        widths = self._widths()
        kept = self._kept(widths, options.max_width)
        self._fit_names(widths, room=max(_LEAST_NAME_WIDTH, self._room(kept, widths, options.max_width)))
        yield Text(self.title, style="bold")
        if any(column.group for column in self.columns):
            yield Text(self._group_heads(kept, widths), style="dim", no_wrap=True, overflow="ellipsis")
        header = Line(cells=tuple(x.heading for x in self.columns), style="dim")
        for line in (header, *self.lines):
            yield Text(self._text(line, kept, widths), style=line.style, no_wrap=True, overflow="ellipsis")
        left_out = dict.fromkeys(column.key for i, column in enumerate(self.columns) if i not in kept)
        if self.below:
            yield Text(self.below, style="dim")
        if left_out:
            width = options.max_width
            text = f"left out in {width} columns: {', '.join(left_out)} (set COLUMNS={2 * width} to show more)"
            yield Text(text, style="dim")

    def _widths(self) -> list[int]:
        """The widths of all columns, wide enough for the heads of their groups."""
        widths = [
            max([cell_len(x.heading), *(cell_len(y.cells[i]) for y in self.lines)]) for i, x in enumerate(self.columns)
        ]
        for group, places in self._groups(range(len(widths))):
            widths[places[-1]] += max(0, len(group) - _span(places, widths)) if group else 0
        return widths

    def _groups(self, places: Iterable[int]) -> Iterator[tuple[str, list[int]]]:
        """Runs of columns with the same group."""
        for group, run in groupby(places, key=lambda i: self.columns[i].group):
            yield group, list(run)

    def _group_heads(self, kept: Sequence[int], widths: Sequence[int]) -> str:
        heads = []
        for group, places in self._groups(kept):
            width = _span(places, widths)
            head = f" {group} ".center(width, "─") if group and len(group) + 4 <= width else group[:width].center(width)
            heads.append(head)
        return _GAP.join(heads).rstrip()

    def _kept(self, widths: Sequence[int], width: int) -> list[int]:
        """All columns but the spare ones that have to be dropped to make room for the names."""
        kept = list(range(len(self.columns)))
        longest = max(x for x, column in zip(widths, self.columns, strict=True) if column.is_flexible)
        wanted = min(longest, max(_LEAST_NAME_WIDTH, int(_NAMES_SHARE * width)))
        for key in self.spare:
            if self._room(kept, widths, width) >= wanted:
                break
            kept = [i for i in kept if self.columns[i].key != key]
        return kept

    def _fit_names(self, widths: list[int], *, room: int) -> None:
        """Set the width of the flexible column to that of its forms that fit into `room`."""
        for i, column in enumerate(self.columns):
            if column.is_flexible:
                names = (fitted((line.cells[i], *line.shorter), room) for line in self.lines)
                widths[i] = max([cell_len(column.heading), *map(cell_len, names)])

    def _room(self, kept: Sequence[int], widths: Sequence[int], width: int) -> int:
        """Cells that the other columns leave for the flexible one."""
        return width - sum(widths[i] for i in kept if not self.columns[i].is_flexible) - len(_GAP) * (len(kept) - 1)

    def _text(self, line: Line, kept: Sequence[int], widths: Sequence[int]) -> str:
        return _GAP.join(self._cell(line, i, widths[i]) for i in kept).rstrip()

    def _cell(self, line: Line, index: int, width: int) -> str:
        column, text = self.columns[index], line.cells[index]
        if column.is_flexible:
            text = fitted((text, *line.shorter), width)
        padding = " " * (width - cell_len(text))
        return text + padding if column.is_left else padding + text


def _span(places: Sequence[int], widths: Sequence[int]) -> int:
    """The cells of neighbouring columns and the gaps between them."""
    return sum(widths[i] for i in places) + len(_GAP) * (len(places) - 1)


def fitted(forms: Sequence[str], width: int) -> str:
    """The first form of at most `width` characters, else the last one shortened.

    >>> fitted(("blocks.1 and 92 like it", "blocks.1 × 93"), 16)
    'blocks.1 × 93'
    """
    return next((form for form in forms if cell_len(form) <= width), None) or shortened(forms[-1], width)


def names_of_equal(first: str, count: int) -> tuple[str, ...]:
    """The name of a row for `count` equal layers by the first of them: the full text, then a shorter form."""
    return f"{first} and {count - 1} like it", f"{first} × {count}"


def shortened(name: str, width: int) -> str:
    """A name of at most `width` cells of a terminal, without its middle if it is longer.

    >>> shortened("transformer.encoder.layer.11", 16)
    'transfo…layer.11'
    """
    if cell_len(name) <= width:
        return name
    tail = width // 2
    first, last = set_cell_size(name, width - tail - 1), set_cell_size(name[::-1], tail)[::-1]
    return f"{first.rstrip()}…{last.lstrip()}"  # half a wide character would be a space


def limited(table: FittedTable, *, num_last: int, remedy: str) -> FittedTable:
    """The table with at most MOST_LINES lines, the last `num_last` kept; `remedy` says how to see the others."""
    num_left_out = len(table.lines) - (MOST_LINES - 1)
    if num_left_out <= 1:
        return table
    num_first = MOST_LINES - 1 - num_last
    gap = Line(cells=("…",) + ("",) * (len(table.columns) - 1), style="dim")
    lines = (*table.lines[:num_first], gap, *table.lines[len(table.lines) - num_last :])
    return replace(table, lines=lines, below=f"{num_left_out} more rows: {remedy}")


def note_lines(notes: Sequence[str]) -> list[Text]:
    """Notes for the reader, one line each."""
    return [Text(f"note: {note}", style="yellow") for note in notes]
