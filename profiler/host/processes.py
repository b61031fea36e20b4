"""Several Python processes on this host as one job: started together, watched together, ended together.

The first to fail ends the others within moments; so does one that is stopped, a time-out, an interrupt, or an error of
the process that watches. Of several failures `profiler/host/failure.py` finds the cause. Nothing is left behind.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from gplan.core.errors import GplanError, RunError
from profiler.host.job import ERROR, PARENT, STACK_SIGNAL, Job, Look

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
    rank told with `say_error`, else RunError; of several failures that which the others follow from.
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


def say_error(error: GplanError) -> None:
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


def show_stack_when_asked() -> None:
    """Print the main thread's stack whenever the process that started this one asks,
    which it does of one that hangs."""
    faulthandler.register(STACK_SIGNAL, all_threads=False)


def core_shares(num_shares: int, *, num_threads: int) -> list[set[int]]:
    """Disjoint shares of the host's cores, `num_threads` each; they overlap only if there are too few cores."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    starts = [share * num_threads for share in range(num_shares)]
    return [{cores[(start + i) % len(cores)] for i in range(num_threads)} for start in starts]


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
