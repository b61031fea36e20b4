"""Tables of the terminal and lists of facts as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from gplan.core.units import percent_text
from gplan.reporting.page.facts import Fact
from gplan.reporting.text.fitted_table import Column, FittedTable


def facts_list(facts: Iterable[Fact]) -> str:
    """Names with their values."""
    pairs = "\n".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts)
    return f'<dl class="facts">{pairs}</dl>'


def table(shown: FittedTable, *, shares: Sequence[float] = ()) -> str:
    """All columns and rows of a table without its title; `shares`, by row, are drawn as bars in the last column."""
    head = "".join(_cell("th", x, escape(f"{x.heading} {x.group}".strip())) for x in shown.columns)
    rows = [
        [_cell("td", column, escape(text)) for column, text in zip(shown.columns, line.cells, strict=True)]
        for line in shown.lines
    ]
    for row, share in zip(rows, shares, strict=False):
        row[-1] = _cell("td", shown.columns[-1], _bar(share))
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    below = f"<p>{escape(shown.below)}</p>" if shown.below else ""
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{below}'


def _cell(tag: str, column: Column, html: str) -> str:
    kind = ' class="text"' if column.is_left else ""
    return f"<{tag}{kind}>{html}</{tag}>"


def _bar(share: float) -> str:
    width = f"{100 * min(1.0, max(0.0, share)):.1f}%"
    return f'<span class="bar"><i style="width:{width}"></i></span><span class="value">{percent_text(share)}</span>'
