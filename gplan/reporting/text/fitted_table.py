"""Tables that fit the terminal they are printed on.

Numbers are never cut. What does not fit is dropped whole, the least needed columns first, and said below the table;
then the one flexible column, which holds names, gets shorter forms. Long tables keep their first or their outer rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from gplan.core import Link
from gplan.core.units import bytes_text, seconds_text

MOST_LINES = 60
_GAP = "  "
_WANTED_SHARE = 0.24  # of the width for names, before columns are kept rather than names whole
_LEAST = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column; `key` names it among those that are left out, columns of one key together."""

    key: str
    title: str | None = None  # None: the key
    is_left: bool = False
    is_flexible: bool = False

    @property
    def heading(self) -> str:
        """What stands above the column."""
        return self.key if self.title is None else self.title


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One row: a cell for every column, and shorter forms of the flexible one, the longest first."""

    cells: tuple[str, ...]
    shorter: tuple[str, ...] = ()
    style: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedTable:
    """A table that rich prints in whatever width it is given; `spare` names columns, the first to go first.

    One column is flexible; `below` is said under the table.
    """

    title: str
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    spare: tuple[str, ...] = ()
    below: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The title, the columns that fit, and what was left out."""
        widths = [
            max([cell_len(x.heading), *(cell_len(y.cells[i]) for y in self.lines)]) for i, x in enumerate(self.columns)
        ]
        kept = self._kept(widths, options.max_width)
        self._fit_names(widths, room=max(_LEAST, self._room(kept, widths, options.max_width)))
        yield Text(self.title, style="bold")
        header = Line(cells=tuple(x.heading for x in self.columns), style="dim")
        for line in (header, *self.lines):
            yield Text(self._text(line, kept, widths), style=line.style, no_wrap=True, overflow="ellipsis")
        left_out = dict.fromkeys(column.key for i, column in enumerate(self.columns) if i not in kept)
        if self.below:
            yield Text(self.below, style="dim")
        if left_out:
            yield Text(f"left out in {options.max_width} columns: {', '.join(left_out)}", style="dim")

    def _kept(self, widths: Sequence[int], width: int) -> list[int]:
        """All columns, less the spare ones until the names have room."""
        kept = list(range(len(self.columns)))
        longest = max(x for x, column in zip(widths, self.columns, strict=True) if column.is_flexible)
        wanted = min(longest, max(_LEAST, int(_WANTED_SHARE * width)))
        for key in self.spare:
            if self._room(kept, widths, width) >= wanted:
                break
            kept = [i for i in kept if self.columns[i].key != key]
        return kept

    def _fit_names(self, widths: list[int], *, room: int) -> None:
        """Set the flexible column's width to what its forms need within `room`."""
        for i, column in enumerate(self.columns):
            if column.is_flexible:
                names = (fitted((line.cells[i], *line.shorter), room) for line in self.lines)
                widths[i] = max([cell_len(column.heading), *map(cell_len, names)])

    def _room(self, kept: Sequence[int], widths: Sequence[int], width: int) -> int:
        """Cells that the other columns leave to the flexible one."""
        return width - sum(widths[i] for i in kept if not self.columns[i].is_flexible) - len(_GAP) * (len(kept) - 1)

    def _text(self, line: Line, kept: Sequence[int], widths: Sequence[int]) -> str:
        return _GAP.join(self._cell(line, i, widths[i]) for i in kept).rstrip()

    def _cell(self, line: Line, index: int, width: int) -> str:
        column, text = self.columns[index], line.cells[index]
        if column.is_flexible:
            text = fitted((text, *line.shorter), width)
        padding = " " * (width - cell_len(text))
        return text + padding if column.is_left else padding + text


def fitted(forms: Sequence[str], width: int) -> str:
    """The first form of at most `width` characters, else the last one shortened.

    >>> fitted(("blocks.1 and 92 alike", "blocks.1 × 93"), 16)
    'blocks.1 × 93'
    """
    return next((form for form in forms if cell_len(form) <= width), None) or shortened(forms[-1], width)


def shortened(name: str, width: int) -> str:
    """A name of at most `width` characters, its middle left out.

    >>> shortened("transformer.encoder.layer.11", 16)
    'transfo…layer.11'
    """
    if len(name) <= width:
        return name
    tail = width // 2
    return f"{name[: width - tail - 1]}…{name[-tail:]}"


def limited(table: FittedTable, *, num_last: int, remedy: str) -> FittedTable:
    """The table with at most MOST_LINES lines, `num_last` of them from its end; it says what shows the others."""
    num_left_out = len(table.lines) - (MOST_LINES - 1)
    if num_left_out <= 1:
        return table
    num_first = MOST_LINES - 1 - num_last
    gap = Line(cells=("…",) + ("",) * (len(table.columns) - 1), style="dim")
    lines = (*table.lines[:num_first], gap, *table.lines[len(table.lines) - num_last :])
    return replace(table, lines=lines, below=f"{num_left_out} more rows: {remedy}")


# Lines that several views have below their tables.


def note_lines(notes: Sequence[str]) -> list[Text]:
    """What a reader must know, a line each."""
    return [Text(f"note: {note}", style="yellow") for note in notes]


def link_text(link: Link) -> str:
    """A link's latency, rate and origin."""
    points = f" at {len(link.points)} sizes" if link.points else ""
    return f"{seconds_text(link.latency_s)} + {bytes_text(link.bytes_per_s)}/s ({link.origin}{points})"
