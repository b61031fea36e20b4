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

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from gplan.core import ActionKind, RecomputeMode, is_recomputed
from gplan.cost.stage_seconds import ActionKey
from gplan.graph.down_sets import Bools, Ints
from gplan.schedules.dependencies import INPUT_GRADIENT_KINDS
from gplan.schedules.registry import make_schedule

_KINDS = (ActionKind.FORWARD, *INPUT_GRADIENT_KINDS, ActionKind.WEIGHT_GRADIENT)


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


@lru_cache(maxsize=256)
def order_paths(
    schedule: str, *, num_devices: int, num_microbatches: int, recompute: RecomputeMode
) -> tuple[OrderPaths, ...]:
    """[S]: the paths of each stage, of a schedule with one stage for each device."""
    again = np.array(
        [is_recomputed(x, num_microbatches=num_microbatches, recompute=recompute) for x in range(num_microbatches)]
    )
    orders = _orders(schedule, num_devices, num_microbatches)
    return tuple(_paths_of(stage, kinds, microbatches, again) for stage, (kinds, microbatches) in enumerate(orders))


@lru_cache(maxsize=16)
def _orders(schedule: str, num_devices: int, num_microbatches: int) -> tuple[tuple[Ints, Ints], ...]:
    """[S] of [actions] each: which of `_KINDS` the actions of each stage are, and of which micro-batches."""
    made = make_schedule(schedule, num_devices=num_devices, num_microbatches=num_microbatches)
    numbers = {kind: i for i, kind in enumerate(_KINDS)}
    return tuple(
        (np.array([numbers[x.kind] for x in order]), np.array([x.microbatch for x in order])) for order in made.orders
    )


def _paths_of(stage: int, kinds: Ints, microbatches: Ints, again: Bools) -> OrderPaths:
    """The paths of a stage's order, [actions] each, with the micro-batches that are recomputed, [M]."""
    used, index = np.unique(2 * kinds + again[microbatches], return_inverse=True)
    before = np.zeros((len(kinds) + 1, len(used)), dtype=np.int64)  # how many of each kind
    before[np.arange(1, len(kinds) + 1), index] = 1
    before = before.cumsum(axis=0)
    is_back = np.isin(kinds, [_KINDS.index(kind) for kind in INPUT_GRADIENT_KINDS])
    there, back = np.zeros_like(again, dtype=np.int64), np.zeros_like(again, dtype=np.int64)
    for places, some in ((there, kinds == 0), (back, is_back)):
        places[microbatches[some]] = np.flatnonzero(some)
    first, last, last_back = int(there.argmin()), int(there.argmax()), int(back.argmax())

    def path(leaving: Sequence[int], end: int) -> tuple[Ints, Ints]:
        """What a path takes that leaves with the forwards of some micro-batches."""
        some = np.array(leaving, dtype=np.int64)
        taken = before[[*(there[some] + 1), end]] - before[[0, *back[some]]]
        return taken.sum(axis=0), np.bincount(again[some], minlength=2)

    twice = [first, last] if there[last] > back[first] else [last]
    leaving: tuple[list[int], ...] = ([], [first], [last], twice, _often(there, back))
    of_update = [path(x, len(kinds)) for x in ([], [first])]
    of_gradients = [path(x, back[last_back] + 1) for x in leaving]
    end = int(back[again].max(initial=-1)) + 1 or int(back[last_back]) + 1  # of the last one that is recomputed
    sooner = leaving if end <= back[last_back] else ()
    of_recomputed = [path([y for y in x if back[y] < end], end) for x in sooner]
    counts, rounds = zip(*of_update, *of_gradients, *of_recomputed, strict=True)
    return OrderPaths(
        keys=tuple(ActionKey(stage, _KINDS[int(x) // 2], bool(x % 2)) for x in used),
        counts=np.array(counts),
        rounds=np.array(rounds),
        returns=np.repeat([0, 1, 2], [len(of_update), len(of_gradients), len(of_recomputed)]),
        last_again=bool(again[last_back]),
    )


def _often(there: Ints, back: Ints) -> list[int]:
    """The micro-batches with which a path can leave that does so as often as it can, given where their actions are."""
    order, found, i = np.argsort(there), list[int](), 0
    places = there[order]
    while i < len(order):
        found.append(int(order[i]))
        i = int(np.searchsorted(places, back[order[i]], side="right"))
    return found
