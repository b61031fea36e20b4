"""The smallest largest load, exactly, by dynamic programming over pairs of down-sets.

    load(first, end) = time between them + time of each shared value of whose layers the stage holds some, but not all

The transfers of a stage are those of the values that its end splits, corrected for the few values that its first
position splits already. Stages that compute for longer than a threshold are left out; the threshold rises from a lower
bound until a plan is found, and a last pass with that plan's load as the threshold proves the optimum.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from gplan.graph.down_sets import Bools, DownSets, Floats, Ints
from published.graph import Objective, PublishedGraph, Stages

INFINITY = float("inf")
_FIRST_GROWTH = 1.05  # of the threshold where no plan was found; squared each time
_SLACK = 1 + 1e-12  # for sums that were added in another order


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The layers of each stage, and a lower bound of every plan's value: its own value where it is proven best."""

    stages: Stages
    value: float
    lower_bound: float

    @property
    def is_proven(self) -> bool:
        """Whether no plan has a smaller value."""
        return self.lower_bound * _SLACK >= self.value


def best_by_dp(
    graph: PublishedGraph,
    downsets: DownSets,
    *,
    objective: Objective,
    num_devices: int,
    memory_bytes: int | None,
    deadline_s: float = INFINITY,
) -> Plan | None:
    """The plan with the smallest largest load; None if there is none.

    "device-load" has at most K stages, "compute" exactly K. Exact; O(P^2 (K + cut)) at worst for P down-sets, `cut`
    being how many values a position splits. At `deadline_s`, a time of time.perf_counter, the best plan so far is
    returned with its lower bound, or TimeoutError raised.
    """
    search = _Search(
        graph=graph,
        table=_LoadTable(graph, downsets, objective),
        objective=objective,
        num_devices=num_devices,
        memory_bytes=sum(graph.num_bytes) if memory_bytes is None else memory_bytes,
        deadline_s=deadline_s,
    )
    first = search.first_plan()
    if first is None or first.is_proven:
        return first
    try:
        better = search.best(longest=first.value, below=first.value)
    except TimeoutError:
        return first
    value = first.value if better is None else graph.value(better, objective)
    return Plan(stages=better or first.stages, value=value, lower_bound=value)


