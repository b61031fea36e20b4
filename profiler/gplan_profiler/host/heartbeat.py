"""The heartbeat of a rank: its step, action, layer or wait, written to a small memory-mapped file.

The process that supervises the run reads it to detect a rank that hangs and to name the place in an error. Each
update is one write of integers and a time, about a microsecond, and outlives the process. A record read during a
write may mix old and new fields; a rank that hangs or died does not write. Without a file the record stays in
memory.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from gplan.core import BACKWARD_KINDS, ActionKind

Activity: TypeAlias = Literal["starting", "loading", "capturing", "meeting", "restoring", "reading", "saving", "ending"]
"""What a rank does besides actions; "reading" is taking a batch, "meeting" is joining the process group."""

Awaited: TypeAlias = Literal["ranks", "neighbours", "sums"]
"""What a rank can wait for: all ranks (a barrier), tensors of other stages, an all-reduce."""

_KINDS: tuple[str, ...] = (*get_args(Activity), *ActionKind)
_KIND_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}
_AWAITED: tuple[Awaited, ...] = get_args(Awaited)
_NONE = -1

_RECORD = struct.Struct("<6qd")  # step, kind, stage, micro-batch, layer, awaited, time

_PLACES = {
    "starting": "while starting",
    "loading": "while loading the model",
    "capturing": "while capturing the model",
    "meeting": "while joining the other processes",
    "restoring": "while loading a checkpoint",
    "reading": "taking a batch",
    "saving": "saving a checkpoint",
    "ending": "while ending",
    **{kind.value: kind.words for kind in ActionKind},
}
_WAITS = {
    "ranks": "for all ranks to come as far",
    "neighbours": "for other stages",
    "sums": "for the sum over several ranks",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatStatus:
    """The last recorded position of a rank."""

    step: int | None  # from 0; shown from 1
    kind: str  # an Activity or the letter of an ActionKind
    stage: int | None
    microbatch: int | None
    layer: str | None
    awaited: Awaited | None
    moved_s: float  # time of the update, by time.monotonic

    @property
    def is_starting(self) -> bool:
        """Whether the interpreter is still starting and importing."""
        return self.kind == "starting"

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for another rank."""
        return self.awaited is not None

    @property
    def place(self) -> str:
        """The position in words, such as "in step 12, forward of micro-batch 3 on stage 1, layer blocks.4"."""
        words = [f"in step {self.step + 1}"] if self.step is not None else []
        if self.awaited is not None:
            words.append(f"waiting {_WAITS[self.awaited]}{on_stage(None, self.stage)}")
            return ", ".join(words)
        of = None if self.kind == ActionKind.OPTIMIZER else self.microbatch
        words.append(_PLACES[self.kind] + on_stage(of, self.stage))
        if self.layer is not None:
            words.append(at_layer(self.layer, self.kind))
        return ", ".join(words)


class Heartbeat:
    """Writes the position of this process."""

    def __init__(self, path: Path | None = None, *, stage: int | None = None) -> None:
        """Write to the file `path`, or to memory if None. `stage` is this process's stage if it has only one.

        Raises OSError if the file cannot be written.
        """
        self._stage = _NONE if stage is None else stage
        self._fields: tuple[int, ...] = ()  # all but the time
        self._notes: bytearray | mmap.mmap = bytearray(_RECORD.size)
        if path is not None:
            with path.open("wb+") as file:
                file.write(self._notes)
                file.flush()  # so that a full disk raises here
                self._notes = mmap.mmap(file.fileno(), _RECORD.size)
        self._write(_NONE, _KIND_NUMBERS["starting"], self._stage)

    def enter_step(self, step: int) -> None:
        """A step begins with reading its batch."""
        self._write(step, _KIND_NUMBERS["reading"], self._stage)

    def enter_action(self, kind: ActionKind | Activity, stage: int = _NONE, microbatch: int = _NONE) -> None:
        """An action of the schedule or another activity begins."""
        self._write(self._fields[0], _KIND_NUMBERS[kind], stage if stage != _NONE else self._stage, microbatch)

    def enter_layer(self, layer: int) -> None:
        """A layer begins; `layer` is its index in the plan's order."""
        self._write(*self._fields[:4], layer)

    def enter_wait(self, awaited: Awaited) -> None:
        """A wait for other ranks begins and lasts until the next update."""
        self._write(*self._fields[:5], _AWAITED.index(awaited))

    @contextmanager
    def waiting(self, awaited: Awaited) -> Iterator[None]:
        """The block waits for other ranks. After an error the position stays."""
        self.enter_wait(awaited)
        yield
        self._write(*self._fields[:5])

    def read(self, layer_names: Sequence[str]) -> HeartbeatStatus:
        """Return this process's position."""
        found = _unpacked(bytes(self._notes[: _RECORD.size]), layer_names)
        assert found is not None
        return found

    def _write(self, *fields: int) -> None:
        """Write the first fields; the others have no value now."""
        self._fields = (*fields, _NONE, _NONE, _NONE)[:6]
        _RECORD.pack_into(self._notes, 0, *self._fields, time.monotonic())


def read_heartbeat(path: Path, layer_names: Sequence[str]) -> HeartbeatStatus | None:
    """Return the position in a heartbeat file; None before the first update."""
    try:
        return _unpacked(path.read_bytes(), layer_names)
    except FileNotFoundError:
        return None


def heartbeat_file(folder: Path, rank: int) -> Path:
    """Return the heartbeat file of a rank."""
    return folder / f"rank-{rank}.where"


def _unpacked(record: bytes, layer_names: Sequence[str]) -> HeartbeatStatus | None:
    if len(record) < _RECORD.size:
        return None
    step_number, kind, *numbers, moved_s = _RECORD.unpack(record)
    step, stage, microbatch, layer, awaited = (None if x == _NONE else x for x in (step_number, *numbers))
    return HeartbeatStatus(
        step=step,
        kind=_KINDS[kind],
        stage=stage,
        microbatch=microbatch,
        layer=layer_names[layer] if layer is not None else None,
        awaited=_AWAITED[awaited] if awaited is not None else None,
        moved_s=moved_s,
    )


def at_layer(layer: str, kind: str | None) -> str:
    """The layer in words. A backward is only located to be after the layer that it recomputed last."""
    return f"after recomputing {layer}" if kind in BACKWARD_KINDS else f"layer {layer}"


def on_stage(microbatch: int | None, stage: int | None) -> str:
    """Micro-batch and stage in words, where given."""
    of = f" of micro-batch {microbatch}" if microbatch is not None else ""
    return of + (f" on stage {stage}" if stage is not None else "")
