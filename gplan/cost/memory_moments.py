"""What a stage holds, and when: the schedule's order replayed into moments, each priced as a sum of the stage's parts.

A stage always holds its weights, the optimizer's state and the engine's receive buffers; from forward to backward it
holds, per micro-batch in flight, either its whole stash or, with recompute, only a checkpoint (its outputs; its inputs
lie in the receive buffers). What the engine sent (activations forward, gradients back) it keeps until the step ends;
activations that only pass a stage are sent out of the buffers. Gradients appear with the first backward. A recomputing
backward holds its layers' stash anew, beside the checkpoint; on the last stage in its place, as the backward of the
loss, which comes first, frees what the loss kept.

The first half of a split backward leaves the stash and what is pending: what the second half works on and what was sent
back, less what the first half frees of the stash. All that is there until the second half is done. On the first stage,
whose inputs want no gradient, the first half does nothing and the second is the whole backward.

The peak is the largest moment. Without recompute, and with nothing sent, this equals
    W + O + max(n a + tmp, n_G a + tmp + G)
with n the most micro-batches in flight and n_G the most at any backward after the first. A device with several stages
holds most at a moment of one of them, the others resting; all are updated at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gplan.core import Action, ActionKind, RecomputeMode, Schedule, StageMemory, is_recomputed
from gplan.core.plan import Bytes, StageBytes
from gplan.schedules.registry import make_schedule

OPTIMIZER_MOMENT = "optimizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One point of a stage's order at which its memory may peak."""

    action: str
    num_stashes: int
    num_checkpoints: int
    num_recomputing: int  # 1 in a backward that recomputes
    num_pending: int  # of the stashes those between the halves of a backward
    num_done: int  # micro-batches whose backward is behind
    workspace: str  # the field of StageBytes that is in use, or "" for none
    has_gradients: bool


RESTING = Moment(
    action="",
    num_stashes=0,
    num_checkpoints=0,
    num_recomputing=0,
    num_pending=0,
    num_done=0,
    workspace="",
    has_gradients=False,
)
"""Before the first action and after the optimizers."""

_UPDATE = replace(RESTING, action=OPTIMIZER_MOMENT, workspace="optimizer_workspace", has_gradients=True)


@lru_cache(maxsize=4096)
def stage_moments(
    schedule: str, *, num_devices: int, num_microbatches: int, stage: int, recompute: RecomputeMode
) -> tuple[Moment, ...]:
    """The moments of one stage that no other moment dominates; the device's other stages are left out."""
    made = make_schedule(schedule, num_devices=num_devices, num_microbatches=num_microbatches)
    order = [x for x in made.orders[made.devices[stage]] if x.stage == stage]
    ways: dict[tuple[ActionKind, str, bool], list[Moment]] = {}
    for action, moments in replay(order, num_microbatches, recompute):
        for x in moments:
            ways.setdefault((action.kind, x.workspace, x.has_gradients), []).append(x)
    return _undominated([*(corner for way in ways.values() for corner in _corners(_latest(way))), _UPDATE])


def moment_bytes(moment: Moment, parts: StageBytes[Bytes]) -> Bytes:
    """Bytes held at a moment, all categories together."""
    held = parts.weight + parts.optimizer + parts.buffer
    held = held + _activation_bytes(moment, parts)
    if moment.workspace:
        held = held + getattr(parts, moment.workspace)
    return held + parts.gradient if moment.has_gradients else held


def peak_of(moments: Sequence[Moment], parts: StageBytes[NDArray[np.int64]]) -> NDArray[np.int64]:
    """The most that stages hold at any of the moments."""
    peak = moment_bytes(moments[0], parts)
    for moment in moments[1:]:
        peak = np.maximum(peak, moment_bytes(moment, parts))
    return peak


def stage_memory(moments: Sequence[Moment], parts: StageBytes[int]) -> StageMemory:
    """The peak of one stage, by category, and the action at which it occurs."""
    peak = max(moments, key=lambda moment: moment_bytes(moment, parts))
    return memory_at(peak, parts, action=peak.action)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMoment:
    """One point of a device's order: what each of its stages holds then, and in all."""

    action: str
    moments: Mapping[int, Moment]  # by stage
    num_bytes: int


