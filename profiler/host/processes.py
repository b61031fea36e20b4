"""Several Python processes on this host as one job: started together, watched together, ended together.

The first to fail ends the others within moments; so does one that is stopped, a time-out, an interrupt, or an error of
the process that watches. Of several failures `profiler/host/failure.py` finds the cause. Nothing is left behind.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from gplan.core.errors import GplanError, RunError
from profiler.host.failure import RankError, RankReport, RankStatus, find_cause, hang, stopped

# MERGED profiler/host/processes.py
# A job of several processes, watched from outside: it has failed where one fails, is stopped, or where nothing moves.
#
# What a rank prints and what it notes of its heartbeat are signs of life. A rank that is silent may compute for long or
# wait for another, so only the silence of all counts, and only while this process itself was there to listen.


# One process of a job: started as the leader of a session of its own, heard, looked at, ended with all it started.
#
# What a process starts (the workers of a data loader) stays in its group, so that a signal to the group reaches them all,
# also after the leader is gone.


Hear = Callable[[int, str], None]
"""Called with (rank, line) for each line that a process prints, by a thread of its own."""


class Member:
    """A running process and the threads that read what it prints."""

    def __init__(self, rank: int, command: Sequence[str], environment: Mapping[str, str], *, hear: Hear) -> None:
        self.rank = rank
        self._hear = hear
        self._is_swept = False
        self._process = subprocess.Popen(
            [sys.executable, *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        streams = (self._process.stdout, self._process.stderr)
        self._readers = [threading.Thread(target=self._read, args=(stream,), daemon=True) for stream in streams]
        for reader in self._readers:
            reader.start()

    def poll(self) -> int | None:
        """The exit code, negative for a signal, or None while it runs; what it leaves behind is ended with it."""
        code = self._process.poll()
        if code is not None and not self._is_swept:
            self._is_swept = True
            self._signal_group(signal.SIGKILL)
        return code

    def stopped_by(self) -> signal.Signals | None:
        """The signal that stopped it, such as SIGSTOP; None while it goes on, and where the system does not tell."""
        if not hasattr(os, "waitid") or self.poll() is not None:
            return None
        with suppress(ChildProcessError):
            seen = os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
            return signal.Signals(seen.si_status) if seen is not None else None
        return None

    def tell(self, number: signal.Signals) -> None:
        """Send a signal to the process alone."""
        if self.poll() is None:
            self._process.send_signal(number)

    def ask_to_end(self) -> None:
        """Ask the process and all it started to end; who is stopped goes on, to hear it."""
        if self.poll() is None:
            self._signal_group(signal.SIGTERM)
            self._signal_group(signal.SIGCONT)

    def force_to_end(self) -> None:
        """End the process and all it started, whatever they do."""
        if self.poll() is None:
            self._signal_group(signal.SIGKILL)

    def wait(self, deadline_s: float) -> bool:
        """Wait until it has ended, or a moment of time.monotonic; whether it has."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline_s - time.monotonic()))
        return self.poll() is not None

    def is_read(self) -> bool:
        """Whether all that it printed was heard."""
        return not any(reader.is_alive() for reader in self._readers)

    def read_on(self, deadline_s: float) -> None:
        """Wait until all that it printed was heard, or a moment of time.monotonic."""
        for reader in self._readers:
            reader.join(timeout=max(0.0, deadline_s - time.monotonic()))

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self._process.pid})"

    def _signal_group(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):  # macOS: a group of none but zombies
            os.killpg(self._process.pid, number)

    def _read(self, stream: object) -> None:
        for line in stream:  # type: ignore[attr-defined]
            self._hear(self.rank, line.rstrip("\n"))


Look = Callable[[int], RankStatus | None]
"""Where a rank is, by its own notes; None where there are none."""

ERROR = "gplan-error: "
"""Begins the line by which a rank says why it fails."""

PARENT = "GPLAN_PARENT"
"""The variable that tells a rank the process that started it."""

STACK_SIGNAL = signal.SIGUSR1
"""Asks a rank to print its stack."""

_POLL_S = 0.05
_ABSENCE_S = 0.5  # a longer look away is no silence of the ranks
_END_GRACE_S = 2.0  # between asking a process to end and ending it
_CAUSE_GRACE_S = 2.0  # for the cause to show, where only ranks that lost another have spoken
_STOP_GRACE_S = 2.0  # a process may be stopped for so long
_STACK_GRACE_S = 0.5  # for a rank that hangs to print where
_START_S = 60.0  # silence that is no hang while a rank starts: a disk may be slow to give the imports
_NUM_KEPT_LINES = 60


