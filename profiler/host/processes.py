"""Several Python processes on this host as one job: started together, watched together, ended together.

The first to fail ends the others within moments; so does a time-out or an interrupt. Nothing is left behind.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gplan import errors
from gplan.errors import GplanError, RunError

_POLL_S = 0.05
_GRACE_S = 2.0
_ERROR = "gplan-error: "
_PARENT = "GPLAN_PARENT"


def run_processes(
    module: str,
    arguments: Sequence[str],
    *,
    num_processes: int,
    timeout_s: float,
    on_line: Callable[[int, str], None] | None = None,
) -> None:
    """Run `python -m module ARGUMENTS` once per rank, with RANK and WORLD_SIZE set; returns when all have ended well.

    `on_line` gets (rank, line) for each line that a process prints. `timeout_s` bounds the silence: it starts anew with
    every line. Raises the error that a rank told with `say_error`, else RunError with the last words of the first rank
    that failed.
    """
    job = _Job(num_processes, on_line)
    try:
        job.start(module, arguments)
        job.wait(timeout_s)
    finally:
        job.end()


def say_error(error: GplanError) -> None:
    """Tell the process that started this one why it fails; the first to say so is taken for the cause."""
    print(_ERROR + json.dumps([type(error).__name__, str(error)]), file=sys.stderr, flush=True)


def end_with_parent() -> None:
    """End this process, whatever it does, soon after the one that started it is gone."""
    parent = os.environ[_PARENT]

    def watch() -> None:
        while str(os.getppid()) == parent:
            time.sleep(10 * _POLL_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def core_shares(num_shares: int, *, num_threads: int) -> list[set[int]]:
    """Disjoint shares of the host's cores, `num_threads` each; they overlap only if there are too few cores."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    starts = [share * num_threads for share in range(num_shares)]
    return [{cores[(start + i) % len(cores)] for i in range(num_threads)} for start in starts]


class _Job:
    def __init__(self, num_processes: int, on_line: Callable[[int, str], None] | None) -> None:
        self._on_line = on_line
        self._heard_s = time.monotonic()
        self._last_words: list[list[str]] = [[] for _ in range(num_processes)]
        self._causes: list[tuple[int, tuple[str, str]]] = []  # what ranks said of their errors, the first first
        self._num_processes = num_processes
        self._processes: list[subprocess.Popen[str]] = []
        self._readers: list[threading.Thread] = []

    def start(self, module: str, arguments: Sequence[str]) -> None:
        """One process per rank, and a reader for each of its two streams."""
        for rank in range(self._num_processes):
            self._processes.append(_start(module, arguments, rank, self._num_processes))
        self._readers = [
            threading.Thread(target=self._read, args=(rank, stream), daemon=True)
            for rank, process in enumerate(self._processes)
            for stream in (process.stdout, process.stderr)
        ]
        for reader in self._readers:
            reader.start()

    def wait(self, timeout_s: float) -> None:
        """Until all have ended well; RunError otherwise."""
        while True:
            codes = [process.poll() for process in self._processes]
            failed = next((rank for rank, code in enumerate(codes) if code), None)
            if failed is not None:
                raise self._failure(failed)
            if all(code == 0 for code in codes):
                return
            if time.monotonic() - self._heard_s > timeout_s:
                silent = ", ".join(str(rank) for rank, code in enumerate(codes) if code is None)
                raise RunError(f"no rank said anything for {timeout_s:g} s (still running: {silent}); a stage hangs")
            time.sleep(_POLL_S)

    def end(self) -> None:
        """End what still runs, first asking, then forcing; waits until it is gone."""
        for process in self._processes:
            _signal(process, signal.SIGTERM)
        deadline_s = time.monotonic() + _GRACE_S
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                _signal(process, signal.SIGKILL)
                process.wait()
        for reader in self._readers:
            reader.join(timeout=_GRACE_S)

    def _failure(self, rank: int) -> GplanError:
        process = self._processes[rank]
        time.sleep(4 * _POLL_S)  # another rank may have said the cause a moment before
        if self._causes:
            rank, cause = self._causes[0]
            kind = getattr(errors, cause[0], RunError)
            return kind(f"rank {rank}: {cause[1]}")
        code = process.returncode
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        words = "\n".join(self._last_words[rank][-5:]) or "nothing"
        return RunError(f"rank {rank} {how}; the other ranks were ended; its last words:\n{words}")

    def _read(self, rank: int, stream: object) -> None:
        for line in stream:  # type: ignore[attr-defined]
            self._heard_s = time.monotonic()
            text = line.rstrip("\n")
            if text.startswith(_ERROR):
                name, message = json.loads(text.removeprefix(_ERROR))
                self._causes.append((rank, (name, message)))
            self._last_words[rank] = [*self._last_words[rank][-30:], text]
            if self._on_line is not None:
                self._on_line(rank, text)


def _start(module: str, arguments: Sequence[str], rank: int, num_processes: int) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        _PARENT: str(os.getpid()),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_processes),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
    }
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host: nothing needs to leave it
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )


def _signal(process: subprocess.Popen[str], number: signal.Signals) -> None:
    if process.poll() is None:
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
