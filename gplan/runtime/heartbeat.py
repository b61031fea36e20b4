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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from gplan.core import BACKWARD_KINDS, Action, ActionKind, Schedule
from gplan.schedules.dependencies import dependencies_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerWait:
    """A stage of this rank waits for tensors of a neighbour on another rank, or for that neighbour to take its own."""

    awaited: Awaited
    stage: int
    neighbour: int
    microbatch: int  # -1: of any


def waits_by_action(schedule: Schedule, device: int) -> dict[Action | None, PeerWait | None]:
    """Return what a device waits for after each of its actions, by the schedule; key None: before the first."""
    order = schedule.orders[device]
    needs = dependencies_of([x for own in schedule.orders for x in own], schedule.num_stages)
    found: dict[Action | None, PeerWait | None] = {}
    for action, following in zip((None, *order), order, strict=False):
        need = needs.get(following)
        found[action] = None
        if need is not None and schedule.devices[need.stage] != device:
            awaited: Awaited = "activations" if following.kind is ActionKind.FORWARD else "gradients"
            found[action] = PeerWait(
                awaited=awaited, stage=following.stage, neighbour=need.stage, microbatch=following.microbatch
            )
    found[order[-1]] = _last_wait(schedule, device)
    return found


def _last_wait(schedule: Schedule, device: int) -> PeerWait | None:
    """After its last action a device waits until its last output is received."""
    for action in reversed(schedule.orders[device]):
        if action.kind is ActionKind.WEIGHT_GRADIENT:
            continue
        target = action.receiver
        if 0 <= target < schedule.num_stages and schedule.devices[target] != device:
            return PeerWait(awaited="receiver", stage=action.stage, neighbour=target, microbatch=_NONE)
    return None


Activity: TypeAlias = Literal["starting", "loading", "capturing", "meeting", "restoring", "reading", "saving", "ending"]
"""What a rank does besides actions; "reading" is taking a batch, "meeting" is joining the process group."""

Awaited: TypeAlias = Literal["ranks", "activations", "gradients", "receiver", "sums"]
"""What a rank can wait for: all ranks (a barrier), a neighbour's tensors, a neighbour to receive, an all-reduce."""

_KINDS: tuple[str, ...] = (*get_args(Activity), *ActionKind)
_KIND_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}
_AWAITED: tuple[Awaited, ...] = get_args(Awaited)
_AWAITED_NUMBERS = {awaited: number for number, awaited in enumerate(_AWAITED)}
_NONE = -1

# Fields: step, kind, stage, micro-batch, layer, awaited, its stage, its micro-batch, time. An update writes all fields
# from its first one to the end.
_RECORD, _FROM_KIND, _FROM_LAYER, _FROM_AWAITED = (struct.Struct(f"<{n}qd") for n in (8, 7, 4, 3))
_STAGE = struct.Struct("<q")
_KIND_AT, _STAGE_AT, _LAYER_AT, _AWAITED_AT = 8, 16, 32, 40

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
    "activations": "for the activations",
    "gradients": "for the gradients",
    "receiver": "for what it sent to be taken",
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
    awaited_stage: int | None
    awaited_microbatch: int | None
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
        if self.awaited is None:
            of = None if self.kind == ActionKind.OPTIMIZER else self.microbatch
            words.append(_PLACES[self.kind] + on_stage(of, self.stage))
        else:
            sender = f" from stage {self.awaited_stage}" if self.awaited in ("activations", "gradients") else ""
            receiver = f" by stage {self.awaited_stage}" if self.awaited == "receiver" else ""
            microbatch = on_stage(self.awaited_microbatch, None)
            words.append(f"waiting {_WAITS[self.awaited]}{microbatch}{sender}{receiver}{on_stage(None, self.stage)}")
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
        self._notes = bytearray(_RECORD.size) if path is None else _mapped(path)
        self._note("starting", _NONE)

    def enter_step(self, step: int) -> None:
        """A step begins with reading its batch."""
        self._note("reading", step)

    def enter_action(self, kind: ActionKind | Activity, stage: int = _NONE, microbatch: int = _NONE) -> None:
        """An action of the schedule or another activity begins."""
        fields = (_KIND_NUMBERS[kind], stage if stage != _NONE else self._stage, microbatch)
        _FROM_KIND.pack_into(self._notes, _KIND_AT, *fields, _NONE, _NONE, _NONE, _NONE, time.monotonic())

    def enter_layer(self, layer: int) -> None:
        """A layer begins; `layer` is its index in the plan's order."""
        _FROM_LAYER.pack_into(self._notes, _LAYER_AT, layer, _NONE, _NONE, _NONE, time.monotonic())

    def enter_wait(
        self, awaited: Awaited, *, stage: int = _NONE, microbatch: int = _NONE, at: int | None = None
    ) -> None:
        """A wait for other ranks begins and lasts until the next update; `stage` is the neighbour.

        `at` is the stage of this process that waits, if it differs from the last active one.
        """
        if at is not None:
            _STAGE.pack_into(self._notes, _STAGE_AT, at)
        number = _AWAITED_NUMBERS[awaited]
        _FROM_AWAITED.pack_into(self._notes, _AWAITED_AT, number, stage, microbatch, time.monotonic())

    @contextmanager
    def waiting(self, awaited: Awaited) -> Iterator[None]:
        """The block waits for other ranks. After an error the position stays."""
        self.enter_wait(awaited)
        yield
        _FROM_AWAITED.pack_into(self._notes, _AWAITED_AT, _NONE, _NONE, _NONE, time.monotonic())

    def read(self, layer_names: Sequence[str]) -> HeartbeatStatus:
        """Return this process's position."""
        found = _unpacked(bytes(self._notes[: _RECORD.size]), layer_names)
        assert found is not None
        return found

    def _note(self, kind: Activity, step: int) -> None:
        fields = (step, _KIND_NUMBERS[kind], self._stage)
        _RECORD.pack_into(self._notes, 0, *fields, _NONE, _NONE, _NONE, _NONE, _NONE, time.monotonic())


