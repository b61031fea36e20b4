"""What a stage holds, and when: the schedule's order replayed into moments, each priced as a sum of the stage's parts.

A stage always holds its weights, the optimizer's state and the engine's receive buffers; from forward to backward it
holds, per micro-batch in flight, either its whole stash or, with recompute, only a checkpoint (its outputs; its inputs
lie in the receive buffers). What the engine sent (activations forward, gradients back) it keeps until the step ends.
Gradients appear with the first backward. A recomputing backward holds one whole stash.

The first half of a split backward leaves the whole stash, and what the second half works on, until that is done. On the first
stage, whose inputs want no gradient, the first half does nothing and the second is the whole backward.

The peak is the largest moment. Without recompute, and with nothing sent, this equals
    W + O + max(n a + tmp, n_G a + tmp + G)
with n the most micro-batches in flight and n_G the most at any backward after the first. A device with several stages holds
most at a moment of one of them, the others resting; all are updated at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from gplan.nouns import Action, ActionKind, RecomputeMode, Schedule, StageMemory
from gplan.schedules import make_schedule
from gplan.simulator import is_recomputed

Bytes = TypeVar("Bytes", int, NDArray[np.int64])

OPTIMIZER_MOMENT = "optimizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBytes(Generic[Bytes]):
    """The parts that a stage's memory is made of: of one stage (int), or of many candidate stages (arrays)."""

    weight: Bytes
    gradient: Bytes
    optimizer: Bytes
    stash: Bytes  # per micro-batch whose activations are all kept
    checkpoint: Bytes  # per micro-batch that will be recomputed
    pending: Bytes  # per micro-batch between the halves of its backward, above the stash
    sent: Bytes  # per micro-batch that is done: what was sent for it stays until the step ends
    forward_workspace: Bytes
    backward_workspace: Bytes
    recompute_workspace: Bytes  # of a forward that keeps only its checkpoint
    optimizer_workspace: Bytes
    buffer: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One point of a stage's order at which its memory may peak."""

    action: str
    num_stashes: int
    num_checkpoints: int
    num_pending: int  # of the stashes those between the halves of a backward
    num_done: int  # micro-batches whose backward is behind
    workspace: str  # the field of StageBytes that is in use, or "" for none
    has_gradients: bool


_NOTHING = Moment(
    action="", num_stashes=0, num_checkpoints=0, num_pending=0, num_done=0, workspace="", has_gradients=False
)
_UPDATE = replace(_NOTHING, action=OPTIMIZER_MOMENT, workspace="optimizer_workspace", has_gradients=True)


@lru_cache(maxsize=4096)
def stage_moments(
    schedule: str, *, num_devices: int, num_microbatches: int, stage: int, recompute: RecomputeMode
) -> tuple[Moment, ...]:
    """The moments of one stage that no other moment dominates; the device's other stages are left out."""
    made = make_schedule(schedule, num_devices=num_devices, num_microbatches=num_microbatches)
    order = [x for x in made.orders[made.devices[stage]] if x.stage == stage]
    replayed = [moment for action, moments in replay(order, num_microbatches, recompute) for moment in moments]
    return _undominated(_latest([*replayed, _UPDATE]))


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
    resting = dict.fromkeys(schedule.stages_of(device), _NOTHING)
    held = {stage: moment_bytes(_NOTHING, parts[stage]) for stage in resting}
    for action, moments in replay(schedule.orders[device], schedule.num_microbatches, recompute):
        for moment in moments:
            others = sum(held.values()) - held[action.stage]
            resting = {**resting, action.stage: moment}
            held[action.stage] = moment_bytes(moment, parts[action.stage])
            yield DeviceMoment(action=str(action), moments=resting, num_bytes=others + held[action.stage])
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
    return StageMemory(
        weight_bytes=parts.weight,
        gradient_bytes=parts.gradient if peak.has_gradients else 0,
        optimizer_bytes=parts.optimizer,
        activation_bytes=_activation_bytes(peak, parts),
        workspace_bytes=getattr(parts, peak.workspace) if peak.workspace else 0,
        buffer_bytes=parts.buffer,
        moment=action,
    )


