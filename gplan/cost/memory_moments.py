"""What a stage holds, and when: the schedule's order replayed into moments, each priced as a sum of the stage's parts.

A stage always holds its weights and the optimizer's state; from forward to backward it holds, per micro-batch in
flight, either its whole stash or, with recompute, only a checkpoint (its outputs). What it receives lies in a buffer from
when the receive is posted to the end of the micro-batch's backward; activations that only pass a stage are sent out of
it. A gradient that was sent stays for a while. When both begin and end: `gplan/schedules/transfers.py`. Gradients of
weights appear with the first backward. A recomputing
backward holds its layers' stash anew, beside the checkpoint; on the last stage in its place, as the backward of the
loss, which comes first, frees what the loss kept.

The first half of a split backward leaves the stash, what was received and what is pending: what the second half works on,
less what the first half frees of the stash. All that is there until the second half is done. On the first stage, whose
inputs want no gradient, the first half does nothing and the second is the whole backward.

The peak is the largest moment. Without recompute, and with nothing sent, this equals
    W + O + max(n a + tmp, n_G a + tmp + G)
with n the most micro-batches in flight and n_G the most at any backward after the first. A device with several stages
holds most at a moment of one of them, the others resting; all are updated at once.

Bytes are linear in the parts: a moment is a count of each part of each stage, which the schedule alone decides. Of the
moments at which a peak may be, those are left out that can never be the largest: those that hold nothing more than
another does, and those halfway between two others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from gplan.core import ActionKind, RecomputeMode, Schedule, StageMemory, is_recomputed
from gplan.core.plan import StageBytes
from gplan.cost.part_table import PARTS, rows_of
from gplan.graph.down_sets import Bools, Ints
from gplan.schedules.one_f_one_b import NUM_WARMUP
from gplan.schedules.registry import make_schedule
from gplan.schedules.transfers import RECEIVES_AHEAD, receives, sends

OPTIMIZER_MOMENT = "optimizer"

ALIKE_FROM_THE_END = ("gpipe", *NUM_WARMUP)
"""Schedules under which stage s of K, but the first, holds what stage 1 of K - s + 1 does, or of M + 2, if that is less."""

_NUM_STEPS = 16  # from one moment to another that are looked at
_KEPT = ("stash", "checkpoint", "pending", "recomputed_stash", "sent")
_RECEIVED = ("received_activation", "received_gradient")
_HELD = (*_KEPT, *_RECEIVED)
"""The parts of which a stage holds some, one for each micro-batch."""

_HELD_PARTS = [PARTS.index(name) for name in _HELD]
_WORKSPACES = [i for i, name in enumerate(PARTS) if name.endswith("_workspace")]
_LAST_VARY = [
    *_WORKSPACES,
    *(i for i in range(len(PARTS)) if i not in [*_WORKSPACES, PARTS.index("sent")]),
    PARTS.index("sent"),
]
"""The parts in an order in which moments of the same kind are neighbours, once sorted."""

_ALWAYS = [PARTS.index(name) for name in ("weight", "optimizer")]


@dataclass(frozen=True, eq=False)
class Moments:
    """Moments of some stages of one device: how many of each part it holds of each stage, and what it does then."""

    actions: tuple[str, ...]
    counts: Ints  # [moments, stages, parts]

    def held(self, parts: Sequence[Ints]) -> Ints:
        """[moments, N]: bytes held at each moment, given the parts of each stage, [parts, N] each."""
        rows: Ints = self.counts.reshape(len(self.counts), -1) @ np.concatenate(parts)
        return rows

    def peak(self, parts: Sequence[Ints]) -> Ints:
        """[N]: the most that is held at any of the moments."""
        peaks = _held(self.counts[0], parts)
        for counts in self.counts[1:]:
            peaks = np.maximum(peaks, _held(counts, parts))
        return peaks

    def of(self, name: str) -> Ints:
        """[moments]: how many of one part the first stage holds."""
        return self.counts[:, 0, PARTS.index(name)]

    @cached_property
    def key(self) -> bytes:
        """Equal for moments that differ in nothing but what they are named after."""
        return self.counts.tobytes()


def _held(counts: Ints, parts: Sequence[Ints]) -> Ints:
    found: Ints = sum((own @ some for own, some in zip(counts, parts, strict=True)), start=np.zeros(1, dtype=np.int64))
    return found


@lru_cache(maxsize=4096)
def peak_moments(
    schedule: str,
    *,
    num_devices: int,
    num_microbatches: int,
    stages: tuple[int, ...],
    recompute: RecomputeMode,
    receives_ahead: int = RECEIVES_AHEAD,
) -> Moments:
    """The moments at which a device may hold most of some of its stages; what it holds of its others is left out."""
    if schedule in ALIKE_FROM_THE_END and stages[0] > 0:  # counted once for pipelines of all lengths
        (stage,) = stages
        fewest = 1 + min(num_devices - stage, num_microbatches + 1)
        if (fewest, 1) != (num_devices, stage):
            alike = peak_moments(
                schedule, num_devices=fewest, num_microbatches=num_microbatches, stages=(1,), recompute=recompute,
                receives_ahead=receives_ahead,
            )  # fmt: skip
            names = (x if x == OPTIMIZER_MOMENT else f"{stage}{x.removeprefix('1')}" for x in alike.actions)
            return Moments(tuple(names), alike.counts)
    made = make_schedule(schedule, num_devices=num_devices, num_microbatches=num_microbatches)
    every = _moments(made, made.devices[stages[0]], stages, recompute, receives_ahead)
    rows = every.counts[:, :, _LAST_VARY].swapaxes(1, 2).reshape(len(every.counts), -1)
    varying = np.flatnonzero(rows.max(axis=0) > rows.min(axis=0))
    _, different = np.unique(rows[:, varying], axis=0, return_index=True)
    kept = different[_line_ends(rows[different][:, varying])]
    counts = every.counts[kept]
    apart = counts.copy()  # pending bytes may be negative, but not those of a pending micro-batch with its stash
    apart[:, :, PARTS.index("stash")] -= counts[:, :, PARTS.index("pending")]
    updating = counts[:, :, PARTS.index("optimizer_workspace")]  # negative where replicas free what they gathered
    flat = np.concatenate([apart.reshape(len(kept), -1), -updating], axis=1)
    left = np.sort(kept[undominated(-flat[:, flat.max(axis=0) > flat.min(axis=0)])])
    return Moments(tuple(every.actions[i] for i in left), every.counts[left])


def device_moments(
    schedule: Schedule, device: int, *, recompute: RecomputeMode, receives_ahead: int = RECEIVES_AHEAD
) -> Moments:
    """All moments of a device's step in order, of all its stages: during and after every action, and the update."""
    return _moments(schedule, device, schedule.stages_of(device), recompute, receives_ahead)


