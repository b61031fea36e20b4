"""Checkpoint folders: `step-000120`, each written under a temporary name and renamed when complete; and their lock.

    .step-000120.part-1a2b   being written, or left by a killed run; removed at the next save
    .step-000120.old         set aside while another checkpoint of the same step replaces it

A checkpoint is complete if its checksums, written last, exist and every file is as long as DCP's index says. Nothing is
used before its file has the checksum that it was saved with; `b2sum` prints the same ones. The index is a pickle, of which
only the classes of an index are read, so that a folder from a stranger cannot run code. One run at a time may save to a
folder: it holds an operating-system lock on a file in it, which ends with the process; file systems without locks are not
protected.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pickle
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata

from gplan.core.errors import FileError
from gplan.core.units import bytes_text

_METADATA_CLASSES = (
    "Metadata", "MetadataIndex", "StorageMeta", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorStorageMetadata",
    "TensorProperties", "_MEM_FORMAT_ENCODING",
)  # fmt: skip
_LOCK = ".lock"
_INDEX = ".metadata"
_CHECKSUMS = "checksums"
_CHECKSUM = re.compile(r"([0-9a-f]{128})  ([\w.]+)\n")
_OF_AN_INDEX = {
    *(("torch.distributed.checkpoint.metadata", name) for name in _METADATA_CLASSES),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # Python 3.13
}
_COMPLETE = re.compile(r"step-(\d{6,})|\.step-(\d{6,})\.old")
_PART = re.compile(r"\.step-\d{6,}\.part-\w+")
ADVICE = "; use another checkpoint"
"""Ends the error of a damaged checkpoint."""


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
    content = (part / _INDEX).read_bytes()
    files = dict.fromkeys(span.file for span in _complete_ranges(part, _unpickled(content)))
    found = [(_digest(content), _INDEX), *((_noted(part, name).read_text(), name) for name in files)]
    text = "".join(f"{digest}  {name}\n" for digest, name in found)
    with open(part / _CHECKSUMS, "w", encoding="ascii") as file:
        file.write(f"{text}{_digest(text.encode())}  {_CHECKSUMS}\n")
        file.flush()
        os.fsync(file.fileno())
    for name in files:
        _noted(part, name).unlink()
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


def newest_complete(directory: Path) -> Path | None:
    """Return the newest checkpoint whose index is intact and whose files have their length, or None."""
    for _, path in _folders(directory):
        with suppress(FileError):
            read_index(path)
            return path
    return None


def read_index(path: Path) -> Metadata:
    """Return a checkpoint's index; raises FileError if it changed, or a file is missing or too short."""
    if not (path / _INDEX).is_file():
        raise DamagedError(f"{path} is not a checkpoint: it has no {_INDEX}; expected a folder such as step-000120")
    checksums = _checksums(path)
    try:
        content = (path / _INDEX).read_bytes()
        if _digest(content) != checksums.get(_INDEX):
            raise ValueError("its bytes changed")
        index = _unpickled(content)
        if odd := {span.file for span in byte_ranges(index)} - checksums.keys():
            raise ValueError(f"it names files without a checksum: {', '.join(sorted(odd))}")
    except Exception as error:  # a damaged pickle can raise anything
        raise DamagedError(f"{path} is damaged: its {_INDEX} cannot be read ({error}){ADVICE}") from error
    _complete_ranges(path, index)
    return index


def note_checksum(file: Path) -> None:
    """Write the checksum of a file of a checkpoint that is being written beside it, for `publish`."""
    _noted(file.parent, file.name).write_text(_checksum(file), encoding="ascii")


def _checksum(file: Path) -> str:
    digest = hashlib.blake2b()
    with open(file, "rb") as content:
        while part := content.read(2**20):
            digest.update(part)
    return digest.hexdigest()


def verify_checksums(path: Path, *, rank: int = 0, num_ranks: int = 1) -> None:
    """Check this rank's share of a checkpoint's files; raises FileError for the first that changed."""
    read_index(path)
    checksums = _checksums(path)
    for name in sorted(checksums)[rank::num_ranks]:
        if _checksum(path / name) != checksums[name]:
            raise DamagedError(f"{path} is damaged: the bytes of {name} changed{ADVICE}")


def _checksums(path: Path) -> dict[str, str]:
    """The checksum of each file but this list, whose last line is its own."""
    try:
        content = (path / _CHECKSUMS).read_bytes()
    except OSError as error:
        raise DamagedError(
            f"{path} has no file {_CHECKSUMS} that can be read ({error.strerror}), as each checkpoint that gplan saves has"
            f"{ADVICE}"
        ) from error
    lines = [_CHECKSUM.fullmatch(x) for x in content.decode("ascii", "replace").splitlines(keepends=True)]
    found = {x[2]: x[1] for x in lines if x is not None}
    own = found.pop(_CHECKSUMS, "")
    if None in lines or len(found) + 1 != len(lines) or own != _digest(content[: content.rfind(b"\n", 0, -1) + 1]):
        raise DamagedError(f"{path} is damaged: the bytes of {_CHECKSUMS} changed{ADVICE}")
    return found


def _noted(folder: Path, name: str) -> Path:
    return folder / f".{name}.checksum"


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content).hexdigest()


class _IndexUnpickler(pickle.Unpickler):
    """Reads DCP's index and nothing else: a pickle can name any function to call."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _OF_AN_INDEX or (module == "torch" and isinstance(vars(torch).get(name), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no index needs and which could run code")


def _unpickled(content: bytes) -> Metadata:
    index = _IndexUnpickler(BytesIO(content)).load()
    if not isinstance(index, Metadata):
        raise pickle.UnpicklingError(f"it is a {type(index).__name__}")
    return index


def _complete_ranges(path: Path, index: Metadata) -> list[ByteRange]:
    found = byte_ranges(index)
    for name, end in {span.file: span.offset + span.num_bytes for span in found}.items():  # sorted: the last of a file
        file = path / name
        if not file.is_file():
            raise DamagedError(f"{path} is incomplete: {name} is missing{ADVICE}")
        if (size := file.stat().st_size) < end:
            raise DamagedError(f"{path} is incomplete: {name} has {bytes_text(size)} of {bytes_text(end)}{ADVICE}")
    return found


def byte_ranges(index: Metadata) -> list[ByteRange]:
    """Return the location of every value, by file and offset."""
    found = [ByteRange(key.fqn, x.relative_path, x.offset, x.length) for key, x in index.storage_data.items()]
    return sorted(found, key=lambda span: (span.file, span.offset))


def _folders(directory: Path) -> list[tuple[int, Path]]:
    """Return step and folder of every checkpoint, newest first; one set aside comes after its replacement."""
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    matches = [match for match in map(_COMPLETE.fullmatch, names) if match is not None]
    found = [(int(match[1] or match[2]), directory / match[0]) for match in matches]
    return sorted(found, key=lambda x: (x[0], not x[1].name.startswith(".")), reverse=True)
