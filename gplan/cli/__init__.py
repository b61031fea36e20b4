"""The command line: arguments -> one call -> print. The verbs are in modules of their own.

This module imports next to nothing, so that an interrupt finds `main` ready for it while all else is being imported.
"""

from __future__ import annotations

import _thread
import logging
import os
import sys
import threading
from collections.abc import Sequence

INTERRUPTED = 130
"""The exit code that shells give to what Ctrl-C ended."""

_SOON_S = 0.01


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a verb; every error that a user can mend is one message and an exit code, see gplan.errors."""
    sys.unraisablehook = _interrupted_again
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # says with a stack what is raised, too
    try:
        from gplan.cli.verbs import exit_code

        code = exit_code(arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = INTERRUPTED
    sys.exit(code)


def _interrupted_again(unraisable: sys.UnraisableHookArgs) -> None:
    """An interrupt in a finalizer, or where a process forks, is one that Python says and ignores: it comes again."""
    if unraisable.exc_type is KeyboardInterrupt:
        threading.Timer(_SOON_S, _thread.interrupt_main).start()
    else:
        sys.__unraisablehook__(unraisable)