def device_memory(
    schedule: Schedule,
    device: int,
    parts: Mapping[int, StageBytes[int]],
    *,
    recompute: RecomputeMode,
    receives_ahead: int = RECEIVES_AHEAD,
) -> dict[int, StageMemory]:
    """What each stage of a device holds, by category, when the device holds most."""
    moments = device_moments(schedule, device, recompute=recompute, receives_ahead=receives_ahead)
    own = [parts[stage] for stage in schedule.stages_of(device)]
    peak = int(moments.held([rows_of(x, (1,)) for x in own])[:, 0].argmax())
    held = zip(schedule.stages_of(device), moments.counts[peak], own, strict=True)
    return {stage: memory_at(counts, one, action=moments.actions[peak]) for stage, counts, one in held}


def stage_memory(moments: Moments, parts: StageBytes[int]) -> StageMemory:
    """The peak of one stage, by category, and the action at which it occurs."""
    peak = int(moments.held([rows_of(parts, (1,))])[:, 0].argmax())
    return memory_at(moments.counts[peak, 0], parts, action=moments.actions[peak])


def memory_at(counts: Ints, parts: StageBytes[int], *, action: str) -> StageMemory:
    """What a stage holds at a moment, [parts], by category; `action` is what its device does then."""
    held = dict(zip(PARTS, (counts * rows_of(parts, ())).tolist(), strict=True))
    workspace = sum(held[PARTS[i]] for i in _WORKSPACES)
    return StageMemory(
        weight_bytes=held["weight"] + min(0, workspace),  # sharded replicas have freed what they gathered at the update
        gradient_bytes=held["gradient"],
        optimizer_bytes=held["optimizer"],
        activation_bytes=sum(held[name] for name in _KEPT),
        workspace_bytes=max(0, workspace),
        buffer_bytes=sum(held[name] for name in _RECEIVED),
        moment=action,
    )