class _LoadTable:
    """The loads of stages. Positions are ordered by the time before them, then by the number of layers."""

    def __init__(self, graph: PublishedGraph, downsets: DownSets, objective: Objective) -> None:
        before = downsets.sums(np.array(graph.compute))
        self.order = np.lexsort([downsets.num_before, before])
        self.before = before[self.order]
        self.before_bytes = downsets.sums(np.array(graph.num_bytes, dtype=np.int64))[self.order]
        self._downsets = downsets
        nets = {ends: moved for ends, moved in graph.shared.items() if moved > 0} if objective == "device-load" else {}
        reached = [sum(downsets.is_before(x)[self.order].astype(np.int16) for x in ends) for ends in nets]
        self._moved = np.array(list(nets.values()))
        self._reached = np.array(reached, dtype=np.int16).reshape(len(nets), downsets.size)
        self._num_ends = np.array([len(x) for x in nets], dtype=np.int16)
        self._is_split = (self._reached > 0) & (self._reached < self._num_ends[:, None])
        self._split = self._moved @ self._is_split

    @property
    def size(self) -> int:
        """P."""
        return len(self.order)

    def ends(self, first: int, longest: float, most_bytes: int) -> Ints:
        """Where stages from `first` may end."""
        past = int(np.searchsorted(self.before, (self.before[first] + longest) * _SLACK, side="right"))
        ends: Ints = np.arange(first + 1, past)
        ends = ends[self.before_bytes[ends] - self.before_bytes[first] <= most_bytes]
        return ends[self._downsets.are_stages(np.full(len(ends), self.order[first]), self.order[ends])]

    def loads(self, first: int, ends: Ints) -> Floats:
        """[E]: the loads of stages from the same first position."""
        nets = np.flatnonzero(self._is_split[:, first])
        reached, moved = self._reached[np.ix_(nets, ends)], self._moved[nets]
        is_touched: Bools = reached > self._reached[nets, first][:, None]
        is_complete: Bools = reached == self._num_ends[nets][:, None]
        between: Floats = self.before[ends] - self.before[first]
        return between + self._split[ends] + moved @ (is_touched & is_complete) - moved @ ~is_touched

    def stages(self, path: list[int]) -> Stages:
        """The layers between one position and the next."""
        places = self.order[path].tolist()
        return tuple(self._downsets.layers(i, j) for i, j in pairwise(places))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    """Dynamic programs over the same positions, each with its threshold."""

    graph: PublishedGraph
    table: _LoadTable
    objective: Objective
    num_devices: int
    memory_bytes: int
    deadline_s: float

    def first_plan(self) -> Plan | None:
        """The best plan below the first threshold that has any; it is the optimum if its value is below, too."""
        lower = max(float(self.table.before[-1]) / self.num_devices, max(self.graph.compute))
        for longest in self._thresholds(lower):
            try:
                stages = self.best(longest=longest, below=INFINITY)
            except TimeoutError as error:
                raise TimeoutError(f"no plan was found in time; none has a value below {lower:.6g}") from error
            if stages is not None:
                value = self.graph.value(stages, self.objective)
                return Plan(stages=stages, value=value, lower_bound=min(value, longest))
            lower = longest
        return None

    def _thresholds(self, lower: float) -> Iterator[float]:
        if max(self.graph.num_bytes) > self.memory_bytes:
            return
        growth = _FIRST_GROWTH
        while lower < self.table.before[-1]:
            yield lower
            lower, growth = lower * growth, growth**2
        yield INFINITY

    def best(self, *, longest: float, below: float) -> Stages | None:
        """The best plan of those whose stages compute for no longer than `longest` and have loads below `below`.

        Raises TimeoutError at the deadline.
        """
        loads = np.full((self.num_devices + 1, self.table.size), INFINITY)
        before = np.zeros(loads.shape, dtype=np.int64)
        loads[0, 0] = 0.0
        for first in range(self.table.size - 1):
            self._extend(loads, before, first, longest, below)
        num_stages = self.num_devices if self.objective == "compute" else int(loads[:, -1].argmin())
        if loads[num_stages, -1] == INFINITY:
            return None
        path = [self.table.size - 1]
        for k in range(num_stages, 0, -1):
            path.append(int(before[k, path[-1]]))
        return self.table.stages(path[::-1])

    def _extend(self, loads: NDArray[np.float64], before: Ints, first: int, longest: float, below: float) -> None:
        """Add every stage from `first`, after each number of stages that leaves enough devices for the rest."""
        numbers = np.flatnonzero((loads[:-1, first] < INFINITY) & self._can_hold_rest(first, longest))
        if len(numbers) == 0:
            return
        if time.perf_counter() > self.deadline_s:
            raise TimeoutError
        ends = self.table.ends(first, longest, self.memory_bytes)
        of_stages = self.table.loads(first, ends)
        ends, of_stages = ends[of_stages < below], of_stages[of_stages < below]
        for k in numbers:
            reached = np.maximum(of_stages, loads[k, first])
            better = reached < loads[k + 1, ends]
            loads[k + 1, ends[better]], before[k + 1, ends[better]] = reached[better], first

    def _can_hold_rest(self, first: int, longest: float) -> Bools:
        """[K]: whether the devices that are left after k stages could hold the layers that are left."""
        num_left = np.arange(self.num_devices, 0, -1)
        rest = self.table.before[-1] - self.table.before[first]
        rest_bytes = self.table.before_bytes[-1] - self.table.before_bytes[first]
        return np.asarray((rest <= num_left * longest * _SLACK) & (rest_bytes <= num_left * self.memory_bytes))