class Job:
    """The processes of a job and what is known of them."""

    def __init__(
        self, num_processes: int, *, timeout_s: float, on_line: Callable[[int, str], None] | None, look: Look | None
    ) -> None:
        self._num_processes, self._timeout_s = num_processes, timeout_s
        self._on_line, self._look = on_line, look
        self._heard: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        self._members: list[Member] = []
        self._words: list[list[str]] = [[] for _ in range(num_processes)]
        self._errors: dict[int, RankError] = {}
        self._failed: list[int] = []  # the first first
        self._stopped_since_s: dict[int, float] = {}
        self._looked_s = self._moved_s = time.monotonic()

    def start(self, module: str, arguments: Sequence[str]) -> None:
        """One process per rank."""
        for rank in range(self._num_processes):
            environment = _environment(rank, self._num_processes)
            self._members.append(Member(rank, ["-m", module, *arguments], environment, hear=self._hear))

    def watch(self) -> None:
        """Until all have ended well; raises the cause otherwise."""
        while True:
            self._listen(_POLL_S)
            codes = self._codes()
            if self._failed:
                raise self._cause()
            if all(code == 0 for code in codes):
                self._hear_out()
                return
            self._mind_absence()
            self._check_stopped()
            self._check_silence()

    def end(self) -> str:
        """End what still runs, first asking, then forcing, also if interrupted meanwhile; names what is left,
        if any."""
        try:
            for member in self._members:
                member.ask_to_end()
            self._wait_for_end(_END_GRACE_S)
        finally:
            for member in self._members:
                member.force_to_end()
            left = self._wait_for_end(_END_GRACE_S)
        deadline_s = time.monotonic() + _END_GRACE_S
        for member in self._members:
            member.read_on(deadline_s)
        return ", ".join(map(str, left))

    def _wait_for_end(self, grace_s: float) -> list[Member]:
        """The processes that still run after all this time."""
        deadline_s = time.monotonic() + grace_s
        return [member for member in self._members if not member.wait(deadline_s)]

    def _hear(self, rank: int, line: str) -> None:
        self._heard.put((rank, line))

    def _listen(self, seconds: float) -> None:
        """Take in what was said; waits so long for the first line."""
        with suppress(queue.Empty):
            self._take_in(*self._heard.get(timeout=seconds))
            while True:
                self._take_in(*self._heard.get_nowait())

    def _take_in(self, rank: int, line: str) -> None:
        self._moved_s = time.monotonic()
        if line.startswith(ERROR):
            with suppress(ValueError):  # cut off, as its process was ended
                name, message = json.loads(line.removeprefix(ERROR))
                self._errors.setdefault(rank, RankError(name=name, message=message))
                self._note_failure(rank)
        self._words[rank] = [*self._words[rank][1 - _NUM_KEPT_LINES :], line]
        if self._on_line is not None:
            self._on_line(rank, line)

    def _hear_out(self) -> None:
        """The last lines of processes that have ended."""
        deadline_s = time.monotonic() + _END_GRACE_S
        for member in self._members:
            member.read_on(deadline_s)
        self._listen(0.0)

    def _codes(self) -> list[int | None]:
        codes = [member.poll() for member in self._members]
        for rank, code in enumerate(codes):
            if code:
                self._note_failure(rank)
        return codes

    def _note_failure(self, rank: int) -> None:
        if rank not in self._failed:
            self._failed.append(rank)

    def _cause(self) -> GplanError:
        """The cause, once it is certain or the ranks have had time to show it."""
        deadline_s = time.monotonic() + _CAUSE_GRACE_S
        while True:
            self._listen(_POLL_S)
            self._codes()
            reports = self._reports()
            cause = find_cause(reports)
            if (cause.weight.is_certain and self._is_read_out()) or time.monotonic() > deadline_s:
                return cause.error

    def _is_read_out(self) -> bool:
        """Whether all was heard that those said who have ended."""
        return self._heard.empty() and all(x.is_read() for x in self._members if x.poll() is not None)

    def _mind_absence(self) -> None:
        """A while in which this process itself was stopped or busy is no silence of the others."""
        now_s = time.monotonic()
        if (absent_s := now_s - self._looked_s) > _ABSENCE_S:
            self._moved_s = min(now_s, self._moved_s + absent_s)
            self._stopped_since_s.clear()
        self._looked_s = now_s

    def _check_stopped(self) -> None:
        now_s = time.monotonic()
        stopped_now = [member.rank for member in self._members if member.stopped_by() is not None]
        self._stopped_since_s = {rank: self._stopped_since_s.get(rank, now_s) for rank in stopped_now}
        for rank, since_s in self._stopped_since_s.items():
            if now_s - since_s > _STOP_GRACE_S:
                report = next(report for report in self._reports() if report.rank == rank)
                if report.stopped_by is not None:
                    raise stopped(report, stopped_s=now_s - since_s)

    def _check_silence(self) -> None:
        if time.monotonic() - self._moved_s <= self._timeout_s:
            return
        reports = self._reports()
        statuses = [report.status for report in reports if report.code is None]
        self._moved_s = max([self._moved_s, *(x.moved_s for x in statuses if x is not None)])
        is_starting = self._look is not None and any(x is None or x.is_starting for x in statuses)
        limit_s = max(self._timeout_s, _START_S) if is_starting else self._timeout_s
        if statuses and time.monotonic() - self._moved_s > limit_s:
            raise self._hang(reports, limit_s)

    def _hang(self, reports: Sequence[RankReport], silence_s: float) -> RunError:
        """The error of a job in which nothing moves, with the stacks of those that do not wait."""
        for report in reports:
            if report.code is None and report.status is not None and not report.status.is_waiting:
                self._words[report.rank].clear()
                self._members[report.rank].tell(STACK_SIGNAL)
        deadline_s = time.monotonic() + _STACK_GRACE_S
        while time.monotonic() < deadline_s:
            self._listen(_POLL_S)
        return hang([replace(x, words=tuple(self._words[x.rank])) for x in reports], silence_s=silence_s)

    def _reports(self) -> list[RankReport]:
        """What is known of every rank, those that failed first."""
        order = [*self._failed, *(rank for rank in range(self._num_processes) if rank not in self._failed)]
        return [self._report(self._members[rank]) for rank in order]

    def _report(self, member: Member) -> RankReport:
        return RankReport(
            rank=member.rank,
            code=member.poll(),
            stopped_by=member.stopped_by(),
            error=self._errors.get(member.rank),
            words=tuple(self._words[member.rank]),
            status=self._look(member.rank) if self._look is not None else None,
        )


