"""Run several Python processes on this host as one job: start, supervise and end them together.

A failed or stopped rank, a timeout, an interrupt or an error of the supervising process ends all ranks.
`gplan_profiler/host/failure.py` selects the root cause among several failures. Output and heartbeats count as progress. A
silent rank may compute or wait for another one, so only the silence of all ranks is a hang.

torchrun's elastic agent ends a job as well whose rank fails. It does not notice a stopped process, blames the rank that
waits where another hangs or exits, leaves its processes behind when it is killed, and names neither stage nor step.
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
from gplan_profiler.host.failure import RankError, RankReport, find_cause, hang_error
from gplan_profiler.host.heartbeat import HeartbeatStatus

OnLine = Callable[[int, str], None]
"""Called with (rank, line) for each line that a process prints."""


class Member:
    """One process of a job and the threads that read its output.

    The process leads a session of its own. Its children (workers of a data loader) stay in its process group, so that
    signals to the group reach them after the leader has ended.
    """

    def __init__(self, rank: int, command: Sequence[str], environment: Mapping[str, str], *, on_line: OnLine) -> None:
        self.rank = rank
        self._on_line = on_line
        self._group_is_ended = False
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
        """The exit code, negative for a signal, or None while it runs; ends the children of a process that has ended."""
        code = self._process.poll()
        if code is not None and not self._group_is_ended:
            self._group_is_ended = True
            self._send_to_group(signal.SIGKILL)
        return code

    def stopped_by(self) -> signal.Signals | None:
        """The signal that stopped it, such as SIGSTOP; None while it runs or where the system does not report it."""
        if not hasattr(os, "waitid") or self.poll() is not None:
            return None
        with suppress(ChildProcessError):
            seen = os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
            return signal.Signals(seen.si_status) if seen is not None else None
        return None

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process without its children."""
        if self.poll() is None:
            self._process.send_signal(number)

    def signal_group(self, *numbers: signal.Signals) -> None:
        """Send signals to the process and its children."""
        if self.poll() is None:
            for number in numbers:
                self._send_to_group(number)

    def wait(self, deadline_s: float) -> bool:
        """Wait until the process ends or `deadline_s` of time.monotonic; returns whether it has ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline_s - time.monotonic()))
        return self.poll() is not None

    def wait_for_output(self, deadline_s: float) -> bool:
        """Wait until all output is read or `deadline_s` of time.monotonic; returns whether it is read."""
        for reader in self._readers:
            reader.join(timeout=max(0.0, deadline_s - time.monotonic()))
        return not any(reader.is_alive() for reader in self._readers)

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self._process.pid})"

    def _send_to_group(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):  # macOS: a group of none but zombies
            os.killpg(self._process.pid, number)

    def _read(self, stream: object) -> None:
        for line in stream:  # type: ignore[attr-defined]
            self._on_line(self.rank, line.rstrip("\n"))


StatusOf = Callable[[int], HeartbeatStatus | None]
"""The status of a rank by its heartbeat; None without one."""

ERROR = "gplan-error: "
"""Prefix of the line in which a rank reports its own failure."""

PARENT = "GPLAN_PARENT"
"""Environment variable with the process id of the supervisor."""

STACK_SIGNAL = signal.SIGUSR1
"""Makes a rank print its stack."""

_POLL_S = 0.05
_END_GRACE_S = 2.0  # between SIGTERM and SIGKILL
_CAUSE_GRACE_S = 2.0  # wait for a root cause where only lost connections were reported
_STOP_GRACE_S = 2.0  # a process may be stopped for this long
_STACK_GRACE_S = 0.5  # for a rank that hangs to print its stack
_START_S = 60.0  # shortest timeout while a rank starts: imports from a slow disk
_NUM_KEPT_LINES = 60


class JobSupervisor:
    """The processes of a job, their output and their failures."""

    def __init__(
        self, num_processes: int, *, timeout_s: float, on_line: OnLine | None, status_of: StatusOf | None
    ) -> None:
        self._num_processes, self._timeout_s = num_processes, timeout_s
        self._on_line, self._status_of = on_line, status_of
        self._lines: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        self._members: list[Member] = []
        self._last_lines: list[list[str]] = [[] for _ in range(num_processes)]
        self._errors: dict[int, RankError] = {}
        self._failed: dict[int, None] = {}  # in the order of failure
        self._stopped_since_s: dict[int, float] = {}
        self._moved_s = time.monotonic()

    def start(self, module: str, arguments: Sequence[str]) -> None:
        """Start one process per rank."""
        for rank in range(self._num_processes):
            environment = _environment(rank, self._num_processes)
            command = ["-m", module, *arguments]
            self._members.append(Member(rank, command, environment, on_line=lambda *line: self._lines.put(line)))

    def watch(self) -> None:
        """Return when all ranks have ended without an error; raise the root cause otherwise."""
        while True:
            self._read_lines(_POLL_S)
            codes = self._codes()
            if self._failed:
                raise self._cause()
            if all(code == 0 for code in codes):
                self._wait_for_output()
                self._read_lines(0.0)
                return
            self._check_suspended()
            self._check_silence()

    def end(self) -> str:
        """End all running processes, first by SIGTERM, then by SIGKILL; returns the names of those still running."""
        try:
            self._end_by(signal.SIGTERM, signal.SIGCONT)  # so that stopped processes receive it
        finally:
            left = self._end_by(signal.SIGKILL)
        self._wait_for_output()
        return ", ".join(map(str, left))

    def _end_by(self, *numbers: signal.Signals) -> list[Member]:
        """Send signals to all; returns the processes that still run after a grace time."""
        for member in self._members:
            member.signal_group(*numbers)
        deadline_s = time.monotonic() + _END_GRACE_S
        return [member for member in self._members if not member.wait(deadline_s)]

    def _wait_for_output(self) -> None:
        deadline_s = time.monotonic() + _END_GRACE_S
        for member in self._members:
            member.wait_for_output(deadline_s)

    def _read_lines(self, seconds: float) -> None:
        """Process all queued lines; waits `seconds` for the first one."""
        with suppress(queue.Empty):
            self._process_line(*self._lines.get(timeout=seconds))
            while True:
                self._process_line(*self._lines.get_nowait())

    def _process_line(self, rank: int, line: str) -> None:
        self._moved_s = time.monotonic()
        if line.startswith(ERROR):
            with suppress(ValueError):  # an incomplete line of a process that was killed
                name, message = json.loads(line.removeprefix(ERROR))
                self._errors.setdefault(rank, RankError(name=name, message=message))
                self._failed.setdefault(rank)
        self._last_lines[rank] = [*self._last_lines[rank][1 - _NUM_KEPT_LINES :], line]
        if self._on_line is not None:
            self._on_line(rank, line)

    def _codes(self) -> list[int | None]:
        codes = [member.poll() for member in self._members]
        for rank, code in enumerate(codes):
            if code:
                self._failed.setdefault(rank)
        return codes

    def _cause(self) -> GplanError:
        """The root cause, once it is certain or after a grace time."""
        deadline_s = time.monotonic() + _CAUSE_GRACE_S
        while True:
            self._read_lines(_POLL_S)
            self._codes()
            cause = find_cause(self._reports())
            is_read = self._lines.empty() and all(x.wait_for_output(0.0) for x in self._members if x.poll() is not None)
            if (cause.is_certain and is_read) or time.monotonic() > deadline_s:
                return cause.error

    def _check_suspended(self) -> None:
        now_s = time.monotonic()
        stopped_now = [member.rank for member in self._members if member.stopped_by() is not None]
        self._stopped_since_s = {rank: self._stopped_since_s.get(rank, now_s) for rank in stopped_now}
        for rank, since_s in self._stopped_since_s.items():
            if now_s - since_s > _STOP_GRACE_S:
                report = self._report(rank)
                if report.stopped_by is not None:
                    raise find_cause([report]).error

    def _check_silence(self) -> None:
        if time.monotonic() - self._moved_s <= self._timeout_s:
            return
        reports = self._reports()
        statuses = [report.status for report in reports if report.code is None]
        self._moved_s = max([self._moved_s, *(x.moved_s for x in statuses if x is not None)])
        is_starting = self._status_of is not None and any(x is None or x.is_starting for x in statuses)
        limit_s = max(self._timeout_s, _START_S) if is_starting else self._timeout_s
        if statuses and time.monotonic() - self._moved_s > limit_s:
            raise self._hang(reports, limit_s)

    def _hang(self, reports: Sequence[RankReport], silence_s: float) -> RunError:
        """The error of a job without progress, with the stacks of the ranks that do not wait."""
        for report in reports:
            if report.code is None and report.status is not None and not report.status.is_waiting:
                self._last_lines[report.rank].clear()
                self._members[report.rank].send_signal(STACK_SIGNAL)
        deadline_s = time.monotonic() + _STACK_GRACE_S
        while time.monotonic() < deadline_s:
            self._read_lines(_POLL_S)
        return hang_error(
            [replace(x, last_lines=tuple(self._last_lines[x.rank])) for x in reports], silence_s=silence_s
        )

    def _reports(self) -> list[RankReport]:
        """The state of every rank, failed ranks first."""
        return [self._report(rank) for rank in dict.fromkeys([*self._failed, *range(self._num_processes)])]

    def _report(self, rank: int) -> RankReport:
        return RankReport(
            rank=rank,
            code=self._members[rank].poll(),
            stopped_by=self._members[rank].stopped_by(),
            error=self._errors.get(rank),
            last_lines=tuple(self._last_lines[rank]),
            status=self._status_of(rank) if self._status_of is not None else None,
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
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this host
    return environment


_PARENT_POLL_S = 0.5
_REQUESTS = (signal.SIGTERM, signal.SIGHUP)  # from a scheduler before SIGKILL, and from a terminal that closes
_SIGNALLED = 128  # plus the signal's number: the exit code by convention of shells
_PR_SET_PDEATHSIG = 1  # of Linux's prctl


def run_processes(
    module: str,
    arguments: Sequence[str],
    *,
    num_processes: int,
    timeout_s: float,
    on_line: OnLine | None = None,
    status_of: StatusOf | None = None,
) -> None:
    """Run `python -m module ARGUMENTS` once per rank, with RANK and WORLD_SIZE set, until all have ended without error.

    `on_line` gets (rank, line) for each line of output, in this thread. `timeout_s` limits the time without any output
    or heartbeat (`status_of`). Raises the error that a rank passed to `report_error`, else RunError; of several
    failures, the root cause.
    """
    job = JobSupervisor(num_processes, timeout_s=timeout_s, on_line=on_line, status_of=status_of)
    outcome = "the job ended"
    with _termination_as_exit():
        try:
            job.start(module, arguments)
            job.watch()
        except GplanError as error:
            outcome = str(error)
            raise
        finally:
            if left := job.end():
                raise RunError(f"{outcome}; {left} is still running after SIGKILL: the system holds it")


def report_error(error: GplanError) -> None:
    """Report this rank's failure to the supervisor, which raises it, as its class of `gplan.core.errors`, if it is the cause."""
    kind = next(x for x in type(error).__mro__ if x.__module__ == GplanError.__module__)
    print(ERROR + json.dumps([kind.__name__, str(error)]), file=sys.stderr, flush=True)


def signal_at_parents_end(number: signal.Signals) -> None:
    """Let the system send this process a signal when its parent ends (Linux only; elsewhere nothing is sent)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))


def end_with_parent() -> None:
    """End this process and its children soon after the supervisor is gone, also while it is stopped (Linux only).

    SIGINT, which Ctrl-C sends to the supervisor only, ends this process as SIGTERM does, without a traceback.
    """
    parent = os.environ[PARENT]
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal_at_parents_end(signal.SIGCONT)

    def watch() -> None:
        while str(os.getppid()) == parent:
            time.sleep(_PARENT_POLL_S)
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpgrp(), signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def print_stack_on_signal() -> None:
    """Print the main thread's stack on STACK_SIGNAL, which the supervisor sends to a rank that hangs."""
    faulthandler.register(STACK_SIGNAL, all_threads=False)


@contextmanager
def _termination_as_exit() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP raise SystemExit, so that the job is ended before this process."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread handles signals
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
