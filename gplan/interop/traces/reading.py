"""Read a torch.profiler trace (Chrome JSON, plain or gzipped) in blocks, keeping only the times of a pipeline.

Such files are hundreds of megabytes, mostly nested operations and their arguments. A block ends where an event begins
with its phase, as the profiler writes them; it is decoded without arguments and reduced to columns of numbers, about 20
bytes per operation. A file whose events begin otherwise is read as one block. Times are microseconds since `base_ns`
(nanoseconds since 1970).
"""

from __future__ import annotations

import gzip
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from gplan.core.errors import FileError
from gplan.interop.traces.profiler_marks import Mark, is_kept_mark, is_point_to_point, role_of

_GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_REMEDY = "expected what prof.export_chrome_trace of torch.profiler writes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """Operations that are not nested in others of their thread, in order of time; columns of the same length."""

    start_us: NDArray[np.float64]
    end_us: NDArray[np.float64]
    thread: NDArray[np.int64]
    role: NDArray[np.int8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """GPU work except sends and receives, in order of launch; columns of the same length."""

    launch_us: NDArray[np.float64]
    start_us: NDArray[np.float64]
    end_us: NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """The recording of one process."""

    name: str  # of the file
    rank: int | None  # None: not in the file
    host: str | None
    base_ns: int | None
    marks: tuple[Mark, ...]  # in order of time
    operations: Operations
    kernels: Kernels


def read_trace(path: Path, *, block_bytes: int = 8 * 2**20) -> RankTrace:
    """Read the trace of one rank, `block_bytes` at a time; raises FileError if it cannot be read or is no trace."""
    collected = _Collected()
    try:
        with _opened(path) as stream:
            header = _read_blocks(stream, collected, str(path), block_bytes)
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        said = getattr(error, "strerror", None) or str(error)
        raise FileError(f"{path} cannot be read: {said}; {_REMEDY}") from error
    rank = header.distributedInfo.rank if header.distributedInfo else None
    return RankTrace(
        name=str(path),
        rank=rank,
        host=header.host_name,
        base_ns=header.baseTimeNanoseconds,
        marks=tuple(sorted(collected.marks, key=lambda x: (x.start_us, -x.end_us))),
        operations=collected.operations(),
        kernels=collected.kernels(),
    )


class _Arguments(msgspec.Struct, gc=False):
    correlation: int | None = None


class _Event(msgspec.Struct, gc=False):
    """The fields of a trace event that are used."""

    ph: str
    name: str = ""
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    tid: int | str = 0
    args: _Arguments | None = None


class _Distributed(msgspec.Struct):
    rank: int | None = None


class _Header(msgspec.Struct):
    """The fields of a trace other than its events."""

    traceEvents: list[int] | None = None  # replaced by none
    distributedInfo: _Distributed | None = None
    host_name: str | None = None
    baseTimeNanoseconds: int | None = None


_EVENTS = msgspec.json.Decoder(list[_Event], strict=False)
_HEADER = msgspec.json.Decoder(_Header, strict=False)


@dataclass(slots=True)
class _Collected:
    """Columns that grow block by block."""

    marks: list[Mark] = field(default_factory=list)
    starts: array[float] = field(default_factory=lambda: array("d"))
    ends: array[float] = field(default_factory=lambda: array("d"))
    threads: array[int] = field(default_factory=lambda: array("q"))
    roles: array[int] = field(default_factory=lambda: array("b"))
    launches: dict[int, float] = field(default_factory=dict)
    works: dict[int, tuple[float, float]] = field(default_factory=dict)  # by correlation: the launch's kernels
    thread_numbers: dict[int | str, int] = field(default_factory=dict)

    def add(self, event: _Event) -> None:
        if event.ph != "X":
            return
        correlation = event.args.correlation if event.args else None
        if event.cat == "cpu_op":
            self.starts.append(event.ts)
            self.ends.append(event.ts + event.dur)
            self.threads.append(self._thread(event.tid))
            self.roles.append(role_of(event.name))
        elif event.cat in ("user_annotation", "python_function"):
            if is_kept_mark(event.name):
                self.marks.append(Mark(event.name, event.ts, event.ts + event.dur, self._thread(event.tid)))
        elif correlation is not None and event.cat in _LAUNCHES:
            self.launches[correlation] = event.ts
        elif correlation is not None and event.cat in _GPU_WORK and not is_point_to_point(event.name):
            start_us, end_us = self.works.get(correlation, (event.ts, event.ts))
            self.works[correlation] = min(start_us, event.ts), max(end_us, event.ts + event.dur)

    def operations(self) -> Operations:
        """Of a thread's operations those that begin when all before them have ended."""
        start, end = np.frombuffer(self.starts), np.frombuffer(self.ends)
        thread, role = np.frombuffer(self.threads, np.int64), np.frombuffer(self.roles, np.int8)
        kept = []
        for number in self.thread_numbers.values():
            own = np.flatnonzero(thread == number)
            own = own[np.lexsort((-end[own], start[own]))]
            ended = np.maximum.accumulate(end[own])
            kept.append(own[np.concatenate(([True], start[own][1:] >= ended[:-1]))] if own.size else own)
        outer = np.concatenate(kept) if kept else np.zeros(0, np.int64)
        outer = outer[np.argsort(start[outer], kind="stable")]
        return Operations(start_us=start[outer], end_us=end[outer], thread=thread[outer], role=role[outer])

    def kernels(self) -> Kernels:
        rows = sorted((self.launches[x], *times) for x, times in self.works.items() if x in self.launches)
        columns = np.array(rows, dtype=np.float64).reshape(-1, 3).T
        return Kernels(launch_us=columns[0], start_us=columns[1], end_us=columns[2])

    def _thread(self, tid: int | str) -> int:
        return self.thread_numbers.setdefault(tid, len(self.thread_numbers))


