"""Read a torch.profiler trace (Chrome JSON, plain or gzipped): the times of a pipeline, and what its names mean.

Such files are hundreds of megabytes, mostly nested operations and their arguments, so they are read in blocks. A block
ends where an event begins with its phase, as the profiler writes them; it is decoded without arguments and reduced to
columns of numbers, about 20 bytes per operation. A file whose events begin otherwise is read as one block. Times are
microseconds since `base_ns` (nanoseconds since 1970).

torch.distributed.pipelining writes `PP:2F0` around every action of the schedules that its runtime runs (gplan's engine
is one), with two actions in `PP:(0F3;3B1)OVERLAP_F_B`; ScheduleGPipe writes `Forward 0` and `Backward 0`; Schedule1F1B
writes nothing. With stacks (`with_stack=True`) all of them record the stage's own functions, and Megatron-core's schedules
theirs, which write no ranges either: what they mark by NVTX is not in a trace of torch.profiler.
"""

from __future__ import annotations

import gzip
import re
import zlib
from array import array
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from gplan.core import Action, ActionKind
from gplan.core.errors import FileError

_GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_REMEDY = "expected what prof.export_chrome_trace of torch.profiler writes"


_PLAIN = re.compile(r"PP:([0-9]{1,9}[FBIW][0-9]{1,9})")
_OVERLAPPED = re.compile(r"PP:\(([0-9]{1,9}F[0-9]{1,9});([0-9]{1,9}B[0-9]{1,9})\)OVERLAP_F_B")
_SENT = re.compile(r"PP:([0-9]{1,9})(SEND|RECV)_([FB])[0-9]{1,9}")
_OF_ONE_STAGE = re.compile(r"(Forward|Backward) ([0-9]{1,9})")
_FUNCTION = re.compile(
    r"(?:.*/)?(?:torch/distributed/pipelining/stage\.py\([0-9]+\): (forward|backward)_one_chunk"
    r"|megatron/core/pipeline_parallel/schedules\.py\([0-9]+\): (forward|backward)_step)$"
)
_STEP = re.compile(r"ProfilerStep#([0-9]+)")
_UPDATE = re.compile(r"Optimizer\.(step|zero_grad)#")


class Mark(NamedTuple):
    """A named time range of one thread."""

    name: str
    start_us: float
    end_us: float
    thread: int


class OperationRole(IntEnum):
    """What an operation does in a pipeline."""

    COMPUTES = 0
    SENDS = 1
    RECEIVES = 2
    GOES_BACK = 3  # part of a backward
    SPLITS = 4  # cuts the batch into micro-batches, before the first action


BETWEEN = (OperationRole.SENDS, OperationRole.RECEIVES)
"""Operations that end a run of computing operations."""


def role_of(name: str) -> int:
    """The role of an operation by its name."""
    if name.startswith("autograd::engine::"):
        return OperationRole.GOES_BACK
    if name.startswith("c10d::send"):
        return OperationRole.SENDS
    if name.startswith("c10d::recv"):
        return OperationRole.RECEIVES
    return OperationRole.SPLITS if name == "aten::tensor_split" else OperationRole.COMPUTES


def is_kept_mark(name: str) -> bool:
    """Whether a range is about the pipeline."""
    return any(x.match(name) for x in (_PLAIN, _OVERLAPPED, _SENT, _OF_ONE_STAGE, _FUNCTION, _STEP, _UPDATE))


def actions_of(name: str) -> tuple[Action, ...]:
    """The actions that a range of the runtime names, in their order: mostly one, none for other ranges.

    >>> [str(x) for x in actions_of("PP:(0F3;3B1)OVERLAP_F_B")]
    ['0F3', '3B1']
    """
    match = _PLAIN.fullmatch(name) or _OVERLAPPED.fullmatch(name)
    return tuple(Action.parse(x) for x in match.groups()) if match else ()


def neighbour_of(name: str) -> int | None:
    """The stage that a range sends to or receives from; None for other ranges."""
    match = _SENT.fullmatch(name)
    if match is None:
        return None
    return int(match[1]) + (1 if (match[2] == "SEND") == (match[3] == "F") else -1)


def one_stage_action(name: str, stage: int) -> Action | None:
    """The action of a range that names no stage; None for other ranges."""
    match = _OF_ONE_STAGE.fullmatch(name)
    return Action(stage, ActionKind(match[1][0]), int(match[2])) if match else None