def resting(num_stages: int) -> Ints:
    """[stages, parts]: what is held before the first action and after the optimizers."""
    found = np.zeros((num_stages, len(PARTS)), dtype=np.int64)
    found[:, _ALWAYS] = 1
    return found


class _Change(NamedTuple):
    """What an action changes of what its stage keeps of a micro-batch, a count for each of `_KEPT`."""

    at_work: tuple[int, ...]  # while it runs
    workspaces: tuple[str, ...]  # in which it works, one after the other
    after: tuple[int, ...]  # from its end on
    is_done: bool  # whether it is the end of the backward


def _change_of(kind: ActionKind, *, is_first: bool, again: bool) -> _Change:
    """The change by an action of the first stage or of another one, whose micro-batch is recomputed or not."""
    stash, checkpoint = int(not again), int(again)
    nothing = (0, 0, 0, 0, 0)
    if kind is ActionKind.FORWARD:
        kept = (stash, checkpoint, 0, 0, 0)
        return _Change(kept, ("recompute_workspace" if again else "forward_workspace",), kept, False)
    if kind is ActionKind.INPUT_GRADIENT and is_first:
        return _Change(nothing, (), nothing, False)
    if kind is ActionKind.WEIGHT_GRADIENT and not is_first:
        return _Change(nothing, ("weight_workspace",), (-1, 0, -1, 0, 0), True)
    if kind is ActionKind.INPUT_GRADIENT:  # while it runs it frees nothing, not even what the loss kept
        workspaces = ("input_workspace", "forward_workspace") if again else ("input_workspace",)
        return _Change((checkpoint, 0, 0, 0, 0), workspaces, (checkpoint, -checkpoint, 1, 0, 0), False)
    workspace = "recomputing_workspace" if again else "backward_workspace"
    return _Change((0, -checkpoint, 0, checkpoint, 0), (workspace,), (-stash, -checkpoint, 0, 0, 0), True)


