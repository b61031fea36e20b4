"""Tables that fit the width of the terminal.

Numbers are never cut. Columns that do not fit are dropped, the least needed first, and named below the table; then the
one flexible column, which holds names, is shortened. Columns can have a common head, such as "per step", above their
own. Long tables keep their first rows, or their first and last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

MOST_LINES = 60
_GAP = "  "
_NAMES_SHARE = 0.24  # of the width: names get this much before a spare column is kept
_LEAST_NAME_WIDTH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One row: a text for every column, and shorter forms of the flexible one, the longest first."""

    cells: Mapping[str, str]
    shorter: tuple[str, ...] = ()
    style: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedTable:
    """A table that rich prints in any width; its columns are those of the first line.

    Each column has a key, which is its head unless `heads` has another one.
    """

    title: str
    lines: tuple[Line, ...]
    flexible: str = ""  # the column of names; "": the first one
    left: Sequence[str] = ()  # further columns whose text begins at the left
    heads: Mapping[str, str] = field(default_factory=dict)
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)  # a common head above neighbouring columns
    spare: Sequence[str] = ()  # columns that may be dropped, in this order
    below: str = ""  # printed under the table
    legend: Mapping[str, str] = field(
        default_factory=dict
    )  # what a column means, printed under the table if it is shown

    @property
    def keys(self) -> tuple[str, ...]:
        """The columns."""
        return tuple(self.lines[0].cells) if self.lines else ()

    def head(self, key: str) -> str:
        """The head of a column."""
        return self.heads.get(key, key)

    def group(self, key: str) -> str:
        """The common head of a column and its neighbours; "" if it has none."""
        return next((name for name, keys in self.groups.items() if key in keys), "")

    def notes_below(self, kept: Sequence[str]) -> list[str]:
        """What is printed under the table where these columns are shown: `below`, and a line with the legend."""
        legend = "; ".join(f"{self.head(key)}: {words}" for key, words in self.legend.items() if key in kept)
        return [x for x in (self.below, legend) if x]

    def is_left(self, key: str) -> bool:
        """Whether a column's text begins at the left."""
        return key == self._names or key in self.left

    @property
    def _names(self) -> str:
        return self.flexible or self.keys[0]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The title, the columns that fit, and which were left out."""
        yield Text(self.title, style="bold")
        if self.lines:
            yield from self._body(options.max_width)

    def _body(self, width: int) -> RenderResult:
        names, kept = self._names, list(self.keys)
        widths = {x: max(cell_len(self.head(x)), *(cell_len(y.cells[x]) for y in self.lines)) for x in kept}
        for group, run in groupby(list(kept), key=self.group):
            *_, last = keys = list(run)
            widths[last] += max(0, len(group) - _span(keys, widths))

        def room() -> int:
            """Cells that the other columns leave for the names."""
            return width - _span(kept, widths) + widths[names]

        wanted = min(widths[names], max(_LEAST_NAME_WIDTH, int(_NAMES_SHARE * width)))
        for key in self.spare:
            if room() < wanted and key in kept:
                kept.remove(key)
        most = max(_LEAST_NAME_WIDTH, room())
        shown = [fitted((line.cells[names], *line.shorter), most) for line in self.lines]
        widths[names] = max(cell_len(self.head(names)), *map(cell_len, shown))
        if any(self.groups):
            heads = [_group_head(group, _span(list(run), widths)) for group, run in groupby(kept, key=self.group)]
            yield Text(_GAP.join(heads).rstrip(), style="dim", no_wrap=True, overflow="ellipsis")
        rows = [({x: self.head(x) for x in kept}, "dim")]
        rows += [({**x.cells, names: name}, x.style) for x, name in zip(self.lines, shown, strict=True)]
        for cells, style in rows:
            texts = []
            for key in kept:
                padding = " " * (widths[key] - cell_len(cells[key]))
                texts.append(cells[key] + padding if self.is_left(key) else padding + cells[key])
            yield Text(_GAP.join(texts).rstrip(), style=style, no_wrap=True, overflow="ellipsis")
        yield from (Text(x, style="dim") for x in self.notes_below(kept))
        if left_out := [key for key in self.keys if key not in kept]:
            more = f"set COLUMNS={2 * width} to show more"
            yield Text(f"left out in {width} columns: {', '.join(left_out)} ({more})", style="dim")


def _span(keys: Sequence[str], widths: Mapping[str, int]) -> int:
    """The cells of neighbouring columns and the gaps between them."""
    return sum(widths[x] for x in keys) + len(_GAP) * (len(keys) - 1)


def _group_head(group: str, width: int) -> str:
    return f" {group} ".center(width, "─") if group and len(group) + 4 <= width else group[:width].center(width)


def fitted(forms: Sequence[str], width: int) -> str:
    """The first form of at most `width` characters, else the last one shortened.

    >>> fitted(("blocks.1 and 92 like it", "blocks.1 × 93"), 16)
    'blocks.1 × 93'
    """
    return next((form for form in forms if cell_len(form) <= width), None) or shortened(forms[-1], width)


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
    gap = Line(cells={x: "…" if x == table.keys[0] else "" for x in table.keys}, style="dim")
    lines = (*table.lines[:num_first], gap, *table.lines[len(table.lines) - num_last :])
    return replace(table, lines=lines, below=f"{num_left_out} more rows: {remedy}")


def note_lines(notes: Sequence[str]) -> list[Text]:
    """Notes for the reader, one line each."""
    return [Text(f"note: {note}", style="yellow") for note in notes]
