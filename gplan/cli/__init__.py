"""The command line: arguments -> one call -> print. The verbs are in modules of their own.

This module imports next to nothing, so that an interrupt finds `main` ready for it while all else is being imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

INTERRUPTED = 130
"""The exit code that shells give to what Ctrl-C ended."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a verb; every error that a user can mend is one message and an exit code, see gplan.errors."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    try:
        from gplan.cli.verbs import exit_code

        code = exit_code(arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = INTERRUPTED
    sys.exit(code)
