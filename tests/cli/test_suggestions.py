"""Options that a verb does not have: one line that says what it has instead."""

from __future__ import annotations

import pytest

from gplan.cli import main

TOLD = [
    (
        ("run", "--set", "dropout=0"),
        "run has no option --set: it belongs to the profile; run `gplan profile MODEL --set ...`",
    ),
    (("simulate", "--plan", "x.json"), "simulate has no option --plan: the file's name goes without one, as in `"),
    (("explain", "--plan=x.json"), "explain gplan.plan.json`"),
    (("verify", "--model", "x.py"), "has no option --model: the file's name goes without one"),
    (("verify", "--plan", "x.json"), "has no option --plan: the file's name goes without one"),
    (("verify", "--calibration"), "verify has no option --calibration; did you mean --calibrate? see "),
    (("show", "--run", "x.json"), "has no option --run: the file's name goes without one"),
    (("report", "--plan", "x.json"), "report FILE`"),
    (("balance", "--microbatch", "3"), "did you mean --microbatches or --microbatch-size? see "),
    (("balance", "--plan", "x.json"), "balance has no option --plan; did you mean --pin? see "),
    (("report", "-o", "x"), "report has no option -o; did you mean --output? see "),
    (("run", "-k", "3"), "run has no option -k; see "),
    (("--k", "3"), "has no option --k; see "),
]


@pytest.mark.parametrize(("arguments", "told"), TOLD, ids=lambda x: " ".join(x) if isinstance(x, tuple) else "")
def test_an_option_that_is_not_there_is_one_line_with_what_to_do(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], told: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    captured = capsys.readouterr()
    assert caught.value.code == 2
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert told in captured.err