def device_moments(
    schedule: Schedule, device: int, parts: Mapping[int, StageBytes[int]], *, recompute: RecomputeMode
) -> Iterator[DeviceMoment]:
    """All moments of a device's step in order, its stages with these parts: during and after every action."""
    resting = dict.fromkeys(schedule.stages_of(device), RESTING)
    held = {stage: moment_bytes(RESTING, parts[stage]) for stage in resting}
    num_bytes = sum(held.values())
    for action, moments in replay(schedule.orders[device], schedule.num_microbatches, recompute):
        stage = action.stage
        for moment in moments:
            now = moment_bytes(moment, parts[stage])
            num_bytes, held[stage] = num_bytes + now - held[stage], now
            resting = {**resting, stage: moment}
            yield DeviceMoment(action=moment.action, moments=resting, num_bytes=num_bytes)
    updates = dict.fromkeys(resting, _UPDATE)
    num_bytes = sum(moment_bytes(_UPDATE, parts[stage]) for stage in updates)
    yield DeviceMoment(action=OPTIMIZER_MOMENT, moments=updates, num_bytes=num_bytes)


def device_memory(
    schedule: Schedule, device: int, parts: Mapping[int, StageBytes[int]], *, recompute: RecomputeMode
) -> dict[int, StageMemory]:
    """What each stage of a device holds, by category, when the device holds most."""
    peak = max(device_moments(schedule, device, parts, recompute=recompute), key=lambda moment: moment.num_bytes)
    return {stage: memory_at(moment, parts[stage], action=peak.action) for stage, moment in peak.moments.items()}


def memory_at(peak: Moment, parts: StageBytes[int], *, action: str) -> StageMemory:
    """What a stage holds at a moment, by category; `action` is what its device does then."""
    workspace = getattr(parts, peak.workspace) if peak.workspace else 0
    return StageMemory(
        weight_bytes=parts.weight + min(0, workspace),  # sharded replicas have freed what they gathered at the update
        gradient_bytes=parts.gradient if peak.has_gradients else 0,
        optimizer_bytes=parts.optimizer,
        activation_bytes=_activation_bytes(peak, parts),
        workspace_bytes=max(0, workspace),
        buffer_bytes=parts.buffer,
        moment=action,
    )


def _activation_bytes(moment: Moment, parts: StageBytes[Bytes]) -> Bytes:
    kept = (
        moment.num_stashes * parts.stash
        + moment.num_checkpoints * parts.checkpoint
        + moment.num_recomputing * parts.recomputed_stash
    )
    return kept + moment.num_pending * parts.pending + moment.num_done * parts.sent


class _Held(NamedTuple):
    """Micro-batches of which a stage holds something, by what it is; `done` are those whose backward is behind."""

    stashes: int = 0
    checkpoints: int = 0
    pending: int = 0
    done: int = 0
    recomputing: int = 0


def replay(
    order: Sequence[Action], num_microbatches: int, recompute: RecomputeMode
) -> Iterator[tuple[Action, list[Moment]]]:
    """For each action of an order the moments of its stage during and after it."""
    held: dict[int, _Held] = {}
    for action in order:
        again = is_recomputed(action.microbatch, num_microbatches=num_microbatches, recompute=recompute)
        at_work, workspaces, after = _held_during(action, held.get(action.stage, _Held()), again)
        held[action.stage], name = after, str(action)
        yield action, [*(_moment(name, at_work, x) for x in workspaces), _moment(name, after)]


class Change(NamedTuple):
    """What an action changes of what its stage holds, [stashes, checkpoints, pending, done, recomputing] each."""

    at_work: tuple[int, ...]  # while it runs
    workspaces: tuple[str, ...]  # the fields of `StageBytes` in which it works, one after the other
    after: tuple[int, ...]  # from its end on


@lru_cache(maxsize=256)
def change_of(kind: ActionKind, *, is_first: bool, again: bool) -> Change:
    """The change by an action of the first stage or of another one, whose micro-batch is recomputed or not."""
    at_work, workspaces, after = _held_during(Action(0 if is_first else 1, kind, 0), _Held(), again)
    return Change(at_work, workspaces, after)


