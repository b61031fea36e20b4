"""The command line: arguments -> one call -> print. The verbs are in modules of their own.

This module imports next to nothing, so that an interrupt finds `main` ready for it while all else is being imported.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

INTERRUPTED = 130
"""The exit code that shells give to what Ctrl-C ended."""

_AFTER_THE_HOOK_S = 0.01  # within it, which the finalizer calls, it would be dropped once more


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a verb; every error that a user can mend is one message and an exit code, see gplan.core.errors."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    logging.getLogger("torch._subclasses.fake_tensor").disabled = True  # it shows the stack of what is raised as well
    try:
        from gplan.cli.verbs import exit_code

        with _no_interrupt_ignored():
            code = exit_code(arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = INTERRUPTED
    sys.exit(code)


@contextmanager
def _no_interrupt_ignored() -> Iterator[None]:
    """One that comes in a finalizer, or where a process forks, Python shows and drops: here it comes again."""
    usual = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if unraisable.exc_type is not KeyboardInterrupt:
            usual(unraisable)
            return
        again = threading.Timer(_AFTER_THE_HOOK_S, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT])
        again.daemon = True
        again.start()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = usual
