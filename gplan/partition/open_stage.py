"""The smallest largest stage where there are too many down-sets for their pairs:
a stage stays open while layers join it.

    load(stage s from I to J) = (work[J] - work[I]) / speed[s] + entering[I] + leaving[J] + fixed

Whether K stages fit under a cap is decided exactly along the covers, pairs of positions that differ by one layer: of
all positions at which stage s may have opened on the way to J, only the one matters that adds least, since what comes
later is the same for all. Stage s may close at J if its load is within the cap; then stage s + 1 opens there.
O(K covers).

The cap is bisected between a bound and the load of the best plan found. A cap under which no plan fits proves more than
itself: with the smallest load that it turned away, nothing changes below that load either. So the two meet exactly.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from gplan.graph.down_sets import Bools, DownSets, Floats, Ints

INFINITY = float("inf")
_LARGEST = float(np.finfo(np.float64).max)
_PRECISION = 1e-12  # relative; of loads whose terms are added in different orders


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPlan:
    """The K-1 inner positions of a plan, its largest load, and what no plan stays below."""

    path: tuple[int, ...]
    load_s: float
    lower_bound_s: float


def smallest_largest_open(
    downsets: DownSets,
    *,
    work_s: Floats,
    entering_s: Floats,
    leaving_s: Floats,
    fixed_s: float,
    num_stages: int,
    speeds: Sequence[float] | None = None,
    deadline_s: float | None = None,
) -> OpenPlan | None:
    """The plan of exactly K stages, none empty, whose largest load is smallest; None if there is none.

    work_s[P] is that of all layers before a position; entering_s[P] and leaving_s[P] are paid by the stage that opens
    or closes there (infinity forbids it); speeds[K] are relative, 1 by default. Exact: the bound equals the load,
    unless `deadline_s`, a time of time.perf_counter, came first.
    """
    table = _Table(
        downsets=downsets,
        work_s=work_s,
        entering_s=entering_s,
        leaving_s=leaving_s,
        fixed_s=fixed_s,
        speeds=np.broadcast_to(np.array(1.0 if speeds is None else speeds, dtype=np.float64), num_stages),
    )
    best = table.under(_LARGEST).path
    if best is None:
        return None
    load_s, lower_s = table.load_s(best), table.bound_s
    while lower_s < load_s * (1 - _PRECISION):
        if deadline_s is not None and time.perf_counter() > deadline_s:
            return OpenPlan(path=best[1:-1], load_s=load_s, lower_bound_s=lower_s)
        tried = table.under((lower_s + load_s) / 2)
        if tried.path is None:
            lower_s = tried.refused_s
        else:
            best, load_s = tried.path, table.load_s(tried.path)
    return OpenPlan(path=best[1:-1], load_s=load_s, lower_bound_s=load_s)


@dataclass(frozen=True, slots=True)
class _Tried:
    """A plan under a cap, K+1 positions with both ends; if there is none, the smallest load that was turned away."""

    path: tuple[int, ...] | None
    refused_s: float


@dataclass(frozen=True, kw_only=True, eq=False)
class _Table:
    """What does not change from cap to cap."""

    downsets: DownSets
    work_s: Floats
    entering_s: Floats
    leaving_s: Floats
    fixed_s: float
    speeds: Floats

    @cached_property
    def done_s(self) -> Floats:
        """[P, K]: what all layers before a position take on the device of a stage."""
        return np.asarray(self.work_s[:, None] / self.speeds)

    @cached_property
    def opening_s(self) -> Floats:
        """[P, K]: what a stage that opens at a position adds to the work done where it closes."""
        return np.asarray(self.entering_s[:, None] + self.fixed_s - self.done_s)

    @cached_property
    def first_cover(self) -> Ints:
        """[P + 1]: where the covers with each upper position begin."""
        return np.searchsorted(self.downsets.covers[1], np.arange(self.downsets.size + 1))

    @cached_property
    def levels(self) -> tuple[tuple[slice, Ints, Ints], ...]:
        """Positions with the same number of layers, from 1 on; their lower covers, and where each one's begin."""
        ends = np.searchsorted(self.downsets.num_before, np.arange(1, self.downsets.num_layers + 2)).tolist()
        starts = [self.first_cover[i : j + 1] for i, j in pairwise(ends)]
        lowers = [self.downsets.covers[0][x[0] : x[-1]] for x in starts]
        return tuple(
            (slice(i, j), lower, start[:-1] - start[0])
            for (i, j), lower, start in zip(pairwise(ends), lowers, starts, strict=True)
        )

    @property
    def bound_s(self) -> float:
        """No largest load is smaller: all devices full, or one layer alone on the fastest."""
        lower, upper, _ = self.downsets.covers
        all_s = float(self.work_s[-1] / self.speeds.sum())
        return self.fixed_s + max(all_s, float((self.work_s[upper] - self.work_s[lower]).max() / self.speeds.max()))

    def load_s(self, path: Sequence[int]) -> float:
        """The largest load of a plan."""
        first, end = np.array(path[:-1]), np.array(path[1:])
        work_s = (self.work_s[end] - self.work_s[first]) / self.speeds
        return float((work_s + self.entering_s[first] + self.leaving_s[end] + self.fixed_s).max())

    def under(self, cap_s: float) -> _Tried:
        """A plan of which no load is above the cap."""
        least = np.full((self.downsets.size, len(self.speeds)), INFINITY)  # that an open stage adds at each position
        closed = np.full(least.shape, INFINITY)  # its load if it closes there
        least[0, 0] = self.opening_s[0, 0]
        for here, lower, starts in self.levels:
            open_s = np.minimum.reduceat(least[lower], starts, axis=0)
            closed[here] = open_s + self.done_s[here] + self.leaving_s[here, None]
            least[here] = open_s
            opened = np.where(closed[here, :-1] <= cap_s, self.opening_s[here, 1:], INFINITY)
            least[here, 1:] = np.minimum(open_s[:, 1:], opened)
        path = self._path(least, closed <= cap_s) if closed[-1, -1] <= cap_s else None
        return _Tried(path, float(closed.min(initial=INFINITY, where=closed > cap_s)))

    def _path(self, least: Floats, may_close: Bools) -> tuple[int, ...]:
        path = [self.downsets.size - 1]
        for stage in reversed(range(len(self.speeds))):
            place = self._below(path[-1], least[:, stage])
            while not self._opens(place, stage, least, may_close):
                place = self._below(place, least[:, stage])
            path.append(place)
        return tuple(reversed(path))

    def _below(self, place: int, least: Floats) -> int:
        lower = self.downsets.covers[0][self.first_cover[place] : self.first_cover[place + 1]]
        return int(lower[least[lower].argmin()])

    def _opens(self, place: int, stage: int, least: Floats, may_close: Bools) -> bool:
        may_open = place == 0 if stage == 0 else may_close[place, stage - 1]
        return bool(may_open and least[place, stage] == self.opening_s[place, stage])