def _held_during(action: Action, now: _Held, again: bool) -> tuple[_Held, tuple[str, ...], _Held]:
    """What is held during an action, in which workspaces it works, what is held after it.

    `now` is held when it begins; `again` where the micro-batch is recomputed.
    """
    stashes, checkpoints, pending, done, _ = now
    kind, is_first = action.kind, action.stage == 0
    if kind is ActionKind.FORWARD:
        kept = _Held(stashes + (not again), checkpoints + again, pending, done)
        return kept, ("recompute_workspace" if again else "forward_workspace",), kept
    if kind is ActionKind.INPUT_GRADIENT and is_first:
        return now, (), now
    if kind is ActionKind.WEIGHT_GRADIENT and not is_first:
        return now, ("weight_workspace",), _Held(stashes - 1, checkpoints, pending - 1, done + 1)
    if kind is ActionKind.INPUT_GRADIENT:  # while it runs it frees nothing, not even what the loss kept
        workspaces = ("input_workspace", "forward_workspace") if again else ("input_workspace",)
        at_work = _Held(stashes + again, checkpoints, pending, done)
        return at_work, workspaces, _Held(stashes + again, checkpoints - again, pending + 1, done)
    at_work = _Held(stashes, checkpoints - again, pending, done, int(again))
    workspaces = ("recomputing_workspace" if again else "backward_workspace",)
    return at_work, workspaces, _Held(stashes + again - 1, checkpoints - again, pending, done + 1)


def _moment(action: str, held: _Held, workspace: str = "") -> Moment:
    return Moment(
        action=action,
        num_stashes=held.stashes,
        num_checkpoints=held.checkpoints,
        num_recomputing=held.recomputing,
        num_pending=held.pending,
        num_done=held.done,
        workspace=workspace,
        has_gradients=held.done > 0,
    )


def _latest(way: Iterable[Moment]) -> list[Moment]:
    """Of the moments that differ only in how many micro-batches are done, the latest, which holds most; in their order."""
    latest: dict[tuple[int, ...], Moment] = {}
    for x in way:
        kept = x.num_stashes, x.num_checkpoints, x.num_recomputing, x.num_pending
        latest.pop(kept, None)
        latest[kept] = x
    return list(latest.values())


def _corners(way: Iterable[Moment]) -> list[Moment]:
    """Where a way through the counts begins, turns and ends.

    Bytes are linear in the counts: while micro-batches pass from one count to another at a steady rate, as in a
    warm-up, the peak is at one end.
    """
    corners: list[Moment] = []
    for x in way:
        while len(corners) > 1 and _direction(corners[-2], corners[-1]) == _direction(corners[-1], x):
            corners.pop()
        corners.append(x)
    return corners


def _direction(one: Moment, other: Moment) -> tuple[int, ...]:
    """The way from one moment's counts to those of another, which differ, in the smallest whole steps."""
    steps = [
        other.num_stashes - one.num_stashes,
        other.num_checkpoints - one.num_checkpoints,
        other.num_recomputing - one.num_recomputing,
        other.num_pending - one.num_pending,
        other.num_done - one.num_done,
    ]
    return tuple(step // math.gcd(*steps) for step in steps)


def _undominated(moments: Sequence[Moment]) -> tuple[Moment, ...]:
    """Without those that hold no more of anything than another one; of equal ones the last is left."""
    some = {replace(x, action=""): x for x in moments}.values()
    return tuple(x for x in some if not any(_dominates(other, x) for other in some if other is not x))


def _dominates(one: Moment, other: Moment) -> bool:
    return (
        one.num_stashes - one.num_pending >= other.num_stashes - other.num_pending  # pending bytes may be negative
        and one.num_checkpoints >= other.num_checkpoints
        and one.num_recomputing >= other.num_recomputing
        and one.num_pending >= other.num_pending
        and one.num_done >= other.num_done
        and other.workspace in ("", one.workspace)
        and one.has_gradients >= other.has_gradients
    )