def _environment(rank: int, num_processes: int) -> dict[str, str]:
    environment = {
        **os.environ,
        PARENT: str(os.getpid()),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_processes),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONFAULTHANDLER": "1",  # a crash prints the stack
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
    }
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host: nothing needs to leave it
    return environment


_PARENT_POLL_S = 0.5
_REQUESTS = (signal.SIGTERM, signal.SIGHUP)  # what a scheduler sends before it uses force, and a terminal that closes
_SIGNALLED = 128  # plus the signal: the exit code that shells give
_PR_SET_PDEATHSIG = 1  # of Linux's prctl


def run_processes(
    module: str,
    arguments: Sequence[str],
    *,
    num_processes: int,
    timeout_s: float,
    on_line: Callable[[int, str], None] | None = None,
    look: Look | None = None,
) -> None:
    """Run `python -m module ARGUMENTS` once per rank, with RANK and WORLD_SIZE set; returns when all have ended well.

    `on_line` gets (rank, line) for each line that a process prints, in this thread. `timeout_s` bounds the silence: it
    starts anew with every line, and with everything that a rank notes where `look` can see it. Raises the error that a
    rank told with `report_error`, else RunError; of several failures that which the others follow from.
    """
    job = Job(num_processes, timeout_s=timeout_s, on_line=on_line, look=look)
    told = "the job ended"
    with _told_to_end():
        try:
            job.start(module, arguments)
            job.watch()
        except GplanError as error:
            told = str(error)
            raise
        finally:
            if left := job.end():
                raise RunError(f"{told}; {left} cannot be ended, even by force: the system holds it")


def report_error(error: GplanError) -> None:
    """Tell the process that started this one why it fails; the first to say so is taken for the cause, unless the text
    tells of a lost connection and another rank has a cause of its own."""
    print(ERROR + json.dumps([type(error).__name__, str(error)]), file=sys.stderr, flush=True)


def end_with_parent() -> None:
    """End this process and all that it starts, whatever it does, soon after the one that started it is gone."""
    parent = os.environ[PARENT]
    _go_on_without_parent()

    def watch() -> None:
        while str(os.getppid()) == parent:
            time.sleep(_PARENT_POLL_S)
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpgrp(), signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def print_stack_on_signal() -> None:
    """Print the main thread's stack whenever the process that started this one asks,
    which it does of one that hangs."""
    faulthandler.register(STACK_SIGNAL, all_threads=False)


@contextmanager
def _told_to_end() -> Iterator[None]:
    """Within it SIGTERM and SIGHUP raise SystemExit where they would end this process at once,
    so that it can clean up."""
    if threading.current_thread() is not threading.main_thread():  # which alone is told of signals
        yield
        return

    def leave(number: int, _frame: object) -> None:
        sys.exit(_SIGNALLED + number)

    taken = [number for number in _REQUESTS if signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _go_on_without_parent() -> None:
    """Have the system wake this process up, should it be stopped, when its parent goes (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGCONT))
