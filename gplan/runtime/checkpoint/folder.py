"""Where checkpoints lie: whole folders `step-000120`, each made under a name of its own and renamed when it is whole.

    .step-000120.part-1a2b   being written, or left by a run that was killed; removed at the next save
    .step-000120.old         set aside for the moment in which another checkpoint of the same step takes its place

A folder is whole if the index that torch.distributed.checkpoint writes last is there and every file reaches as far as
the index says. The index is a pickle: open only checkpoints that you trust.
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
from typing import BinaryIO, NamedTuple
from zipfile import ZipFile

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from gplan.core.errors import FileError
from gplan.core.units import bytes_text, counted

# A folder of checkpoints belongs to one run at a time: two would remove what the other is writing,
# and replace its steps.
#
# The claim is a lock of the operating system on a file in the folder; it ends with the process that holds it, however
# that ends. Where a file system has no locks there is no claim.


_LOCK = ".lock"


@contextmanager
def locked_directory(directory: Path) -> Iterator[None]:
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
                clean_directory(directory)


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


_INDEX = ".metadata"
_WHOLE = re.compile(r"step-(\d{6,})|\.step-(\d{6,})\.old")
_ADVICE = "; use another checkpoint"
_PART = re.compile(r"\.step-\d{6,}\.part-\w+")


class DamagedError(FileError):
    """A checkpoint that is not whole, or no longer what was written."""


class ByteRange(NamedTuple):
    """Where the value of one key lies."""

    key: str
    file: str
    offset: int
    num_bytes: int


def checkpoint_path(directory: Path, step: int) -> Path:
    """The folder of one step's checkpoint."""
    return directory / f"step-{step:06d}"


def partial_path(final: Path, token: str) -> Path:
    """Where a checkpoint is written before it is whole."""
    return final.with_name(f".{final.name}.part-{token}")


def clean_directory(directory: Path) -> None:
    """Make the directory; remove what killed runs left in it and put back what one had set aside."""
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
    """Give a checkpoint that is whole its name; one that already has it makes way.

    Raises FileError where files are missing, as they are where a rank wrote to a disk that is not this one.
    """
    read_index(part)
    aside = final.with_name(f".{final.name}.old")
    if final.exists():
        shutil.rmtree(aside, ignore_errors=True)
        final.rename(aside)
    part.rename(final)
    _flush(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def list_checkpoints(directory: Path) -> list[Path]:
    """The checkpoints in a directory, newest first, or the directory itself where it is one.

    Raises FileError where there is none. They may be damaged.
    """
    found = _found(directory)
    if not found:
        state = "holds no checkpoint" if directory.is_dir() else "is a file" if directory.exists() else "is not there"
        raise FileError(f"{directory} {state}; expected folders such as step-000120, as a run that saves makes them")
    return found


def has_checkpoint(directory: Path) -> bool:
    """Whether there is a checkpoint, whole or damaged; raises FileError for a file."""
    if directory.is_file():
        raise FileError(f"{directory} is a file; expected a folder of checkpoints, or the name of one to be")
    return bool(_found(directory))


def _found(directory: Path) -> list[Path]:
    return [directory] if (directory / _INDEX).exists() else [path for _, path in _folders(directory)]


def all_damaged_error(damages: Sequence[str]) -> DamagedError:
    """The error for checkpoints of which all are damaged, newest first."""
    if len(damages) == 1:
        return DamagedError(damages[0])
    others = counted(len(damages) - 1, "older one")
    return DamagedError(
        f"{damages[0].removesuffix(_ADVICE)}; none is left to go on from, as {others} cannot be used either"
    )


def fallback_note(damages: Sequence[str], path: Path) -> str:
    """What is said where a run goes on from an older checkpoint than the newest."""
    return f"{'; '.join(x.removesuffix(_ADVICE) for x in damages)}; going on from {path}"


def newest_intact(directory: Path) -> Path | None:
    """The newest checkpoint that is whole, or None where there is none."""
    return next((path for _, path in _folders(directory) if _is_whole(path)), None)


def read_index(path: Path) -> Metadata:
    """What a checkpoint holds; raises FileError where it is none, cannot be read, or lacks a file or the end of one."""
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
    """Where every value lies, in the order of the files."""
    found = [ByteRange(key.fqn, x.relative_path, x.offset, x.length) for key, x in index.storage_data.items()]
    return sorted(found, key=lambda span: (span.file, span.offset))


def verify_checksums(path: Path, wanted: Iterable[ByteRange]) -> None:
    """Compare some values with the checksums they were written with; raises FileError for the first that differs.

    torch.load itself takes a flipped bit for a value.
    """
    for span in wanted:
        if not _is_intact(path, span):
            raise DamagedError(f"{path} is damaged: the bytes of {span.key} in {span.file} changed{_ADVICE}")


def _is_intact(path: Path, span: ByteRange) -> bool:
    with open(path / span.file, "rb") as file:
        file.seek(span.offset)
        content = file.read(span.num_bytes)
    try:
        return ZipFile(BytesIO(content)).testzip() is None
    except Exception:  # a damaged archive can raise anything
        return False


def _is_whole(path: Path) -> bool:
    """As far as its index tells."""
    try:
        read_index(path)
    except FileError:
        return False
    return True


def _lack(path: Path, found: Iterable[ByteRange]) -> str | None:
    """The first file that is missing or too short, in words."""
    ends = {span.file: span.offset + span.num_bytes for span in found}  # the last span of a file ends it
    for name, end in ends.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size < end:
            return f"{name} has {bytes_text(file.stat().st_size)} of {bytes_text(end)}"
    return None


def _folders(directory: Path) -> list[tuple[int, Path]]:
    """Step and folder of every checkpoint, newest first; one that was set aside after the one in its place."""
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    matches = [match for match in map(_WHOLE.fullmatch, names) if match is not None]
    found = [(int(match[1] or match[2]), directory / match[0]) for match in matches]
    return sorted(found, key=lambda x: (x[0], not x[1].name.startswith(".")), reverse=True)


def _flush(directory: Path) -> None:
    """Make a rename in this directory outlast a loss of power."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
