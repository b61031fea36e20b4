"""Options that a verb does not have: one line that says what it has instead."""

from __future__ import annotations

import pytest

from gplan.cli import main

SUGGESTIONS = [
    (
        ("run", "--set", "dropout=0"),
        "error: gplan run has no option --set: it belongs to the profile; run `gplan profile MODEL --set ...`",
    ),
    (("simulate", "--plan", "x.json"), "simulate has no option --plan; did you mean --link? see gplan simulate --help"),
    (("balance", "--microbatch", "3"), "did you mean --microbatches or --microbatch-size? see "),
    (("balance", "--plan", "x.json"), "balance has no option --plan; did you mean --pin? see "),
    (("run", "-k", "3"), "run has no option -k; see "),
    (("--k", "3"), "has no option --k; see "),
]


@pytest.mark.parametrize(
    ("arguments", "message"), SUGGESTIONS, ids=lambda x: " ".join(x) if isinstance(x, tuple) else ""
)
def test_unknown_option_gets_a_suggestion(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    captured = capsys.readouterr()
    assert caught.value.code == 2
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert message in captured.err