def function_kind(name: str) -> ActionKind | None:
    """The kind of action that a trainer's own function runs; None for other ranges.

    >>> function_kind("megatron/core/pipeline_parallel/schedules.py(311): forward_step").value
    'F'
    """
    match = _FUNCTION.fullmatch(name)
    return ActionKind((match[1] or match[2])[0].upper()) if match else None


def step_number(name: str) -> int | None:
    """The number of the profiler's step; None for other ranges."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def is_update(name: str) -> bool:
    """Whether a range is an optimizer's."""
    return _UPDATE.match(name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """Operations that are not nested in others of their thread, in order of time; columns of the same length."""

    start_us: NDArray[np.float64]
    end_us: NDArray[np.float64]
    thread: NDArray[np.int64]
    role: NDArray[np.int8]

    def within(self, stretch: Mark) -> Operations:
        """Those on the range's thread that begin within it."""
        first, end = np.searchsorted(self.start_us, [stretch.start_us, stretch.end_us])
        kept = first + np.flatnonzero(self.thread[first:end] == stretch.thread)
        return Operations(
            start_us=self.start_us[kept], end_us=self.end_us[kept], thread=self.thread[kept], role=self.role[kept]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """GPU work except sends and receives, in order of launch; columns of the same length."""

    launch_us: NDArray[np.float64]
    start_us: NDArray[np.float64]
    end_us: NDArray[np.float64]


Times = tuple[float, float]
"""Start and end in microseconds of the trace's clock."""


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """The recording of one process: what its device computed, and when within a range.

    A kernel belongs to the range in which it was launched, by any thread, because on a GPU a backward runs on its own
    threads. Operations count if they are on the range's thread, after its last receive and before the next send.
    """

    name: str  # of the file
    rank: int | None  # None: not in the file
    host: str | None
    base_ns: int | None
    marks: tuple[Mark, ...]  # in order of time
    operations: Operations
    kernels: Kernels

    @property
    def has_kernels(self) -> bool:
        """Whether the trace has GPU times, which are then used."""
        return self.kernels.launch_us.size > 0

    def times(self, stretch: Mark) -> Times | None:
        """From the first kernel or operation of a range to the last, without sending and waiting to receive; None if
        nothing was computed."""
        if self.has_kernels:
            first, end = np.searchsorted(self.kernels.launch_us, [stretch.start_us, stretch.end_us])
            if first == end:
                return None
            return float(self.kernels.start_us[first:end].min()), float(self.kernels.end_us[first:end].max())
        own = self.operations.within(stretch)
        received = np.flatnonzero(own.role == OperationRole.RECEIVES)
        after = int(received[-1]) + 1 if received.size else 0
        sent = np.flatnonzero(own.role[after:] == OperationRole.SENDS)
        end = after + int(sent[0]) if sent.size else own.role.size
        return None if after == end else (float(own.start_us[after]), float(own.end_us[end - 1]))

    def turning_us(self, stretch: Mark) -> float:
        """When the first backward within a range begins, on any thread; the end of the range if there is none."""
        within = self.operations.start_us[self._backwards]
        first = int(np.searchsorted(within, stretch.start_us))
        return float(within[first]) if first < within.size and within[first] < stretch.end_us else stretch.end_us

    @cached_property
    def _backwards(self) -> NDArray[np.int64]:
        return np.flatnonzero(self.operations.role == OperationRole.GOES_BACK)


def read_trace(path: Path, *, block_bytes: int = 8 * 2**20) -> RankTrace:
    """Read the trace of one rank, `block_bytes` at a time; raises FileError if it cannot be read or is no trace."""
    collected = _Collected()
    try:
        with path.open("rb") as stream:
            is_zipped = stream.read(2) == b"\x1f\x8b"
        with cast(BinaryIO, gzip.open(path, "rb")) if is_zipped else path.open("rb") as stream:
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
        elif correlation is not None and event.cat in _GPU_WORK and "SendRecv" not in event.name:
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
    try:
        events = _EVENTS.decode(b"[" + block + b"]")
    except msgspec.MsgspecError as error:
        raise _wrong(name, error) from error
    for event in events:
        collected.add(event)


def _wrong(name: str, error: Exception) -> FileError:
    return FileError(f"{name} has an event that is none ({error}); {_REMEDY}")
