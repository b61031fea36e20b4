"""The command line: each verb parses its arguments, calls one function of `gplan` and prints the result.

This module imports almost nothing, so that Ctrl-C during the imports that follow already reaches `main`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130
"""The exit code that shells use for a program ended by Ctrl-C."""

_RESEND_DELAY_S = 0.01  # longer than the finalizer takes to return: until then Python would drop the signal again


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a verb and exit; every error that a user can fix is one message and an exit code (see gplan.core.errors)."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    try:
        from gplan.cli.verbs import exit_code

        with _interrupts_in_finalizers_repeated():
            code = exit_code(arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = INTERRUPTED
    sys.exit(code)


@contextmanager
def _interrupts_in_finalizers_repeated() -> Iterator[None]:
    """Python prints and drops a KeyboardInterrupt raised in a finalizer or at a fork; send the signal once more."""
    usual = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if unraisable.exc_type is KeyboardInterrupt:
            _resend_interrupt()
        else:
            usual(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = usual


def _resend_interrupt() -> None:
    """Send the signal to the main thread until its handler runs: one that comes just before a wait does not end it."""
    import threading

    handler, handled = signal.getsignal(signal.SIGINT), threading.Event()
    if not callable(handler):
        return

    def handle(number: int, frame: FrameType | None) -> None:
        handled.set()
        signal.signal(signal.SIGINT, handler)
        handler(number, frame)

    def resend() -> None:
        while not handled.wait(_RESEND_DELAY_S):
            signal.pthread_kill(main_thread, signal.SIGINT)

    main_thread = threading.main_thread().ident or 0
    signal.signal(signal.SIGINT, handle)
    threading.Thread(target=resend, daemon=True).start()
