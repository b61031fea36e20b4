"""`gplan show` as a person uses it."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import gplan
from gplan.cli import main
from tests.made import make_profile
from tests.reporting.subjects import make_plan, make_run


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with two profiles, a plan and a run."""
    monkeypatch.chdir(tmp_path)
    gplan.save(make_profile([1.0, 2.0], microbatch_sizes=(1, 2)), "gplan.profile.json")
    gplan.save(make_profile([1.0, 3.0], microbatch_sizes=(1, 2)), "new.json")
    gplan.save(make_plan(), "plan.json")
    gplan.save(make_run(), "run.json")
    return tmp_path


def gplan_exits(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    return int(caught.value.code or 0)


@pytest.mark.parametrize(
    ("arguments", "first"),
    [
        ((), "made, micro-batch size 2: times and bytes per micro-batch"),
        (
            ("--microbatch-size", "1", "--sort", "order", "--all"),
            "made, micro-batch size 1: times and bytes per micro-batch",
        ),
        (("plan.json",), "made: 4 stages, 1f1b, 8 micro-batches of 1, recompute never"),
        (("run.json",), "predicted versus measured, engine torch"),
    ],
)
def test_show_prints_whatever_a_file_holds_and_writes_nothing(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], first: str
) -> None:
    before = {x.name: x.read_bytes() for x in here.iterdir()}
    assert gplan_exits("show", *arguments) == 0
    assert capsys.readouterr().out.splitlines()[0] == first
    assert {x.name: x.read_bytes() for x in here.iterdir()} == before


def test_show_puts_the_dearest_layer_first(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, names in (((), ["b", "a"]), (("--sort", "order"), ["a", "b"])):
        assert gplan_exits("show", *arguments) == 0
        assert [line[0] for line in capsys.readouterr().out.splitlines()[2:4]] == names


@pytest.mark.parametrize("name", ["gplan.profile.json", "plan.json", "run.json"])
def test_show_as_json_is_the_file_itself(here: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert gplan_exits("show", name, "--json") == 0
    assert capsys.readouterr().out.encode() == Path(name).read_bytes()


MISTAKES: list[tuple[tuple[str, ...], int, str]] = [
    (("show", "absent.json"), 3, "absent.json is not there; expected a gplan profile, plan, run or verification"),
    (("show", "--microbatch-size", "8"), 2, "no micro-batch size 8; expected --microbatch-size 1 or 2"),
    (("show", "plan.json", "--all"), 2, "plan.json is a plan; --sort, --microbatch-size and --all are for profiles"),
    (("show", "run.json", "--sort", "cost"), 2, "run.json is a run; --sort"),
    (("show", "--sort", "name"), 2, "'cost', 'order', 'memory'"),
]


@pytest.mark.parametrize(
    ("arguments", "code", "told"), MISTAKES, ids=lambda x: " ".join(x) if isinstance(x, tuple) else ""
)
def test_a_mistake_is_one_message_with_its_exit_code(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, told: str
) -> None:
    assert gplan_exits(*arguments) == code
    captured = capsys.readouterr()
    assert told in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("verb", [("show",), ("show", "--json")])
def test_a_reader_that_leaves_early_is_no_failure(here: Path, verb: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "gplan", *verb]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def in_a_terminal(*arguments: str, **environment: str) -> str:
    """What a colour terminal of 80 columns receives."""
    reader, writer = pty.openpty()
    command = [sys.executable, "-m", "gplan", *arguments]
    inherited = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    given = {**inherited, "TERM": "xterm-256color", "COLUMNS": "80", **environment}
    done = subprocess.run(command, stdin=writer, stdout=writer, env=given, check=True, timeout=60)
    assert done.returncode == 0
    os.close(writer)
    with open(reader, "rb", buffering=0) as terminal:
        return b"".join(iter(lambda: _read(terminal.fileno()), b"")).decode()


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:  # Linux says so at the end of a terminal
        return b""


def test_notes_are_yellow_in_a_terminal_and_no_color_is_heeded(here: Path) -> None:
    profile = gplan.load("gplan.profile.json")
    gplan.save(replace(profile, notes=("half measured",)), "gplan.profile.json")  # type: ignore[type-var]
    assert "\x1b[33m" in in_a_terminal("show")
    plain = in_a_terminal("show", NO_COLOR="1")
    assert "half measured" in plain
    assert "\x1b[33m" not in plain
