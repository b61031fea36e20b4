"""Help pages: every verb has one with examples, and printing it imports neither the planner nor a heavy library."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from typing import get_args

import click
import pytest

import gplan
from gplan.cli import main
from gplan.cli.balance import balance
from gplan.cli.exchange import export
from gplan.cli.run import run
from gplan.cli.verbs import VERBS, cli
from gplan.cli.verify import verify
from gplan.core import RecomputeMode
from gplan.interop.export.exporters import FORMATS
from gplan.partition.solve import SOLVERS
from gplan.schedules.registry import SCHEDULES

IMPORTED = """
import sys
from gplan.cli import main
try:
    main(sys.argv[1:])
except SystemExit:
    print(*sorted(x for x in sys.modules if x.partition(".")[0] in ("gplan", "numpy", "msgspec", "rich", "torch", "pandas")))
"""


def help_text(capsys: pytest.CaptureFixture[str], *verb: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main([*verb, "--help"])
    assert not caught.value.code
    return capsys.readouterr().out


def option(command: click.Command, name: str) -> click.Option:
    return next(x for x in command.params if isinstance(x, click.Option) and name in x.opts)


@pytest.mark.parametrize("verb", VERBS)
def test_help_has_examples_and_json(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = help_text(capsys, verb)
    assert re.search(rf"Examples:\n    (torchrun .* -m )?gplan {verb}\s", text)
    assert "--json" in text


@pytest.mark.parametrize("verb", VERBS)
def test_help_fits_one_screen(verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    lines = help_text(capsys, verb).splitlines()
    assert len(lines) <= 45


@pytest.mark.parametrize(
    ("verb", "common", "advanced"),
    [
        ("profile", ("--set", "--device", "--output", "--help"), ("--granularity", "--contention")),
        ("balance", ("--k", "--memory", "--json"), ("--solver", "--pin")),
        ("run", ("--steps", "--resume"), ("--timeout",)),
    ],
)
def test_common_options_stand_before_the_advanced_ones(
    verb: str, common: tuple[str, ...], advanced: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    first, _, last = help_text(capsys, verb).partition("\nOptions:\n")[2].partition("\nAdvanced:\n")
    for names, there, elsewhere in ((common, first, last), (advanced, last, first)):
        for name in names:
            at_line_start = re.compile(rf"^  (-\w, )?{name}\b", re.MULTILINE)
            assert at_line_start.search(there) and not at_line_start.search(elsewhere)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_lists_each_option_once(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = help_text(capsys, verb)
    command = cli.get_command(click.Context(cli), verb)
    assert command is not None
    for x in (x for x in command.params if isinstance(x, click.Option)):
        assert len(re.findall(rf"^  (?:-+[-\w]+, )*{x.opts[-1]}(?![-\w])", text, re.MULTILINE)) == 1


def test_help_lists_every_verb_on_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    verbs = help_text(capsys).partition("Verbs:\n")[2].splitlines()
    assert [line.split()[0] for line in verbs] == list(VERBS)


@pytest.mark.parametrize(
    ("verb", "modules"),
    [
        ([], "gplan gplan.cli gplan.cli.verbs"),
        (
            ["balance"],
            "gplan gplan.cli gplan.cli.arguments gplan.cli.balance gplan.cli.output gplan.cli.verbs gplan.interop "
            "gplan.interop.receiver_table",
        ),
        (["report"], "gplan gplan.cli gplan.cli.arguments gplan.cli.output gplan.cli.results gplan.cli.verbs"),
    ],
)
def test_help_imports_no_planner(verb: list[str], modules: str) -> None:
    command = [sys.executable, "-c", IMPORTED, *verb, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == modules


def test_choices_are_those_of_the_library() -> None:
    choices = {name: option(balance, name).type.choices for name in ("--recompute", "--solver")}  # type: ignore[attr-defined]
    assert choices == {"--recompute": (*get_args(RecomputeMode), "auto"), "--solver": SOLVERS}
    assert option(export, "--to").type.choices == tuple(FORMATS)  # type: ignore[attr-defined]
    assert (option(balance, "--schedule").help or "").startswith(", ".join(SCHEDULES))


@pytest.mark.parametrize(("command", "function"), [(verify, gplan.verify), (run, gplan.run)])
def test_defaults_are_those_of_the_library(command: click.Command, function: object) -> None:
    parameters = inspect.signature(function).parameters  # type: ignore[arg-type]
    names = {"--steps": "num_steps", "--rounds": "num_rounds", "--timeout": "timeout_s", "--engine": "engine"}
    for name, parameter in names.items():
        if parameter in parameters:
            assert option(command, name).default == parameters[parameter].default
