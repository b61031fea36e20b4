"""Tables and progress where there is no terminal."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gplan.cli import output
from gplan.cli.output import print_result, progress_bar
from gplan.reporting.text.fitted_table import FittedTable, Line

TABLE = FittedTable(
    title="t",
    lines=(Line(cells={"name": "n" * 30, "number": "1", "spared": "2" * 60}),),
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


def test_progress_goes_to_a_log_as_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = iter([0.0, 10.0, 31.0, 40.0, 62.0])
    monkeypatch.setattr(output, "time", SimpleNamespace(monotonic=lambda: next(now_s)))
    with progress_bar() as progress:
        for number in range(4):
            progress(f"round {number}", number / 4)
    found = capsys.readouterr()
    assert found.err.splitlines() == ["25% done after 31.0 s: round 1", "75% done after 62.0 s: round 3"]
    assert not found.out


def test_progress_is_of_one_rank(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(output, "_LINE_S", 0.0)
    with progress_bar() as progress:
        progress("round 1", 0.5)
    assert not capsys.readouterr().err