def read_heartbeat(path: Path, layer_names: Sequence[str]) -> HeartbeatStatus | None:
    """Return the position in a heartbeat file; None before the first update."""
    try:
        return _unpacked(path.read_bytes(), layer_names)
    except FileNotFoundError:
        return None


def heartbeat_file(folder: Path, rank: int) -> Path:
    """Return the heartbeat file of a rank."""
    return folder / f"rank-{rank}.where"


def status_reader(
    folder: Path, layer_names: Sequence[str], *, stages: Sequence[int | None]
) -> Callable[[int], HeartbeatStatus]:
    """Return a function from rank to its position; a rank without a file is starting.

    `stages` has for each device of a replica its stage, or None if it holds several.
    """

    def look(rank: int) -> HeartbeatStatus:
        found = read_heartbeat(heartbeat_file(folder, rank), layer_names)
        stage = stages[rank % len(stages)]
        return found or _status(
            (_NONE, _KIND_NUMBERS["starting"], _NONE if stage is None else stage, *[_NONE] * 5, 0.0), ()
        )

    return look


def _mapped(path: Path) -> mmap.mmap:
    """Create and map a file of one empty record; written before it is mapped, so that a full disk raises OSError here."""
    with path.open("wb+") as file:
        file.write(bytes(_RECORD.size))
        file.flush()
        return mmap.mmap(file.fileno(), _RECORD.size)


def _unpacked(record: bytes, layer_names: Sequence[str]) -> HeartbeatStatus | None:
    if len(record) < _RECORD.size:
        return None
    fields = _RECORD.unpack(record)
    return None if fields[-1] == 0.0 else _status(fields, layer_names)


def _status(fields: Sequence[Any], layer_names: Sequence[str]) -> HeartbeatStatus:
    step_number, kind, *numbers, moved_s = fields
    step, stage, microbatch, layer, awaited, *of = (None if x == _NONE else x for x in (step_number, *numbers))
    return HeartbeatStatus(
        step=step,
        kind=_KINDS[kind],
        stage=stage,
        microbatch=microbatch,
        layer=layer_names[layer] if layer is not None else None,
        awaited=_AWAITED[awaited] if awaited is not None else None,
        awaited_stage=of[0],
        awaited_microbatch=of[1],
        moved_s=moved_s,
    )


def at_layer(layer: str, kind: str | None) -> str:
    """The layer in words. A backward is only located to be after the layer that it recomputed last."""
    return f"after recomputing {layer}" if kind in BACKWARD_KINDS else f"layer {layer}"


def on_stage(microbatch: int | None, stage: int | None) -> str:
    """Micro-batch and stage in words, where given."""
    of = f" of micro-batch {microbatch}" if microbatch is not None else ""
    return of + (f" on stage {stage}" if stage is not None else "")
