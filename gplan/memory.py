"""What a stage holds, and when: the schedule's order replayed into moments, each priced as a sum of the stage's parts.

A stage always holds its weights, the optimizer's state and the engine's receive buffers; from forward to backward it
holds, per micro-batch in flight, either its whole stash or, with recompute, only a checkpoint (its outputs; its inputs
lie in the receive buffers). What the engine sent (activations forward, gradients back) it keeps until the step ends.
Gradients appear with the first backward. A recomputing backward holds one whole stash.

The peak is the largest moment. Without recompute, and with nothing sent, this equals
    W + O + max(n a + tmp, n_G a + tmp + G)
with n the most micro-batches in flight and n_G the most at any backward after the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from gplan.nouns import Action, ActionKind, RecomputeMode, StageMemory
from gplan.schedules import make_schedule
from gplan.simulator import is_recomputed

Bytes = TypeVar("Bytes", int, NDArray[np.int64])


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBytes(Generic[Bytes]):
    """The parts that a stage's memory is made of: of one stage (int), or of many candidate stages (arrays)."""

    weight: Bytes
    gradient: Bytes
    optimizer: Bytes
    stash: Bytes  # per micro-batch whose activations are all kept
    checkpoint: Bytes  # per micro-batch that will be recomputed
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
    num_done: int  # micro-batches whose backward is behind
    workspace: str  # the field of StageBytes that is in use, or "" for none
    has_gradients: bool


_make_schedule = lru_cache(maxsize=4)(make_schedule)  # each stage in turn asks for the same one


@lru_cache(maxsize=4096)
def stage_moments(
    schedule: str, *, num_stages: int, num_microbatches: int, stage: int, recompute: RecomputeMode
) -> tuple[Moment, ...]:
    """The moments of one stage that no other moment dominates."""
    order = _make_schedule(schedule, num_stages=num_stages, num_microbatches=num_microbatches).orders[stage]
    return _undominated(_latest(_replay(order, num_microbatches=num_microbatches, recompute=recompute)))


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
    return StageMemory(
        weight_bytes=parts.weight,
        gradient_bytes=parts.gradient if peak.has_gradients else 0,
        optimizer_bytes=parts.optimizer,
        activation_bytes=_activation_bytes(peak, parts),
        workspace_bytes=getattr(parts, peak.workspace) if peak.workspace else 0,
        buffer_bytes=parts.buffer,
        moment=peak.action,
    )


def _activation_bytes(moment: Moment, parts: StageBytes[Bytes]) -> Bytes:
    kept = moment.num_stashes * parts.stash + moment.num_checkpoints * parts.checkpoint
    return kept + moment.num_done * parts.sent


def _replay(
    order: Sequence[Action], *, num_microbatches: int, recompute: RecomputeMode
) -> Iterator[tuple[Action | None, int, int, int, str, bool]]:
    """The fields of every moment, its action by itself; None: the optimizer's step."""
    stashes = checkpoints = done = 0
    for action in order:
        again = is_recomputed(action.microbatch, num_microbatches=num_microbatches, recompute=recompute)
        if action.kind is ActionKind.FORWARD:
            checkpoints, stashes = checkpoints + again, stashes + (not again)
            workspace = "recompute_workspace" if again else "forward_workspace"
            yield action, stashes, checkpoints, done, workspace, done > 0
        else:
            yield action, stashes + again, checkpoints, done, "backward_workspace", done > 0
            if again:
                yield action, stashes + 1, checkpoints, done, "forward_workspace", done > 0
            checkpoints, stashes, done = checkpoints - again, stashes - (not again), done + 1
            yield action, stashes, checkpoints, done, "", True
    yield None, 0, 0, 0, "optimizer_workspace", True


def _latest(replayed: Iterable[tuple[Action | None, int, int, int, str, bool]]) -> list[Moment]:
    """Of the moments that differ in nothing but how many micro-batches are done the latest, which holds most."""
    found = {(x[1], x[2], x[4], x[5]): x for x in replayed}
    return [
        Moment(
            action="optimizer" if action is None else str(action),
            num_stashes=stashes,
            num_checkpoints=checkpoints,
            num_done=done,
            workspace=workspace,
            has_gradients=has_gradients,
        )
        for action, stashes, checkpoints, done, workspace, has_gradients in found.values()
    ]


def _undominated(moments: list[Moment]) -> tuple[Moment, ...]:
    """Without the moments that can never be the peak: dominated ones, and those between two others on a line.

    Bytes are linear in the counts, so along moments that trade one stash (or checkpoint) for one more micro-batch that
    is done, the peak is at one end.
    """
    ends = _line_ends(moments, lambda x: (x.num_stashes + x.num_done, x.num_checkpoints))
    kept = _line_ends(ends, lambda x: (x.num_checkpoints + x.num_done, x.num_stashes))
    return tuple(x for x in kept if not any(_dominates(other, x) for other in kept if other is not x))


def _line_ends(moments: Iterable[Moment], line_of: Callable[[Moment], tuple[int, int]]) -> list[Moment]:
    """Of the moments on each line those with the fewest and the most micro-batches done."""
    lines: dict[tuple[tuple[int, int], str, bool], list[Moment]] = {}
    for x in sorted(moments, key=lambda moment: moment.num_done):
        lines.setdefault((line_of(x), x.workspace, x.has_gradients), []).append(x)
    return [x for line in lines.values() for x in line[:: max(1, len(line) - 1)]]


def _dominates(one: Moment, other: Moment) -> bool:
    return (
        one.num_stashes >= other.num_stashes
        and one.num_checkpoints >= other.num_checkpoints
        and one.num_done >= other.num_done
        and one.workspace == other.workspace
        and one.has_gradients >= other.has_gradients
    )
