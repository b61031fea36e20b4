"""The command line: each verb parses its arguments, calls one function of `gplan` and prints the result.

This module imports almost nothing, so that Ctrl-C during the imports that follow already reaches `main`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

INTERRUPTED = 130
"""The exit code that shells use for a program ended by Ctrl-C."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a verb and exit; every error that a user can fix is one message and an exit code (see gplan.core.errors)."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    try:
        from gplan.cli.verbs import exit_code

        code = exit_code(arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = INTERRUPTED
    sys.exit(code)
