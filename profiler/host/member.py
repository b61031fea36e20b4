"""One process of a job: started as the leader of a session of its own, heard, looked at, ended with all it started.

What a process starts (the workers of a data loader) stays in its group, so that a signal to the group reaches them all,
also after the leader is gone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

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
