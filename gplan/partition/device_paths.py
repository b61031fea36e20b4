"""Paths through the order of a device with several stages, which give lower bounds of a step (`device_bounds.py`).

A path begins when another device lets one of the stages do its first action of a kind. It follows the device's order. It
ends with the updates, or goes on to another device that waits for the last action of a kind on one of the stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from gplan.core import RecomputeMode
from gplan.cost.stage_seconds import ActionKey, action_keys
from gplan.graph.down_sets import Bools, Ints
from gplan.schedules.dependencies import AWAITED_KINDS
from gplan.schedules.registry import make_schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePaths:
    """The paths through the order of one device."""

    keys: tuple[ActionKey, ...]  # of all its actions
    heads: tuple[ActionKey, ...]  # to which paths come: of each stage and kind the first action
    tails: tuple[ActionKey, ...]  # from which paths leave: of each key the last action
    pairs: Ints  # [paths, 2]: of heads and tails; one past the last tail where the updates follow
    counts: Ints  # [paths, keys]: how many of each a path takes

    @property
    def is_end(self) -> Bools:
        """[paths]: whether the updates follow."""
        found: Bools = self.pairs[:, 1] == len(self.tails)
        return found


@lru_cache(maxsize=128)
def device_paths(
    schedule: str, *, num_devices: int, num_microbatches: int, recompute: RecomputeMode
) -> tuple[DevicePaths, ...]:
    """[K]: the paths through the order of each device."""
    made = make_schedule(schedule, num_devices=num_devices, num_microbatches=num_microbatches)
    found = list[DevicePaths]()
    for order in made.orders:
        keys, numbers = action_keys(order, num_microbatches=num_microbatches, recompute=recompute)
        before = np.zeros((len(order) + 1, len(keys)), dtype=np.int64)
        before[np.arange(1, len(order) + 1), numbers] = 1
        before = before.cumsum(axis=0)
        awaited = [(place, keys[number]) for place, number in enumerate(numbers) if keys[number].kind in AWAITED_KINDS]
        firsts = {(key.stage, key.kind): (place, key) for place, key in reversed(awaited)}
        heads, tails = {key: place for place, key in firsts.values()}, {key: place + 1 for place, key in awaited}
        starts, ends = np.array([*heads.values()]), np.array([*tails.values(), len(order)])
        pairs = np.argwhere(starts[:, None] < ends)
        counts = before[ends[pairs[:, 1]]] - before[starts[pairs[:, 0]]]
        found.append(DevicePaths(keys=tuple(keys), heads=tuple(heads), tails=tuple(tails), pairs=pairs, counts=counts))
    return tuple(found)
