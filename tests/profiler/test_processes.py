"""Jobs of several processes: the cause of a failure is reported, and no process is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from gplan.core.errors import ModelError, RunError
from gplan_profiler.host.heartbeat import HeartbeatStatus, heartbeat_file, read_heartbeat
from gplan_profiler.host.host_info import core_shares
from gplan_profiler.host.processes import run_processes

PROGRAM = """
import os, signal, subprocess, sys, time
from pathlib import Path
from gplan.core.errors import ModelError, RunError
from gplan_profiler.host.heartbeat import Heartbeat, heartbeat_file
from gplan.core import ActionKind
from gplan_profiler.host.processes import end_with_parent, report_error, print_stack_on_signal
end_with_parent()
print_stack_on_signal()
what, rank = sys.argv[1], int(os.environ["RANK"])
signals = {x.name: x for x in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
notes = Heartbeat(heartbeat_file(Path(os.environ["NOTES"]), rank), stage=rank)
LOST = "RuntimeError: [gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:5514"

def start_worker():
    subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(1000)"])

def begin():
    notes.enter_step(3)
    notes.enter_action(ActionKind.FORWARD, rank, 2)
    notes.enter_layer(rank)

def wait_for_neighbour():
    notes.enter_wait("neighbours")
    time.sleep(1000)

def hang():
    time.sleep(1000)

if what == "talk":
    print(f"rank {rank} of {os.environ['WORLD_SIZE']}", flush=True)
elif what == "explain" and rank == 1:
    report_error(ModelError("the cause\\non two lines"))
    sys.exit(3)
elif what == "break" and rank == 1:
    print("last words", file=sys.stderr, flush=True)
    sys.exit(7)
elif what in signals:
    print("some output", flush=True)
    begin()
    if rank == 1:
        os.kill(os.getpid(), signals[what])
        time.sleep(1000)
    wait_for_neighbour()
elif what in ("kill", "stop", "crash"):
    begin()
    start_worker()
    if rank == 1:
        if what == "crash":
            import faulthandler; faulthandler._sigsegv()
        os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)
    else:
        wait_for_neighbour()
elif what == "lose":  # the neighbour speaks before the one that dies
    begin()
    if rank == 1:
        time.sleep(0.7)
        os.kill(os.getpid(), signal.SIGKILL)
    report_error(RunError(LOST))
    sys.exit(5)
elif what == "hang":
    begin()
    hang() if rank == 1 else wait_for_neighbour()
elif what == "creep":  # longer than the timeout, but never silent for as long
    for step in range(8):
        notes.enter_step(step)
        print(step, flush=True)
        time.sleep(0.25)
elif what == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    start_worker()
    print("ready", flush=True)
    time.sleep(1000)
elif what == "work":
    start_worker()
    print("ready", flush=True)
else:
    time.sleep(1000)
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that the processes run; its name shows in their command lines."""
    name = f"job_{os.getpid()}_{tmp_path.name[-8:].replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("NOTES", str(tmp_path))
    return name


def running(text: str) -> list[int]:
    """The processes of this host whose environment, and so that of the ones that they started, holds a text."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if text.encode() in entry.read_bytes() and int(entry.parent.name) != os.getpid():
                found.append(int(entry.parent.name))
    return found


def wait_until_gone(text: str) -> None:
    deadline_s = time.monotonic() + 10.0
    while running(text) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert running(text) == []


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """Where the ranks leave their notes; after the test no process is left that knows it."""
    yield tmp_path
    wait_until_gone(f"NOTES={tmp_path}")


def test_every_rank_is_heard(program: str) -> None:
    heard: list[tuple[int, str]] = []
    run_processes(
        program, ["talk"], num_processes=3, timeout_s=30.0, on_line=lambda rank, line: heard.append((rank, line))
    )
    assert sorted(heard) == [(rank, f"rank {rank} of 3") for rank in range(3)]


def test_reported_error_keeps_its_class(program: str, place: Path) -> None:
    with pytest.raises(ModelError, match=r"(?s)rank 1: the cause\non two lines"):
        run_processes(program, ["explain"], num_processes=2, timeout_s=30.0)


def test_last_output_of_a_failed_rank_is_quoted(program: str, place: Path) -> None:
    with pytest.raises(RunError, match=r"(?s)rank 1 ended with code 7.*last words"):
        run_processes(program, ["break"], num_processes=2, timeout_s=30.0)


def test_silence_ends_the_job(program: str, place: Path) -> None:
    with pytest.raises(RunError, match=r"for 2 s; .*hangs"):
        run_processes(program, ["sleep"], num_processes=2, timeout_s=2.0)


def look(place: Path, rank: int) -> HeartbeatStatus | None:
    return read_heartbeat(heartbeat_file(place, rank), ["front", "back"])