def _activation_bytes(moment: Moment, parts: StageBytes[Bytes]) -> Bytes:
    kept = moment.num_stashes * parts.stash + moment.num_checkpoints * parts.checkpoint
    return kept + moment.num_pending * parts.pending + moment.num_done * parts.sent


def replay(
    order: Sequence[Action], num_microbatches: int, recompute: RecomputeMode
) -> Iterator[tuple[Action, list[Moment]]]:
    """For each action of an order the moments of its stage during and after it."""
    resting: dict[int, Moment] = {}
    for action in order:
        again = is_recomputed(action.microbatch, num_microbatches=num_microbatches, recompute=recompute)
        now = replace(resting.get(action.stage, _NOTHING), action=str(action))
        moments = _moments_of(action, now, again)
        resting[action.stage] = moments[-1]
        yield action, moments


def _moments_of(action: Action, now: Moment, again: bool) -> list[Moment]:
    """During and after an action, given what was held when it began; `again` where the micro-batch is recomputed."""
    if action.kind is ActionKind.FORWARD:
        kept = replace(now, num_checkpoints=now.num_checkpoints + again, num_stashes=now.num_stashes + (not again))
        return [replace(kept, workspace="recompute_workspace" if again else "forward_workspace"), kept]
    is_first = action.stage == 0
    if action.kind is ActionKind.INPUT_GRADIENT and is_first:
        return [now]
    if action.kind is ActionKind.WEIGHT_GRADIENT and not is_first:
        after = replace(now, num_stashes=now.num_stashes - 1, num_pending=now.num_pending - 1)
        return [replace(now, workspace="backward_workspace"), _done(after)]
    at_work = replace(now, num_stashes=now.num_stashes + again, workspace="backward_workspace")
    during = [at_work, replace(at_work, workspace="forward_workspace")] if again else [at_work]
    left = replace(at_work, num_checkpoints=now.num_checkpoints - again, workspace="")
    if action.kind is ActionKind.INPUT_GRADIENT:
        return [*during, replace(left, num_pending=now.num_pending + 1)]
    return [*during, _done(replace(left, num_stashes=left.num_stashes - 1))]


def _done(moment: Moment) -> Moment:
    return replace(moment, num_done=moment.num_done + 1, has_gradients=True)


def _latest(replayed: Iterable[Moment]) -> list[Moment]:
    """Of the moments that differ in nothing but how many micro-batches are done the latest, which holds most."""
    return list({replace(x, action="", num_done=0): x for x in replayed}.values())


def _undominated(moments: list[Moment]) -> tuple[Moment, ...]:
    """Without the moments that can never be the peak: dominated ones, and those between two others on a line.

    Bytes are linear in the counts, so along moments that trade one stash (or checkpoint) for one more micro-batch that
    is done, the peak is at one end.
    """
    ends = _line_ends(moments, lambda x: (x.num_stashes + x.num_done, x.num_checkpoints, x.num_pending))
    kept = _line_ends(ends, lambda x: (x.num_checkpoints + x.num_done, x.num_stashes, x.num_pending))
    return tuple(x for x in kept if not any(_dominates(other, x) for other in kept if other is not x))


def _line_ends(moments: Iterable[Moment], line_of: Callable[[Moment], tuple[int, int, int]]) -> list[Moment]:
    """Of the moments on each line those with the fewest and the most micro-batches done."""
    lines: dict[tuple[tuple[int, int, int], str, bool], list[Moment]] = {}
    for x in sorted(moments, key=lambda moment: moment.num_done):
        lines.setdefault((line_of(x), x.workspace, x.has_gradients), []).append(x)
    return [x for line in lines.values() for x in line[:: max(1, len(line) - 1)]]


def _dominates(one: Moment, other: Moment) -> bool:
    return (
        one.num_stashes >= other.num_stashes
        and one.num_checkpoints >= other.num_checkpoints
        and one.num_pending >= other.num_pending
        and one.num_done >= other.num_done
        and one.workspace == other.workspace
        and one.has_gradients >= other.has_gradients
    )
