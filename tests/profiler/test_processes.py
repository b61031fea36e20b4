"""Jobs of several processes: the cause of a failure is told, and nothing is left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gplan.errors import ModelError, RunError
from profiler.host.processes import core_shares, run_processes

PROGRAM = """
import os, sys, time
from gplan.errors import ModelError
from profiler.host.processes import end_with_parent, say_error
end_with_parent()
what, rank = sys.argv[1], int(os.environ["RANK"])
if what == "talk":
    print(f"rank {rank} of {os.environ['WORLD_SIZE']}", flush=True)
elif what == "explain" and rank == 1:
    say_error(ModelError("the cause\\non two lines"))
    sys.exit(3)
elif what == "break" and rank == 1:
    print("last words", file=sys.stderr, flush=True)
    sys.exit(7)
else:
    time.sleep(1000)
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that the processes run; its name shows in their command lines."""
    name = f"job_{os.getpid()}_{tmp_path.name[-8:].replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return name


def running(text: str) -> list[str]:
    """Command lines of this host's processes that hold a text."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in line and "pytest" not in line:
            found.append(line)
    return found


def wait_until_gone(text: str) -> None:
    deadline_s = time.monotonic() + 10.0
    while running(text) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert running(text) == []


def test_every_rank_is_heard(program: str) -> None:
    heard: list[tuple[int, str]] = []
    run_processes(
        program, ["talk"], num_processes=3, timeout_s=30.0, on_line=lambda rank, line: heard.append((rank, line))
    )
    assert sorted(heard) == [(rank, f"rank {rank} of 3") for rank in range(3)]


def test_the_cause_that_a_rank_gives_is_raised_as_what_it_is(program: str) -> None:
    with pytest.raises(ModelError, match=r"(?s)rank 1: the cause\non two lines"):
        run_processes(program, ["explain"], num_processes=2, timeout_s=30.0)
    wait_until_gone(program)


def test_a_rank_that_dies_without_a_word_is_quoted(program: str) -> None:
    with pytest.raises(RunError, match=r"(?s)rank 1 ended with code 7.*last words"):
        run_processes(program, ["break"], num_processes=2, timeout_s=30.0)
    wait_until_gone(program)


def test_silence_ends_the_job(program: str) -> None:
    with pytest.raises(RunError, match=r"for 2 s .*hangs"):
        run_processes(program, ["sleep"], num_processes=2, timeout_s=2.0)
    wait_until_gone(program)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_processes_end_with_the_one_that_started_them(program: str, number: signal.Signals) -> None:
    script = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background ignores it
        "from profiler.host.processes import run_processes\n"
        f"run_processes({program!r}, ['sleep'], num_processes=2, timeout_s=99)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
    deadline_s = time.monotonic() + 20.0
    while len(running(f"-m {program}")) < 2 and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert len(running(f"-m {program}")) == 2
    parent.send_signal(number)
    parent.wait(timeout=20)
    wait_until_gone(f"-m {program}")


def test_shares_of_the_cores_are_apart_while_there_are_enough() -> None:
    cores = len(os.sched_getaffinity(0))
    shares = core_shares(cores, num_threads=1)
    assert len(set().union(*shares)) == cores
    assert all(len(share) == 1 for share in core_shares(cores + 3, num_threads=1))
