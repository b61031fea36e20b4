"""Where a rank is: its step, action and layer, noted in a small file as it goes, to be read when it cannot speak.

Each note is one write of integers and a time into a mapped file, about a microsecond, so the last one outlives the
process, however it ends; the process that watches the run reads it. A note made while it is read may come out half old
and half new; of a rank that is stuck, stopped or dead there is only one. Without a file the notes stay in memory, where
the rank itself can read them.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from gplan.core import BACKWARD_KINDS, Action, ActionKind, Schedule
from gplan.schedules.dependencies import dependencies_of

# For whom a rank waits between its actions, said beforehand from the schedule.


_ANY = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A stage of this rank waits for something to come from, or to be taken by, a neighbour on another one."""

    awaited: Awaited
    stage: int
    neighbour: int
    microbatch: int  # -1: of any


def waits_by_action(schedule: Schedule, device: int) -> dict[Action | None, Wait | None]:
    """For whom a device waits after each of its actions, by what comes next; under None before the first."""
    order = schedule.orders[device]
    needs = dependencies_of([x for own in schedule.orders for x in own], schedule.num_stages)
    found: dict[Action | None, Wait | None] = {}
    for action, following in zip((None, *order), order, strict=False):
        need = needs.get(following)
        found[action] = None
        if need is not None and schedule.devices[need.stage] != device:
            awaited: Awaited = "activations" if following.kind is ActionKind.FORWARD else "gradients"
            found[action] = Wait(
                awaited=awaited, stage=following.stage, neighbour=need.stage, microbatch=following.microbatch
            )
    found[order[-1]] = _last_wait(schedule, device)
    return found


def _last_wait(schedule: Schedule, device: int) -> Wait | None:
    """At the end a device waits for its last output to be taken."""
    for action in reversed(schedule.orders[device]):
        if action.kind is ActionKind.WEIGHT_GRADIENT:
            continue
        target = action.stage + (1 if action.kind is ActionKind.FORWARD else -1)
        if 0 <= target < schedule.num_stages and schedule.devices[target] != device:
            return Wait(awaited="receiver", stage=action.stage, neighbour=target, microbatch=_ANY)
    return None


Activity: TypeAlias = Literal["starting", "loading", "capturing", "meeting", "restoring", "reading", "saving", "ending"]
"""What a rank does beside the actions of a schedule; "reading" is taking a batch, "meeting" joining the others."""

Awaited: TypeAlias = Literal["ranks", "activations", "gradients", "receiver", "sums"]
"""What a rank can wait for: all ranks (a barrier), a neighbour's tensors, a neighbour to take its own,
an all-reduce."""

_KINDS: tuple[str, ...] = (*get_args(Activity), *ActionKind)
_KIND_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}
_AWAITED: tuple[Awaited, ...] = get_args(Awaited)
_AWAITED_NUMBERS = {awaited: number for number, awaited in enumerate(_AWAITED)}
_NONE = -1

