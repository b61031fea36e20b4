"""Checkpoint folders: `step-000120`, each written under a temporary name and renamed when complete; and their lock.

    .step-000120.part-1a2b   being written, or left by a killed run; removed at the next save
    .step-000120.old         set aside while another checkpoint of the same step replaces it

A checkpoint is complete if DCP's index, written last, exists and every file is as long as the index says. The index
is a pickle: open only checkpoints that you trust. One run at a time may save to a folder: it holds an
operating-system lock on a file in it, which ends with the process; file systems without locks are not protected.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import NamedTuple
from zipfile import ZipFile

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from gplan.core.errors import FileError
from gplan.core.units import bytes_text, counted

_LOCK = ".lock"
_INDEX = ".metadata"
_COMPLETE = re.compile(r"step-(\d{6,})|\.step-(\d{6,})\.old")
_PART = re.compile(r"\.step-\d{6,}\.part-\w+")
_ADVICE = "; use another checkpoint"


@contextmanager
def locked_directory(directory: Path) -> Iterator[None]:
    """Create the folder and lock it against other runs; at the end, partial checkpoints are removed.

    Raises FileError, before anything is computed, if the folder is not writable or another run holds the lock.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(directory / _LOCK, os.O_WRONLY | os.O_CREAT, 0o666)
    except OSError as error:
        reason = "it is a file" if isinstance(error, FileExistsError) else error.strerror
        raise FileError(
            f"{directory} cannot hold checkpoints: {reason}; name another folder with --checkpoints"
        ) from error
    with os.fdopen(lock, "wb"):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FileError(
                f"another run saves its checkpoints to {directory} now; name another folder with --checkpoints, or wait"
            ) from error
        except OSError:
            pass  # the file system has no locks
        try:
            yield
        finally:
            with suppress(OSError):
                clean_directory(directory)


class DamagedError(FileError):
    """A checkpoint that is incomplete or was changed."""


class ByteRange(NamedTuple):
    """Location of the value of one key."""

    key: str
    file: str
    offset: int
    num_bytes: int


def checkpoint_path(directory: Path, step: int) -> Path:
    """Return the folder of one step's checkpoint."""
    return directory / f"step-{step:06d}"


def partial_path(final: Path, token: str) -> Path:
    """Return the folder in which a checkpoint is written."""
    return final.with_name(f".{final.name}.part-{token}")


def clean_directory(directory: Path) -> None:
    """Create the folder; remove what killed runs left in it and put back a checkpoint that was set aside."""
    directory.mkdir(parents=True, exist_ok=True)
    for left in directory.iterdir():
        if _PART.fullmatch(left.name):
            shutil.rmtree(left)
    for step, aside in _folders(directory):
        final = checkpoint_path(directory, step)
        if aside == final:
            continue
        if final.exists():
            shutil.rmtree(aside)
        else:
            aside.rename(final)


def publish(part: Path, final: Path) -> None:
    """Rename a complete checkpoint to its final name, replacing one of that name.

    Raises FileError if files are missing, as when a rank wrote to a disk that is not shared.
    """
    read_index(part)
    aside = final.with_name(f".{final.name}.old")
    if final.exists():
        shutil.rmtree(aside, ignore_errors=True)
        final.rename(aside)
    part.rename(final)
    handle = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(handle)  # so that the new name survives a power loss
    finally:
        os.close(handle)
    shutil.rmtree(aside, ignore_errors=True)


def list_checkpoints(directory: Path) -> list[Path]:
    """Return the checkpoints in a folder, newest first, or the folder itself if it is one; they may be damaged.

    Raises FileError if there is none.
    """
    found = _found(directory)
    if not found:
        state = "holds no checkpoint" if directory.is_dir() else "is a file" if directory.exists() else "is not there"
        raise FileError(f"{directory} {state}; expected folders such as step-000120, as a run that saves makes them")
    return found


def has_checkpoint(directory: Path) -> bool:
    """Whether there is a checkpoint, complete or damaged; raises FileError for a file."""
    if directory.is_file():
        raise FileError(f"{directory} is a file; expected a folder of checkpoints, or the name of one to be")
    return bool(_found(directory))


def _found(directory: Path) -> list[Path]:
    return [directory] if (directory / _INDEX).exists() else [path for _, path in _folders(directory)]


def all_damaged_error(damages: Sequence[str]) -> DamagedError:
    """Return the error if all checkpoints are damaged; `damages` are newest first."""
    if len(damages) == 1:
        return DamagedError(damages[0])
    others = counted(len(damages) - 1, "older one")
    return DamagedError(
        f"{damages[0].removesuffix(_ADVICE)}; none is left to go on from, as {others} cannot be used either"
    )


def fallback_note(damages: Sequence[str], path: Path) -> str:
    """Return the note that a run resumes from an older checkpoint than the newest."""
    return f"{'; '.join(x.removesuffix(_ADVICE) for x in damages)}; going on from {path}"


def newest_intact(directory: Path) -> Path | None:
    """Return the newest complete checkpoint, or None."""
    for _, path in _folders(directory):
        with suppress(FileError):
            read_index(path)
            return path
    return None


def read_index(path: Path) -> Metadata:
    """Return a checkpoint's index; raises FileError if it cannot be read or a file is missing or too short."""
    if not (path / _INDEX).is_file():
        raise DamagedError(f"{path} is not a checkpoint: it has no {_INDEX}; expected a folder such as step-000120")
    try:
        index = FileSystemReader(path).read_metadata()
        lack = _lack(path, byte_ranges(index))
    except Exception as error:  # a damaged pickle can raise anything
        raise DamagedError(f"{path} is damaged: its {_INDEX} cannot be read ({error}){_ADVICE}") from error
    if lack is not None:
        raise DamagedError(f"{path} is incomplete: {lack}{_ADVICE}")
    return index


def byte_ranges(index: Metadata) -> list[ByteRange]:
    """Return the location of every value, by file and offset."""
    found = [ByteRange(key.fqn, x.relative_path, x.offset, x.length) for key, x in index.storage_data.items()]
    return sorted(found, key=lambda span: (span.file, span.offset))


def verify_checksums(path: Path, wanted: Iterable[ByteRange]) -> None:
    """Check the CRC of some values; raises FileError for the first that is wrong. torch.load does not check them."""
    for span in wanted:
        with open(path / span.file, "rb") as file:
            file.seek(span.offset)
            content = file.read(span.num_bytes)
        try:
            is_intact = ZipFile(BytesIO(content)).testzip() is None
        except Exception:  # a damaged archive can raise anything
            is_intact = False
        if not is_intact:
            raise DamagedError(f"{path} is damaged: the bytes of {span.key} in {span.file} changed{_ADVICE}")


def _lack(path: Path, found: Iterable[ByteRange]) -> str | None:
    """Describe the first file that is missing or too short."""
    ends = {span.file: span.offset + span.num_bytes for span in found}  # sorted, so the last range of a file
    for name, end in ends.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size < end:
            return f"{name} has {bytes_text(file.stat().st_size)} of {bytes_text(end)}"
    return None


def _folders(directory: Path) -> list[tuple[int, Path]]:
    """Return step and folder of every checkpoint, newest first; one set aside comes after its replacement."""
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    matches = [match for match in map(_COMPLETE.fullmatch, names) if match is not None]
    found = [(int(match[1] or match[2]), directory / match[0]) for match in matches]
    return sorted(found, key=lambda x: (x[0], not x[1].name.startswith(".")), reverse=True)
