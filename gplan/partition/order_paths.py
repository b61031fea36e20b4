"""Paths through the order of a device with one stage, which give lower bounds of a step (`chain_bounds.py`).

A path begins with the stage's first forward, takes some of its actions, and ends with its update, or with its last
gradients, which go on through the stages before. From the forward of a micro-batch it may go on through all stages after
and come back to that micro-batch's backward; its own actions in between are then left out. 1F1B, K = 3, M = 4, stage 0,
with (m) for a micro-batch's way through the stages after:

    none       F0 F1 F2 B0 F3 B1 B2 B3           the longest where the stage computes most
    the first  F0 (0) B0 F3 B1 B2 B3             where its forwards take less than its backwards
    the last   F0 F1 F2 B0 F3 (3) B3             where they take more
    often      F0 (0) B0 F3 (3) B3               where all stages wait for transfers
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from gplan.core import Action, ActionKind, RecomputeMode, is_recomputed
from gplan.cost.stage_seconds import ActionKey
from gplan.graph.down_sets import Ints
from gplan.schedules.dependencies import INPUT_GRADIENT_KINDS
from gplan.schedules.registry import make_schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderPaths:
    """The paths through the order of one stage; those of the other stages are the same, one by one."""

    keys: tuple[ActionKey, ...]  # kinds of its actions
    counts: Ints  # [paths, keys]: how many of each kind a path takes
    rounds: Ints  # [paths, 2]: how often it goes through the stages after, with a micro-batch kept, and recomputed
    returns: (
        Ints  # [paths]: 0 where the update follows; 1, 2 where the last gradients go on through the stages before, or
    )
    # the last ones of a micro-batch that is recomputed
    last_again: bool  # whether the micro-batch of the last gradients is recomputed


@lru_cache(maxsize=64)
def order_paths(
    schedule: str, *, num_devices: int, num_microbatches: int, recompute: RecomputeMode
) -> tuple[OrderPaths, ...]:
    """[S]: the paths of each stage, of a schedule with one stage for each device."""
    made = make_schedule(schedule, num_devices=num_devices, num_microbatches=num_microbatches)
    return tuple(_paths_of(order, num_microbatches, recompute) for order in made.orders)


def _paths_of(order: Sequence[Action], num_microbatches: int, recompute: RecomputeMode) -> OrderPaths:
    index: dict[ActionKey, int] = {}
    own = [ActionKey.of(x, num_microbatches=num_microbatches, recompute=recompute) for x in order]
    kinds = [index.setdefault(key, len(index)) for key in own]
    before = np.zeros((len(order) + 1, len(index)), dtype=np.int64)  # how many of each kind
    before[np.arange(1, len(order) + 1), kinds] = 1
    before = before.cumsum(axis=0)
    there = {x.microbatch: i for i, x in enumerate(order) if x.kind is ActionKind.FORWARD}
    back = {x.microbatch: i for i, x in enumerate(order) if x.kind in INPUT_GRADIENT_KINDS}
    first, last = min(there, key=there.__getitem__), max(there, key=there.__getitem__)
    last_back = max(back, key=back.__getitem__)

    def again(microbatch: int) -> bool:
        return is_recomputed(microbatch, num_microbatches=num_microbatches, recompute=recompute)

    def path(leaving: Sequence[int], end: int) -> tuple[Ints, list[int]]:
        """What a path takes that leaves with the forwards of some micro-batches."""
        position, counts, rounds = 0, np.zeros(len(index), dtype=np.int64), [0, 0]
        for x in leaving:
            counts = counts + before[there[x] + 1] - before[position]
            position = back[x]
            rounds[again(x)] += 1
        return counts + before[end] - before[position], rounds

    twice = [first, last] if there[last] > back[first] else [last]
    leaving: tuple[list[int], ...] = ([], [first], [last], twice, _often(there, back))
    of_update = [path(x, len(order)) for x in ([], [first])]
    of_gradients = [path(x, back[last_back] + 1) for x in leaving]
    recomputed = max(filter(again, back), key=back.__getitem__, default=last_back)
    end = back[recomputed] + 1
    sooner = leaving if recomputed != last_back else ()
    of_recomputed = [path([y for y in x if back[y] < end], end) for x in sooner]
    counts, rounds = zip(*of_update, *of_gradients, *of_recomputed, strict=True)
    return OrderPaths(
        keys=tuple(index),
        counts=np.array(counts),
        rounds=np.array(rounds),
        returns=np.repeat([0, 1, 2], [len(of_update), len(of_gradients), len(of_recomputed)]),
        last_again=again(last_back),
    )


def _often(there: Mapping[int, int], back: Mapping[int, int]) -> list[int]:
    """The micro-batches with which a path can leave that does so as often as it can, given where their actions are."""
    found, position = list[int](), -1
    for microbatch, place in sorted(there.items(), key=lambda x: x[1]):
        if place > position:
            found.append(microbatch)
            position = back[microbatch]
    return found