# Each note writes all from its own field to the end: step, kind, stage, micro-batch, layer, awaited, its stage, its
# micro-batch, and the time.
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
class RankStatus:
    """Where a rank is, or was last."""

    step: int | None  # from 0; people read it from 1, as in checkpoints
    kind: str  # an Activity or the letter of an ActionKind
    stage: int | None
    microbatch: int | None
    layer: str | None
    awaited: Awaited | None
    awaited_stage: int | None
    awaited_microbatch: int | None
    moved_s: float  # when it noted this, by time.monotonic

    @property
    def is_starting(self) -> bool:
        """Whether it has not said what it does yet: the interpreter and its imports."""
        return self.kind == "starting"

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for another rank."""
        return self.awaited is not None

    @property
    def place(self) -> str:
        """What it does, such as "in step 12, forward of micro-batch 3 on stage 1, layer blocks.4"."""
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
    """The notes of this process."""

    def __init__(self, path: Path | None = None, *, stage: int | None = None) -> None:
        """Notes for others in a file, which is made anew, or without one for this process alone.

        `stage` is that of this process where it has only one. Raises OSError where the file cannot be written.
        """
        self._stage = _NONE if stage is None else stage
        self._notes = bytearray(_RECORD.size) if path is None else _mapped(path)
        self._note("starting", _NONE)

    def enter_step(self, step: int) -> None:
        """A step begins, by taking its batch."""
        self._note("reading", step)

    def enter_action(self, kind: ActionKind | Activity, stage: int = _NONE, microbatch: int = _NONE) -> None:
        """An action of a schedule begins, or something else that a rank does."""
        fields = (_KIND_NUMBERS[kind], stage if stage != _NONE else self._stage, microbatch)
        _FROM_KIND.pack_into(self._notes, _KIND_AT, *fields, _NONE, _NONE, _NONE, _NONE, time.monotonic())

    def enter_layer(self, layer: int) -> None:
        """A layer begins, by its number in the plan's order."""
        _FROM_LAYER.pack_into(self._notes, _LAYER_AT, layer, _NONE, _NONE, _NONE, time.monotonic())

    def enter_wait(
        self, awaited: Awaited, *, stage: int = _NONE, microbatch: int = _NONE, at: int | None = None
    ) -> None:
        """A wait for other ranks begins, and lasts until the next note; `stage` is the neighbour.

        `at` is the stage of this process that waits, where it is not the one that was last at work.
        """
        if at is not None:
            _STAGE.pack_into(self._notes, _STAGE_AT, at)
        number = _AWAITED_NUMBERS[awaited]
        _FROM_AWAITED.pack_into(self._notes, _AWAITED_AT, number, stage, microbatch, time.monotonic())

    @contextmanager
    def waiting(self, awaited: Awaited, *, stage: int = _NONE, microbatch: int = _NONE) -> Iterator[None]:
        """What runs inside waits for other ranks; `stage` is the neighbour. After an error the note stays."""
        self.enter_wait(awaited, stage=stage, microbatch=microbatch)
        yield
        _FROM_AWAITED.pack_into(self._notes, _AWAITED_AT, _NONE, _NONE, _NONE, time.monotonic())

    def read(self, layer_names: Sequence[str]) -> RankStatus:
        """Where this process is."""
        found = _where(bytes(self._notes[: _RECORD.size]), layer_names)
        assert found is not None
        return found

    def _note(self, kind: Activity, step: int) -> None:
        fields = (step, _KIND_NUMBERS[kind], self._stage)
        _RECORD.pack_into(self._notes, 0, *fields, _NONE, _NONE, _NONE, _NONE, _NONE, time.monotonic())


def read_heartbeat(path: Path, layer_names: Sequence[str]) -> RankStatus | None:
    """Where the process is that notes in this file; None before its first note. Layers have the plan's numbers."""
    try:
        return _where(path.read_bytes(), layer_names)
    except FileNotFoundError:
        return None


def heartbeat_file(folder: Path, rank: int) -> Path:
    """Where a rank leaves its notes."""
    return folder / f"rank-{rank}.where"


def status_reader(
    folder: Path, layer_names: Sequence[str], *, stages: Sequence[int | None]
) -> Callable[[int], RankStatus]:
    """Looks where a rank is, by the notes that it leaves in a folder; who has left none is starting.

    `stages` has for each device of a replica the stage that it holds, None where it holds several.
    """

    def look(rank: int) -> RankStatus:
        found = read_heartbeat(heartbeat_file(folder, rank), layer_names)
        return found or _starting(stages[rank % len(stages)])

    return look


def _mapped(path: Path) -> mmap.mmap:
    """A file of one empty record; its bytes are written before it is mapped, so that a full disk is an OSError here."""
    with path.open("wb+") as file:
        file.write(bytes(_RECORD.size))
        file.flush()
        return mmap.mmap(file.fileno(), _RECORD.size)


def _where(record: bytes, layer_names: Sequence[str]) -> RankStatus | None:
    if len(record) < _RECORD.size:
        return None
    step_number, kind, *numbers, moved_s = _RECORD.unpack(record)
    if moved_s == 0.0:
        return None
    step, stage, microbatch, layer, awaited, *of = (None if x == _NONE else x for x in (step_number, *numbers))
    return RankStatus(
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


def _starting(stage: int | None) -> RankStatus:
    return RankStatus(
        step=None,
        kind="starting",
        stage=stage,
        microbatch=None,
        layer=None,
        awaited=None,
        awaited_stage=None,
        awaited_microbatch=None,
        moved_s=0.0,
    )


def at_layer(layer: str, kind: str | None) -> str:
    """Where an action of this kind is: at a layer, or, backward, somewhere behind the one that it ran again."""
    return f"after recomputing {layer}" if kind in BACKWARD_KINDS else f"layer {layer}"


def on_stage(microbatch: int | None, stage: int | None) -> str:
    """Of which micro-batch and on which stage, where there are any."""
    of = f" of micro-batch {microbatch}" if microbatch is not None else ""
    return of + (f" on stage {stage}" if stage is not None else "")
