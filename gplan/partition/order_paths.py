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

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from gplan.core import ActionKind, RecomputeMode, is_recomputed
from gplan.graph.down_sets import Bools, Floats, Ints
from gplan.schedules.dependencies import AWAITED_KINDS, INPUT_GRADIENT_KINDS
from gplan.schedules.registry import make_schedule

_KINDS = (*AWAITED_KINDS, ActionKind.WEIGHT_GRADIENT)
_BACK = [_KINDS.index(kind) for kind in INPUT_GRADIENT_KINDS]
_NONE, _FIRST, _LAST, _TWICE, _OFTEN = _LEAVING = range(5)  # with which micro-batches paths leave


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderPaths:
    """The paths through the orders of all stages; path i follows the same rule on every stage.

    Counts are floats, which NumPy multiplies faster than integers.
    """

    kinds: tuple[tuple[ActionKind, bool], ...]  # of actions, with whether their micro-batch is recomputed
    counts: Floats  # [S, paths, kinds]: how many of each kind a path takes
    rounds: Floats  # [S, paths, 2]: how often it goes through the stages after, with a micro-batch kept, and recomputed
    returns: Ints  # [paths]: 0 where the update follows; where the last gradients go on through the stages before: 1,
    # or 2 for the last ones of a micro-batch that is recomputed
    last_again: Bools  # [S]: whether the micro-batch of the last gradients is recomputed


@lru_cache(maxsize=1024)
def order_paths(schedule: str, *, num_devices: int, num_microbatches: int, recompute: RecomputeMode) -> OrderPaths:
    """The paths of a schedule with one stage, and as many actions, on each device."""
    again = np.array(
        [is_recomputed(x, num_microbatches=num_microbatches, recompute=recompute) for x in range(num_microbatches)]
    )
    kinds, microbatches = _orders(schedule, num_devices, num_microbatches)
    keys, rows = 2 * kinds + again[microbatches], np.arange(num_devices)[:, None]
    used = np.unique(keys)
    before = np.zeros((num_devices, keys.shape[1] + 1, len(used)))  # how many of each kind
    before[:, 1:] = (keys[..., None] == used).cumsum(axis=1)
    is_forward, is_back = kinds == 0, np.isin(kinds, _BACK)
    there, back = (_places(some, microbatches) for some in (is_forward, is_back))
    skipped = before[rows, back] - before[rows, there + 1]  # [S, M, kinds]: on the way through the stages after
    leaving = _leaving(there, back, is_forward.cumsum(axis=1))
    end, last = np.full(num_devices, keys.shape[1]), back.max(axis=1) + 1
    paths = [(leaving[:, [_NONE, _FIRST]], end), (leaving, last)]
    last_recomputed = np.where(again, back, -1).max(axis=1) + 1
    if again.any() and (last_recomputed < last).any():
        paths.append((leaving * (back < last_recomputed[:, None])[:, None], last_recomputed))
    return OrderPaths(
        kinds=tuple((_KINDS[int(x) // 2], bool(x % 2)) for x in used),
        counts=np.concatenate([before[rows, ends[:, None]] - some @ skipped for some, ends in paths], axis=1),
        rounds=np.concatenate([some for some, _ in paths], axis=1) @ np.stack([~again, again], axis=1).astype(float),
        returns=np.repeat(np.arange(len(paths)), [some.shape[1] for some, _ in paths]),
        last_again=again[back.argmax(axis=1)],
    )


@lru_cache(maxsize=64)
def _orders(schedule: str, num_devices: int, num_microbatches: int) -> tuple[Ints, Ints]:
    """[S, actions] each: which of `_KINDS` the actions of each stage are, and of which micro-batches."""
    made = make_schedule(schedule, num_devices=num_devices, num_microbatches=num_microbatches)
    numbers = {kind: i for i, kind in enumerate(_KINDS)}
    kinds = np.array([[numbers[x.kind] for x in order] for order in made.orders])
    return kinds, np.array([[x.microbatch for x in order] for order in made.orders])


def _places(some: Bools, microbatches: Ints) -> Ints:
    """[S, M]: where each micro-batch's action is in the order; `some`, [S, actions], marks one of each micro-batch."""
    stages, places = some.nonzero()
    found = np.zeros((len(some), int(microbatches.max()) + 1), dtype=np.int64)
    found[stages, microbatches[stages, places]] = places
    return found


def _leaving(there: Ints, back: Ints, num_forwards: Ints) -> Floats:
    """[S, leaving, M]: 1 where a path leaves the stage after the forward of a micro-batch.

    Given are where forwards and backwards are, [S, M], and how many forwards there are up to each action, [S, actions].
    """
    rows, num_microbatches = np.arange(len(there)), there.shape[1]
    leaving = np.zeros((len(there), len(_LEAVING), num_microbatches))
    first, last = there.argmin(axis=1), there.argmax(axis=1)
    leaving[rows, _FIRST, first] = leaving[rows, _LAST, last] = leaving[rows, _TWICE, last] = 1
    leaving[rows, _TWICE, first] = np.maximum(leaving[rows, _TWICE, first], there[rows, last] > back[rows, first])
    order = there.argsort(axis=1)
    num_before = num_forwards[rows[:, None], np.take_along_axis(back, order, axis=1)]  # each one's backward
    place = np.zeros_like(rows)
    while len(rows):  # a path that has come back leaves with the next forward
        leaving[rows, _OFTEN, order[rows, place]] = 1
        place = num_before[rows, place]
        rows, place = rows[place < num_microbatches], place[place < num_microbatches]
    return leaving
