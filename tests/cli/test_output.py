"""Tables and progress where there is no terminal."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gplan.cli import output
from gplan.cli.output import print_result, progress_bar
from gplan.reporting.text.fitted_table import FittedTable, Line
from gplan.strategy_search.planner import balance
from tests.made import make_profile

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


def test_interrupt_says_how_far_the_work_was() -> None:
    with (
        pytest.raises(KeyboardInterrupt, match=r"^25% done: round 1; no file was left half-written$"),
        progress_bar() as progress,
    ):
        progress("round 0", 0.125)
        progress("round 1", 0.25)
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt, match=r"^go on with --resume 7$"), progress_bar() as progress:
        progress("step 7", 0.5)
        raise KeyboardInterrupt("go on with --resume 7")


@pytest.mark.parametrize(("schedule", "told"), [("1f1b", "no plan yet"), ("auto", "no plan yet; bounding . settings")])
def test_interrupt_before_a_plan_was_found_says_so(schedule: str, told: str) -> None:
    def interrupting(text: str, share: float) -> None:
        progress(text, share)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match=rf"^0% done: {told}; no file"), progress_bar() as progress:
        balance(make_profile([1.0] * 4), num_devices=2, schedule=schedule, num_microbatches=4, progress=interrupting)
