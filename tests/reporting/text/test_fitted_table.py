"""Tables in any width: what is dropped, what is shortened, what is cut, and that it is said."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from gplan.reporting.text.fitted_table import MOST_LINES, FittedTable, Line, limited, shortened
from tests.reporting.text.printed import printed


def table(name: str, *, shorter: tuple[str, ...] = (), title: str = "t") -> FittedTable:
    """A name beside two numbers of 9 cells, of which `most spare` goes first."""
    lines = (Line(cells={"layer": name, "spare": "1.23 ms", "most spare": "12.3 MiB"}, shorter=shorter),)
    return FittedTable(title=title, lines=lines, spare=("most spare", "spare"))


def test_where_all_fits_all_is_shown() -> None:
    assert printed(table("blocks.1"), width=40) == [
        "t",
        "layer       spare  most spare",
        "blocks.1  1.23 ms    12.3 MiB",
    ]


def test_the_most_spare_column_goes_first_and_is_named_below() -> None:
    lines = printed(table("blocks.1"), width=25)
    assert lines == [
        "t",
        "layer       spare",
        "blocks.1  1.23 ms",
        "left out in 25 columns:",
        "most spare (set",
        "COLUMNS=50 to show more)",
    ]


def test_columns_with_a_common_head_or_another_one() -> None:
    lines = (Line(cells={"layer": "a", "forward": "1 ms", "backward": "2 ms", "noise": "3 %"}),)
    table = FittedTable(title="t", lines=lines, heads={"noise": "±"}, groups={"per step": ("forward", "backward")})
    assert printed(table) == [
        "t",
        "       ──── per step ───",
        "layer  forward  backward    ±",
        "a         1 ms      2 ms  3 %",
    ]


def test_the_name_takes_the_longest_form_that_fits() -> None:
    forms = ("blocks.4 … blocks.94, 91 layers like blocks.1", "91 layers like blocks.1", "91 like blocks.1")
    for width, form in ((80, forms[0]), (50, forms[1])):
        assert printed(table(forms[0], shorter=forms[1:]), width=width)[2].startswith(form + "  ")


@given(width=st.integers(min_value=20, max_value=200), length=st.integers(min_value=1, max_value=120))
def test_no_line_is_wider_than_the_terminal_and_no_number_is_cut(width: int, length: int) -> None:
    lines = printed(table("n" * length), width=width)
    assert all(len(line) <= width for line in lines)
    row = next(line for line in lines if line.startswith("n"))
    assert row.split()[1:] in ([], ["1.23", "ms"], ["1.23", "ms", "12.3", "MiB"])


def test_a_name_that_looks_like_markup_is_printed_as_it_is() -> None:
    lines = printed(table("layers[0].[bold]x[/bold]", title="[red]m[/red]"), width=60)
    assert lines[0] == "[red]m[/red]"
    assert lines[2].startswith("layers[0].[bold]x[/bold]")


def test_a_wide_character_counts_as_the_two_cells_it_takes() -> None:
    assert printed(table("層" * 12), width=60)[2] == "層" * 12 + "  1.23 ms    12.3 MiB"


def long_table(count: int) -> FittedTable:
    return FittedTable(title="t", lines=tuple(Line(cells={"layer": str(i), "x": "x"}) for i in range(count)))


def test_a_table_of_the_most_lines_is_not_cut() -> None:
    table = long_table(MOST_LINES)
    assert limited(table, num_last=0, remedy="--all") is table


@pytest.mark.parametrize("num_last", [0, 20])
@pytest.mark.parametrize("count", [MOST_LINES + 1, 1663])
def test_a_longer_one_shows_where_lines_are_missing_and_says_how_many(count: int, num_last: int) -> None:
    found = limited(long_table(count), num_last=num_last, remedy="--all")
    assert len(found.lines) == MOST_LINES
    gap = MOST_LINES - 1 - num_last
    assert found.lines[gap].cells == {"layer": "…", "x": ""}
    kept = [int(line.cells["layer"]) for i, line in enumerate(found.lines) if i != gap]
    assert kept == [*range(gap), *range(count - num_last, count)]
    assert printed(found)[-1] == f"{count - len(kept)} more rows: --all"


@given(st.text(alphabet="abc.", max_size=40), st.integers(min_value=4, max_value=40))
def test_a_shortened_name_keeps_its_ends(name: str, width: int) -> None:
    short = shortened(name, width)
    assert len(short) <= width
    head, _, tail = short.partition("…")
    assert name.startswith(head) and name.endswith(tail)


@pytest.mark.parametrize(("name", "short"), [("层" * 10, "层层层…层层层层"), ("层" * 8, "层" * 8)])
def test_a_name_of_wide_characters_is_shortened_by_its_width(name: str, short: str) -> None:
    assert shortened(name, 16) == short
    assert cell_len(short) <= 16
