"""The command line: each verb parses its arguments, calls one function of `gplan` and prints the result.

This module imports almost nothing, so that Ctrl-C during the imports that follow already reaches `main`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

SIGNALLED = 128
"""Plus the signal's number: the exit code that shells use for a program ended by a signal."""
INTERRUPTED = SIGNALLED + signal.SIGINT


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a verb and exit; every error that a user can fix is one message and an exit code (see gplan.core.errors)."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with _requests_to_end_as_interrupts() as requests:
        try:
            from gplan.cli.verbs import exit_code

            code = exit_code(arguments)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            code = INTERRUPTED
    sys.exit(SIGNALLED + requests[0] if requests and code == INTERRUPTED else code)


@contextmanager
def _requests_to_end_as_interrupts() -> Iterator[list[int]]:
    """Inside, SIGTERM and SIGHUP interrupt as Ctrl-C does; yields the list of those received.

    Not in a rank of a launcher: the signal must end it also while it waits for other ranks in C++.
    """
    received: list[int] = []
    process = os.getpid()

    def interrupt(number: int, _frame: object) -> None:
        if os.getpid() != process:  # a fork, such as a worker of a data loader
            os._exit(SIGNALLED + number)
        received.append(number)
        raise KeyboardInterrupt

    wanted = () if "RANK" in os.environ else (signal.SIGTERM, signal.SIGHUP)
    taken = [number for number in wanted if signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, interrupt)
    try:
        yield received
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)