def _moments(
    schedule: Schedule, device: int, stages: Sequence[int], recompute: RecomputeMode, receives_ahead: int
) -> Moments:
    """The moments during and after each action of these stages of a device, and when all are updated."""
    order, num_microbatches = schedule.orders[device], schedule.num_microbatches
    keys = [
        (x.kind, x.stage == 0, is_recomputed(x.microbatch, num_microbatches=num_microbatches, recompute=recompute))
        for x in order
    ]
    changes = {key: _change_of(key[0], is_first=key[1], again=key[2]) for key in dict.fromkeys(keys)}
    places = {stage: i for i, stage in enumerate(stages)}
    own = np.array([places.get(x.stage, -1) for x in order])
    is_own = own >= 0
    before, after = (np.zeros((len(order) + 1, len(stages), len(_HELD)), dtype=np.int64) for _ in range(2))
    kept = np.array([changes[key].after for key in keys])
    after[1:][np.flatnonzero(is_own), own[is_own], : len(_KEPT)] = kept[is_own]  # from the next action on
    ends = {
        (x.stage, x.microbatch): i for i, (x, key) in enumerate(zip(order, keys, strict=True)) if changes[key].is_done
    }
    for x in receives(schedule, device, ahead=receives_ahead):
        stage = x.made.receiver
        if stage in places:
            part = _HELD.index(_RECEIVED[x.made.kind is not ActionKind.FORWARD])
            before[x.start, places[stage], part] += 1
            after[ends[stage, x.made.microbatch] + 1, places[stage], part] -= 1
    sent = _HELD.index("sent")
    for x in sends(schedule, device):
        if x.made.stage in places and x.made.kind is not ActionKind.FORWARD:
            after[x.start + 1, places[x.made.stage], sent] += 1
            before[x.end, places[x.made.stage], sent] -= 1
    done = np.zeros((len(order) + 1, len(stages)), dtype=np.int64)
    is_end = is_own & [changes[key].is_done for key in keys]
    done[np.flatnonzero(is_end) + 1, own[is_end]] = 1
    before, after, done = (np.cumsum(x, axis=0) for x in (before, after, done))
    moments = [  # the action, what it changes while it runs, and the part that it works in; after it neither
        (i, *moment)
        for i in np.flatnonzero(is_own).tolist()
        for moment in (*((changes[keys[i]].at_work, PARTS.index(x)) for x in changes[keys[i]].workspaces), (None, -1))
    ]
    place = np.array([i for i, _, _ in moments])
    workspace = np.array([part for _, _, part in moments])
    running = workspace >= 0
    rows, stage = np.flatnonzero(running), own[place[running]]
    counts = np.zeros((len(moments), len(stages), len(PARTS)), dtype=np.int64)
    counts[..., _ALWAYS] = 1
    counts[..., PARTS.index("gradient")] = done[place + ~running] > 0
    held = before[place] + after[place + ~running]
    held[rows, stage, : len(_KEPT)] += np.array([change for _, change, _ in moments if change is not None])
    counts[..., _HELD_PARTS] = held
    counts[rows, stage, workspace[running]] = 1
    update = resting(len(stages))[None]
    update[..., [PARTS.index("gradient"), PARTS.index("optimizer_workspace")]] = 1
    names = (*(str(order[i]) for i, _, _ in moments), OPTIMIZER_MOMENT)
    return Moments(names, np.concatenate([counts, update]))


def _line_ends(rows: Ints) -> Ints:
    """Which of the rows, each there once and sorted, are not halfway between two others that are common steps away."""
    steps, counts = np.unique(np.diff(rows, axis=0), axis=0, return_counts=True)
    factors = np.random.default_rng(0).integers(1, 2**31, rows.shape[1])  # they tell rows apart, but for coincidences
    keys = rows @ factors
    order = np.argsort(keys)
    ordered, is_between = keys[order], np.zeros(len(rows), dtype=np.bool_)

    def are_among(offset: Ints) -> Bools:
        """Whether each row is one of the others after such a step."""
        places = np.searchsorted(ordered, keys + offset @ factors).clip(max=len(rows) - 1)
        among: Bools = (rows[order[places]] == rows + offset).all(axis=1)
        return among

    for step in steps[np.argsort(-counts, kind="stable")[:_NUM_STEPS]]:
        is_between |= are_among(step) & are_among(-step)
    return np.flatnonzero(~is_between)


_CHUNK = 512  # rows compared at once


def undominated(rows: Ints) -> Ints:
    """Indices of rows, [N, D], that no other one matches or beats in every number; smaller is better.

    Of equal rows the first is kept.
    """
    order = np.argsort(rows.sum(axis=1), kind="stable")  # a row comes after those that dominate it
    kept = order[:0]
    for start in range(0, len(order), _CHUNK):
        chunk = order[start : start + _CHUNK]
        chunk = chunk[~_at_most(rows[chunk], rows[kept]).any(axis=1)]
        earlier = np.tri(len(chunk), k=-1, dtype=np.bool_)
        inside = _at_most(rows[chunk], rows[chunk]) & earlier
        kept = np.concatenate([kept, chunk[~inside.any(axis=1)]])
    return kept


def _at_most(rows: Ints, others: Ints) -> Bools:
    """[rows, others]: whether the other row is nowhere larger."""
    at_most = np.ones((len(rows), len(others)), dtype=np.bool_)
    for mine, theirs in zip(rows.T, others.T, strict=True):
        at_most &= theirs[None, :] <= mine[:, None]
    return at_most
