"""A folder of checkpoints belongs to one run at a time: two would remove what the other is writing,
and replace its steps.

The claim is a lock of the operating system on a file in the folder; it ends with the process that holds it, however
that ends. Where a file system has no locks there is no claim.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from gplan.errors import FileError
from gplan.execute.checkpoint.folder import tidy

_LOCK = ".lock"


@contextmanager
def claimed(directory: Path) -> Iterator[None]:
    """Make the folder, and keep other runs from it meanwhile; what is half written at the end is removed.

    Raises FileError, before anything is computed that could not be saved, where the folder cannot be written to or
    belongs to a run that goes on.
    """
    with _opened(directory) as lock:
        _take(lock, directory)
        try:
            yield
        finally:
            with suppress(OSError):
                tidy(directory)


def _opened(directory: Path) -> BinaryIO:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return open(directory / _LOCK, "wb")
    except OSError as error:
        reason = "it is a file" if isinstance(error, FileExistsError) else error.strerror
        raise FileError(
            f"{directory} cannot hold checkpoints: {reason}; name another folder with --checkpoints"
        ) from error


def _take(lock: BinaryIO, directory: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise FileError(
            f"another run saves its checkpoints to {directory} now; name another folder with --checkpoints, or wait"
        ) from error
    except OSError:
        return  # no locks here
