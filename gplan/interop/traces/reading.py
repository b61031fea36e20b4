"""Read a torch.profiler trace (Chrome JSON, plain or gzipped): the times of a pipeline, and what its names mean.

Such files are hundreds of megabytes, mostly the arguments of nested operations, which are passed over; reading takes
about twice the size of the unzipped file. Times are microseconds since `base_ns` (nanoseconds since 1970).

torch.distributed.pipelining writes `PP:2F0` around every action of the schedules that its runtime runs (gplan's engine
is one), with two actions in `PP:(0F3;3B1)OVERLAP_F_B`; ScheduleGPipe writes `Forward 0` and `Backward 0`; Schedule1F1B
writes nothing. With stacks (`with_stack=True`) all of them record the stage's own functions, and Megatron-core's schedules
theirs, which write no ranges either: what they mark by NVTX is not in a trace of torch.profiler.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

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

    @property
    def end_us(self) -> float:
        return self.ts + self.dur

    @property
    def correlation(self) -> int | None:
        """The number that a kernel and its launch share."""
        return self.args.correlation if self.args else None


class _Distributed(msgspec.Struct):
    rank: int | None = None


class _File(msgspec.Struct):
    traceEvents: list[_Event]
    distributedInfo: _Distributed | None = None
    host_name: str | None = None
    baseTimeNanoseconds: int | None = None


_FILE = msgspec.json.Decoder(_File, strict=False)


def read_trace(path: Path) -> RankTrace:
    """Read the trace of one rank; raises FileError if it cannot be read or is no trace."""
    try:
        content = path.read_bytes()
        found = _FILE.decode(gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content)
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        said = getattr(error, "strerror", None) or str(error)
        raise FileError(f"{path} cannot be read: {said}; {_REMEDY}") from error
    except msgspec.MsgspecError as error:
        raise FileError(f"{path} is no trace, or is cut off: {error}; {_REMEDY}") from error
    events = [x for x in found.traceEvents if x.ph == "X"]
    threads = {tid: number for number, tid in enumerate(dict.fromkeys(x.tid for x in events))}
    marks = [
        Mark(x.name, x.ts, x.end_us, threads[x.tid])
        for x in events
        if x.cat in ("user_annotation", "python_function") and is_kept_mark(x.name)
    ]
    return RankTrace(
        name=str(path),
        rank=found.distributedInfo.rank if found.distributedInfo else None,
        host=found.host_name,
        base_ns=found.baseTimeNanoseconds,
        marks=tuple(sorted(marks, key=lambda x: (x.start_us, -x.end_us))),
        operations=_outer_operations([x for x in events if x.cat == "cpu_op"], threads),
        kernels=_kernels(events),
    )


def _outer_operations(events: Sequence[_Event], threads: Mapping[int | str, int]) -> Operations:
    """Of a thread's operations those that begin when all before them have ended."""
    start, end = (np.array(column, dtype=np.float64) for column in ([x.ts for x in events], [x.end_us for x in events]))
    thread = np.array([threads[x.tid] for x in events], dtype=np.int64)
    role = np.array([role_of(x.name) for x in events], dtype=np.int8)
    kept = []
    for number in np.unique(thread):
        own = np.flatnonzero(thread == number)
        own = own[np.lexsort((-end[own], start[own]))]
        ended = np.maximum.accumulate(end[own])
        kept.append(own[np.concatenate(([True], start[own][1:] >= ended[:-1]))])
    outer = np.concatenate(kept) if kept else np.zeros(0, np.int64)
    outer = outer[np.argsort(start[outer], kind="stable")]
    return Operations(start_us=start[outer], end_us=end[outer], thread=thread[outer], role=role[outer])


def _kernels(events: Sequence[_Event]) -> Kernels:
    """One row for each launch: from the first of its kernels to the last."""
    launches = {x.correlation: x.ts for x in events if x.correlation is not None and x.cat in _LAUNCHES}
    works: dict[int, Times] = {}
    for x in events:
        if x.correlation is not None and x.cat in _GPU_WORK and "SendRecv" not in x.name:
            start_us, end_us = works.get(x.correlation, (x.ts, x.ts))
            works[x.correlation] = min(start_us, x.ts), max(end_us, x.end_us)
    rows = sorted((launches[x], *times) for x, times in works.items() if x in launches)
    columns = np.array(rows, dtype=np.float64).reshape(-1, 3).T
    return Kernels(launch_us=columns[0], start_us=columns[1], end_us=columns[2])
