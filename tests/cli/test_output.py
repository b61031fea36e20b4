"""How wide tables are where no terminal says so."""

from __future__ import annotations

import pytest

from gplan.cli.output import print_result
from gplan.reporting.text.fitted_table import Column, FittedTable, Line

TABLE = FittedTable(
    title="t",
    columns=(Column(key="name", is_left=True, is_flexible=True), Column(key="number"), Column(key="spared")),
    lines=(Line(cells=("n" * 30, "1", "2" * 60)),),
    spare=("spared",),
)


@pytest.mark.parametrize(("columns", "width"), [("50", 50), ("", 120), ("0", 120), ("wide", 120), ("90", 90)])
def test_a_pipe_is_as_wide_as_columns_say(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: str, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    print_result(None, lambda: TABLE, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert any(x.startswith("left out in 50 columns: spared (set") for x in lines) == (width == 50)
