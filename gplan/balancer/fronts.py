"""Knapsacks a layer at a time: the most bytes that recomputing some layers saves,
for every number of seconds it may add.

A front lists the choices that no other one beats in both. Fronts of the same layers in the same order are one, so
models of equal layers have few. Exact up to MOST_LABELS; beyond, labels of nearly the same seconds are merged, and no
choice is worse than the best by more than the front's `error_s`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from gplan.downsets import Floats, Ints

MOST_LABELS = 512


@dataclass(eq=False, slots=True, kw_only=True)
class Front:
    """What recomputing some of a sequence of layers can save at what cost: both rise, none of them is pointless."""

    saved_bytes: Ints
    seconds: Floats
    error_s: float = 0.0  # by which any of these may be above the least
    before: Front | None = None  # without the last layer
    last: tuple[int, float] = (0, 0.0)  # what the last layer saves, and adds
    longer: dict[tuple[int, float], Front] = field(default_factory=dict)

    def grown(self, last: tuple[int, float]) -> Front:
        """The front with one more layer; that of the same layers is made once."""
        if last not in self.longer:
            self.longer[last] = _grown(self, last)
        return self.longer[last]

    def index(self, need_bytes: int) -> int:
        """The cheapest that saves as much; beyond the last where nothing does."""
        return int(np.searchsorted(self.saved_bytes, need_bytes))

    def taken(self, index: int) -> list[bool]:
        """Whether each layer of the sequence is recomputed."""
        found, front = [], self
        while front.before is not None:
            saved, seconds = front.saved_bytes[index], front.seconds[index]
            front, (own_bytes, own_s) = front.before, front.last
            same = front.index(saved)
            is_kept = same < len(front.seconds) and (front.saved_bytes[same], front.seconds[same]) == (saved, seconds)
            index = same if is_kept else front.index(saved - own_bytes)
            assert is_kept or front.seconds[index] + own_s == seconds, "a label comes from the front before"
            found.append(not is_kept)
        return found[::-1]


def _grown(front: Front, last: tuple[int, float]) -> Front:
    own_bytes, own_s = last
    saved = np.concatenate([front.saved_bytes, front.saved_bytes + own_bytes])
    seconds = np.concatenate([front.seconds, front.seconds + own_s])
    order = np.lexsort((-saved, seconds))
    saved, seconds = saved[order], seconds[order]
    most_before = np.concatenate([[-1], np.maximum.accumulate(saved)[:-1]])
    useful = saved > most_before
    saved, seconds, error_s = _merged(saved[useful], seconds[useful])
    return Front(saved_bytes=saved, seconds=seconds, error_s=front.error_s + error_s, before=front, last=last)


def _merged(saved: Ints, seconds: Floats) -> tuple[Ints, Floats, float]:
    """At most about MOST_LABELS of the labels, the last of each bucket of seconds, and what that adds at most."""
    if len(seconds) <= MOST_LABELS:
        return saved, seconds, 0.0
    buckets = np.ceil(seconds / seconds[-1] * (MOST_LABELS - 1))
    is_last = np.concatenate([buckets[1:] != buckets[:-1], [True]])
    into = np.flatnonzero(is_last)[np.cumsum(is_last) - is_last]
    return saved[is_last], seconds[is_last], float((seconds[into] - seconds).max())
