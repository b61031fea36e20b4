"""Errors that users can cause and fix, each with the exit code of the command line.

    GplanError
    ├── UsageError      2   an option or argument that cannot be used
    ├── ModelError      3   a model file that cannot be loaded, captured or trained
    ├── FileError       3   a profile, plan or run file that cannot be used
    ├── NoPlanError     4   no plan satisfies the limits
    └── RunError        5   training started and failed

Each message states what was found, what was expected and what to do. Any other exception is a bug (exit code 1).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class GplanError(Exception):
    """Base class of all errors that a user can cause and fix."""

    exit_code = 1


class UsageError(GplanError):
    """An option, an argument or a combination of them that cannot be used."""

    exit_code = 2


class ModelError(GplanError):
    """A model file that cannot be loaded, captured or trained."""

    exit_code = 3


class FileError(GplanError):
    """A profile, plan or run file that is missing, damaged or made for something else."""

    exit_code = 3


class NoPlanError(GplanError):
    """No partition satisfies the limits; the message names the nearest limit that would do."""

    exit_code = 4


class RunError(GplanError):
    """A run that started but failed."""

    exit_code = 5


@contextmanager
def needs_torch(what: str) -> Iterator[None]:
    """Inside, a module that this system or installation lacks is a UsageError (`missing_module`); also a decorator."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (missing := missing_module(what, error)) is None:
            raise
        raise missing from None


def missing_module(what: str, error: ModuleNotFoundError) -> UsageError | None:
    """The error where torch is not installed, with the command that mends it, or where the system is Windows; else None."""
    if error.name == "torch":
        return UsageError(
            f"{what} needs torch, which is not installed here; install it with: pip install 'gplan[torch]', or in a "
            "clone of gplan: pip install '.[torch]'"
        )
    if error.name in ("fcntl", "resource"):  # of the standard library, not on Windows
        return UsageError(
            f"{what} needs Linux or macOS; on Windows run it in WSL (planning, layouts, reports and exports need none)"
        )
    return None


def is_interrupt(error: BaseException | None) -> bool:
    """Whether a KeyboardInterrupt caused an error, for example during an import or while writing a file."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False