def _opened(path: Path) -> BinaryIO:
    with path.open("rb") as stream:
        is_zipped = stream.read(2) == b"\x1f\x8b"
    return cast(BinaryIO, gzip.open(path, "rb")) if is_zipped else path.open("rb")


def _read_blocks(stream: BinaryIO, collected: _Collected, name: str, block_bytes: int) -> _Header:
    """Read every event into `collected`; the text before and after the events is the header."""
    before, rest = _head(stream, name, block_bytes)
    for chunk in iter(lambda: stream.read(block_bytes), b""):
        rest += chunk
        cut = _last_beginning(rest)
        if cut:
            _collect(rest[:cut], collected, name)
            rest = rest[cut + 1 :]
    end = _end_of_events(rest, name)
    _collect(rest[:end], collected, name)
    try:
        return _HEADER.decode(before + b"null" + rest[end + 1 :])
    except msgspec.MsgspecError as error:
        raise FileError(f"{name} is cut off or is not JSON ({error}); {_REMEDY}") from error


def _head(stream: BinaryIO, name: str, block_bytes: int) -> tuple[bytes, bytes]:
    """The text before the list of events, and what was read of the list."""
    text = b""
    for chunk in iter(lambda: stream.read(block_bytes), b""):
        text += chunk
        key = text.find(b'"traceEvents"')
        bracket = text.find(b"[", key) if key >= 0 else -1
        if bracket >= 0:
            return text[:bracket], text[bracket + 1 :]
    raise FileError(f"{name} has no list of traceEvents; {_REMEDY}")


def _last_beginning(text: bytes) -> int:
    """The place of the comma before the last event that begins with its phase; 0 for none.

    Within a string the quotation marks of `"ph"` would be escaped, so what looks like a beginning is one.
    """
    place = len(text)
    while (place := text.rfind(b'"ph"', 0, place)) > 0:
        brace = len(text[max(0, place - 64) : place].rstrip()) - 1 + max(0, place - 64)
        comma = len(text[max(0, brace - 64) : brace].rstrip()) - 1 + max(0, brace - 64)
        if text[brace : brace + 1] == b"{" and text[comma : comma + 1] == b",":
            return comma
    return 0


def _end_of_events(text: bytes, name: str) -> int:
    """The place of the bracket that closes the list: after it comes no further event."""
    place = len(text)
    while (place := text.rfind(b"]", 0, place)) >= 0:
        try:
            _EVENTS.decode(b"[" + text[:place] + b"]")
        except msgspec.ValidationError as error:
            raise _wrong(name, error) from error
        except msgspec.DecodeError:
            continue
        return place
    raise FileError(f"{name} is cut off: the list of traceEvents does not end; {_REMEDY}")


def _collect(block: bytes, collected: _Collected, name: str) -> None:
    for event in _decoded(block, name):
        collected.add(event)


def _decoded(block: bytes, name: str) -> Iterator[_Event]:
    try:
        return iter(_EVENTS.decode(b"[" + block + b"]"))
    except msgspec.MsgspecError as error:
        raise _wrong(name, error) from error


def _wrong(name: str, error: Exception) -> FileError:
    return FileError(f"{name} has an event that is none ({error}); {_REMEDY}")