def failure(program: str, what: str, place: Path, *, timeout_s: float = 30.0) -> str:
    """What is told of two processes that fail in one way."""
    with pytest.raises(RunError) as caught:
        run_processes(program, [what], num_processes=2, timeout_s=timeout_s, status_of=partial(look, place))
    return str(caught.value)


def test_killed_rank_is_reported_with_place(program: str, place: Path) -> None:
    told = failure(program, "kill", place)
    assert "rank 1 was ended by SIGKILL" in told
    assert "in step 4, forward of micro-batch 2 on stage 1, layer back" in told


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_rank_ended_by_a_signal_is_one_sentence(program: str, place: Path, name: str) -> None:
    told = failure(program, name, place)
    assert (
        told
        == f"rank 1 was ended by {name} in step 4, forward of micro-batch 2 on stage 1, layer back; the other ranks were ended"
    )


def test_stopped_rank_is_reported(program: str, place: Path) -> None:
    told = failure(program, "stop", place)
    assert "rank 1 was stopped by SIGSTOP in step 4, forward of micro-batch 2 on stage 1, layer back" in told


def test_crash_is_reported_with_line(program: str, place: Path) -> None:
    told = failure(program, "crash", place)
    assert "rank 1 was ended by SIGSEGV in step 4" in told
    assert re.search(rf"{program}.py, line \d+", told)


def test_lost_connection_is_not_the_cause(program: str, place: Path) -> None:
    assert "rank 1 was ended by SIGKILL" in failure(program, "lose", place)


def test_hang_names_rank_and_line(program: str, place: Path) -> None:
    told = failure(program, "hang", place, timeout_s=1.0)
    assert "rank 1 hangs in step 4, forward of micro-batch 2 on stage 1, layer back" in told
    assert re.search(rf"{program}.py, line \d+", told)
    assert "rank 0" not in told


def said(program: str, what: str, place: Path, *, timeout_s: float) -> list[str]:
    """What one watched process says until it ends."""
    lines: list[str] = []
    run_processes(
        program,
        [what],
        num_processes=1,
        timeout_s=timeout_s,
        status_of=partial(look, place),
        on_line=lambda _, line: lines.append(line),
    )
    return lines


def test_progress_is_no_hang(program: str, place: Path) -> None:
    assert said(program, "creep", place, timeout_s=1.5) == [str(step) for step in range(8)]


def test_slow_imports_are_no_hang(program: str, place: Path) -> None:
    assert said(program, "talk", place, timeout_s=0.01) == ["rank 0 of 1"]


def test_rank_ignoring_sigterm_is_killed_with_workers(program: str, place: Path) -> None:
    def fail(_rank: int, line: str) -> None:
        raise ZeroDivisionError(line)  # as a callback of the user's may

    with pytest.raises(ZeroDivisionError, match="ready"):
        run_processes(program, ["deaf"], num_processes=1, timeout_s=30.0, on_line=fail)


def test_orphaned_workers_are_ended(program: str, place: Path) -> None:
    assert said(program, "work", place, timeout_s=30.0) == ["ready"]
    wait_until_gone(f"NOTES={place}")


def start_job(program: str, place: Path) -> tuple[subprocess.Popen[bytes], list[int]]:
    """A process that runs a job of two that sleep, and those two."""
    script = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background ignores it
        "from gplan_profiler.host.processes import run_processes\n"
        f"run_processes({program!r}, ['sleep'], num_processes=2, timeout_s=99)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
    deadline_s = time.monotonic() + 20.0
    while len(list(place.glob("rank-*.where"))) < 2 and time.monotonic() < deadline_s:
        time.sleep(0.1)
    children = [pid for pid in running(f"NOTES={place}") if pid != parent.pid]
    assert len(children) == 2
    return parent, children


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ranks_end_with_their_supervisor(program: str, place: Path, number: signal.Signals) -> None:
    parent, _ = start_job(program, place)
    parent.send_signal(number)
    parent.wait(timeout=20)


def test_sigterm_ends_the_ranks_before_the_supervisor(program: str, place: Path) -> None:
    parent, _ = start_job(program, place)
    parent.terminate()
    assert parent.wait(timeout=20) == 128 + signal.SIGTERM
    assert running(f"NOTES={place}") == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux wakes the children of a process that ends")
def test_stopped_rank_ends_with_supervisor(program: str, place: Path) -> None:
    parent, (first, _) = start_job(program, place)
    os.kill(first, signal.SIGSTOP)
    parent.kill()
    parent.wait(timeout=20)


def test_shares_of_the_cores_are_apart_while_there_are_enough() -> None:
    cores = len(os.sched_getaffinity(0))
    shares = core_shares(cores, num_threads=1)
    assert len(set().union(*shares)) == cores
    assert all(len(share) == 1 for share in core_shares(cores + 3, num_threads=1))
