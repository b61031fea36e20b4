"""The largest load of a device where each device pays for every value that it shares with others.

    load(stage) = seconds of its layers + seconds of each value of whose ends the stage holds some, but not all

The ends of a value are the layer that makes it and those that read it: its maker pays once, and so does every other
stage that reads it, however many stages lie between. Model inputs and outputs cost nothing. Values with the same ends
are one.

Exact, by dynamic programming over pairs of positions: a stage from I to J has the seconds between them, plus what is
split at J, plus a correction for the few values that are split at I already. Stages that compute for longer than a
threshold are left out; the threshold rises from a lower bound until a plan is found, whose load is the last threshold.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from gplan.core import Profile, Value
from gplan.core.interpolation import value_cost_at
from gplan.cost.stage_costs import Costs
from gplan.graph.boundary import values_of
from gplan.graph.down_sets import Bools, DownSets, Floats, Ints
from gplan.partition.problem import Problem, Solution

# Transfers straight from the device that makes a value to each that reads it, as dnn-partitioning's planner has them.
#
# A device pays for a value once if it makes it and any other device reads it, and once if it reads it and another makes
# it (Tarnawski et al. 2020, "Efficient Algorithms for Device Placement of DNN Graph Operators", max-load).


def direct_transfers_s(costs: Costs, stages: Sequence[Sequence[int]]) -> Floats:
    """[K]: seconds of the transfers of each stage, given its layers."""
    device = {layer: index for index, stage in enumerate(stages) for layer in stage}
    transfers_s = np.zeros(len(stages))
    values = values_of(costs.profile)
    for value, seconds in zip(values, value_seconds(costs, values), strict=True):
        readers = {device[x] for x in value.consumers if x in device}
        if value.producer is None or not readers - {device[value.producer]}:
            continue
        for index in readers | {device[value.producer]}:
            transfers_s[index] += seconds
    return transfers_s


def value_seconds(costs: Costs, values: Sequence[Value]) -> Floats:
    """[V]: seconds to move each value, and its gradient back, from one device to another."""
    return np.array([_seconds(costs, value) for value in values])


def _seconds(costs: Costs, value: Value) -> float:
    cost, link = value_cost_at(value.costs, costs.microbatch_size), costs.profile.link
    there_s = link.transfer_s(cost.num_bytes) if value.transfer_s is None else value.transfer_s
    return there_s + link.transfer_s(cost.gradient_bytes)


# Layers that take no time and have one neighbour only stay with it: how dnn-partitioning's planner prepares a graph.
#
# It does so whatever the memory, and before it looks at any: a plan that would need such a layer elsewhere is none to it.
# `max-device-load` is that planner's objective, so it comes with that planner's rule, that answers can be compared
# (msr-fiddle/dnn-partitioning, throughput-dp/dp.cpp, performTrivialNodeOptimizations).


_NO_TIME_S = 1e-9


def contracted(problem: Problem) -> tuple[Problem, tuple[tuple[int, ...], ...]]:
    """The problem without such layers, their weights at the neighbour; and which layers each layer left stands for."""
    profile = problem.costs.profile
    if not profile.values:
        return problem, tuple((i,) for i in range(problem.num_layers))
    stands_for = {i: [i] for i in range(problem.num_layers)}
    neighbours = _neighbours(profile)
    while (lone := _lone(problem, stands_for, neighbours)) is not None:
        (other,) = neighbours.pop(lone)
        stands_for[other] += stands_for.pop(lone)
        neighbours[other].discard(lone)
    groups = tuple(tuple(sorted(members)) for members in stands_for.values())
    costs = replace(problem.costs, profile=_merged(profile, list(stands_for), groups), given_downsets=None)
    return replace(problem, costs=costs), groups


def expanded(solution: Solution, groups: Sequence[tuple[int, ...]]) -> Solution:
    """The same partition of the layers that were there before."""
    stages = tuple(tuple(sorted(x for layer in stage for x in groups[layer])) for stage in solution.stages)
    return replace(solution, stages=stages)


def _neighbours(profile: Profile) -> dict[int, set[int]]:
    neighbours: dict[int, set[int]] = {i: set() for i in range(len(profile.layers))}
    for before, after in profile.precedence:
        neighbours[before].add(after)
        neighbours[after].add(before)
    return neighbours


def _lone(problem: Problem, stands_for: dict[int, list[int]], neighbours: dict[int, set[int]]) -> int | None:
    seconds = problem.costs.layer_compute_s
    for layer, members in stands_for.items():
        if sum(seconds[x] for x in members) < _NO_TIME_S and len(neighbours[layer]) == 1:
            return layer
    return None


def _merged(profile: Profile, kept: Sequence[int], groups: Sequence[tuple[int, ...]]) -> Profile:
    """The profile with the kept layers alone; members of a group take no time but one, so only bytes add up."""
    place = {x: index for index, members in enumerate(groups) for x in members}
    place[len(profile.layers)] = len(kept)
    layers = [
        replace(
            profile.layers[layer],
            weight_bytes=sum(profile.layers[x].weight_bytes for x in members),
            gradient_bytes=sum(profile.layers[x].gradient_bytes for x in members),
            num_trained=sum(profile.layers[x].num_trained for x in members),
            costs=tuple(replace(x, leftovers=()) for x in profile.layers[layer].costs),  # which is no part of a load
            same_as=None,
        )
        for layer, members in zip(kept, groups, strict=True)
    ]
    shared = [(x, tuple(sorted({place[i] for i in x.layers}))) for x in profile.shared_weights]
    return replace(
        profile,
        layers=tuple(layers),
        values=tuple(moved for value in profile.values if (moved := _moved(value, place)) is not None),
        shared_weights=tuple(replace(x, layers=users) for x, users in shared if len(users) > 1),
    )


def _moved(value: Value, place: dict[int, int]) -> Value | None:
    """The value between the layers that are left; None where both ends are one now."""
    producer = None if value.producer is None else place[value.producer]
    consumers = tuple(sorted({place[x] for x in value.consumers} - {producer}))
    return replace(value, producer=producer, consumers=consumers) if consumers else None


INFINITY = float("inf")
_FIRST_GROWTH = 1.05  # of the threshold where no plan was found; squared each time
_SLACK = 1 + 1e-12  # of sums that were added in another order

Stages = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLoadPlan:
    """The layers of each stage, rising within a stage; the largest load; and what no plan stays below."""

    stages: Stages
    load_s: float
    lower_bound_s: float


def smallest_device_load(
    downsets: DownSets,
    *,
    compute_s: Floats,
    weight_bytes: Ints,
    values: Sequence[Value],
    value_s: Floats,
    num_devices: int,
    memory_bytes: int,
    deadline_s: float | None = None,
) -> DeviceLoadPlan | None:
    """The plan of at most K stages, a chain of down-sets, whose largest load is smallest; None if none fits the memory.

    compute_s[L] seconds and weight_bytes[L] of each layer, value_s[V] seconds of each value; the weights of a stage
    must fit memory_bytes. Exact; O(P^2 (K + cut)) at worst, `cut` being how many values a position splits. At
    `deadline_s`, a time of time.perf_counter, the best plan so far is returned, its lower bound below its load, or
    TimeoutError raised.
    """
    nets = _nets_of(values, value_s, downsets.num_layers)
    model = _Model(downsets, nets, compute_s, weight_bytes)
    rounds = _Rounds(model, num_devices, memory_bytes, INFINITY if deadline_s is None else deadline_s)
    first = rounds.first_plan()
    if first is None or first.load_s == first.lower_bound_s:
        return first
    try:
        better = rounds.best(longest_s=first.load_s, below_s=first.load_s)
    except TimeoutError:
        return first
    stages = better or first.stages
    load_s = max(model.load_s(x) for x in stages)
    return DeviceLoadPlan(stages=stages, load_s=load_s, lower_bound_s=load_s)


@dataclass(frozen=True, slots=True)
class _Nets:
    """N sets of layers that share a value; a stage that holds some but not all of them pays its seconds."""

    ends: tuple[tuple[int, ...], ...]
    seconds: Floats  # [N]


def _nets_of(values: Sequence[Value], value_s: Floats, num_layers: int) -> _Nets:
    seconds: dict[tuple[int, ...], float] = {}
    for value, cost_s in zip(values, value_s.tolist(), strict=True):
        if value.producer is None:
            continue
        ends = tuple(sorted({value.producer, *value.consumers} - {num_layers}))
        if len(ends) > 1 and cost_s > 0:
            seconds[ends] = seconds.get(ends, 0.0) + cost_s
    return _Nets(ends=tuple(seconds), seconds=np.array(list(seconds.values())))


class _Model:
    """What stages cost. Positions are numbered by rising seconds of compute here,
    and by layers where those are equal."""

    def __init__(self, downsets: DownSets, nets: _Nets, compute_s: Floats, weight_bytes: Ints) -> None:
        before_s = downsets.sums(compute_s)
        self.order = np.lexsort([downsets.num_before, before_s])
        self.before_s = before_s[self.order]
        self.before_bytes = downsets.int_sums(weight_bytes)[self.order]
        self._downsets, self._nets, self._compute_s, self.weight_bytes = downsets, nets, compute_s, weight_bytes
        self.longest_layer_s = float(compute_s.max())
        reached = [sum(downsets.contain(x)[self.order].astype(np.int16) for x in ends) for ends in nets.ends]
        self._reached = np.array(reached, dtype=np.int16).reshape(len(nets.ends), downsets.size)
        self._num_ends = np.array([len(x) for x in nets.ends], dtype=np.int16)
        self._is_split = (self._reached > 0) & (self._reached < self._num_ends[:, None])
        self._split_s = nets.seconds @ self._is_split

    @property
    def size(self) -> int:
        """P."""
        return len(self.order)

    def ends(self, first: int, longest_s: float, most_bytes: int) -> Ints:
        """Where stages from `first` may end."""
        past = int(np.searchsorted(self.before_s, (self.before_s[first] + longest_s) * _SLACK, side="right"))
        ends: Ints = np.arange(first + 1, past)
        ends = ends[self.before_bytes[ends] - self.before_bytes[first] <= most_bytes]
        return ends[self._downsets.contains(np.full(len(ends), self.order[first]), self.order[ends])]

    def loads_s(self, first: int, ends: Ints) -> Floats:
        """[E]: the loads of stages with the same first position."""
        nets = np.flatnonzero(self._is_split[:, first])
        reached, seconds = self._reached[np.ix_(nets, ends)], self._nets.seconds[nets]
        is_touched: Bools = reached > self._reached[nets, first][:, None]
        is_done: Bools = reached == self._num_ends[nets][:, None]
        between_s: Floats = self.before_s[ends] - self.before_s[first]
        return between_s + self._split_s[ends] + seconds @ (is_touched & is_done) - seconds @ ~is_touched

    def load_s(self, layers: Sequence[int]) -> float:
        """The load of one stage, from its layers."""
        held = set(layers)
        counts = [len(held.intersection(ends)) for ends in self._nets.ends]
        paid = [0 < x < len(ends) for x, ends in zip(counts, self._nets.ends, strict=True)]
        return float(self._compute_s[list(layers)].sum() + self._nets.seconds[np.array(paid, dtype=np.bool_)].sum())

    def stages(self, path: Sequence[int]) -> Stages:
        """The layers between one position and the next."""
        places = self.order[list(path)].tolist()
        return tuple(self._downsets.layers(i, j) for i, j in pairwise(places))


@dataclass(frozen=True, slots=True)
class _Rounds:
    """Dynamic programs over the same positions, each with its threshold."""

    model: _Model
    num_devices: int
    memory_bytes: int
    deadline_s: float

    def first_plan(self) -> DeviceLoadPlan | None:
        """The best plan below the first threshold that has any: optimal if its load is below, too."""
        lower_s = max(float(self.model.before_s[-1]) / self.num_devices, self.model.longest_layer_s)
        for longest_s in self._thresholds(lower_s):
            try:
                stages = self.best(longest_s=longest_s, below_s=INFINITY)
            except TimeoutError as error:
                raise TimeoutError(f"no plan was found in time; none has a load below {lower_s:.6g} s") from error
            if stages is not None:
                load_s = max(self.model.load_s(x) for x in stages)
                return DeviceLoadPlan(stages=stages, load_s=load_s, lower_bound_s=min(load_s, longest_s))
            lower_s = longest_s
        return None

    def _thresholds(self, lower_s: float) -> Iterator[float]:
        if int(self.model.weight_bytes.max()) > self.memory_bytes:
            return
        growth = _FIRST_GROWTH
        while lower_s < self.model.before_s[-1]:
            yield lower_s
            lower_s, growth = lower_s * growth, growth**2
        yield INFINITY

    def best(self, *, longest_s: float, below_s: float) -> Stages | None:
        """The plan with the smallest largest load of all whose stages compute for no longer and whose loads are below.

        Raises TimeoutError at the deadline.
        """
        loads_s = np.full((self.num_devices + 1, self.model.size), INFINITY)
        before = np.zeros(loads_s.shape, dtype=np.int64)
        loads_s[0, 0] = 0.0
        for first in range(self.model.size - 1):
            self._extend(loads_s, before, first, longest_s, below_s)
        num_stages = int(loads_s[:, -1].argmin())
        if loads_s[num_stages, -1] == INFINITY:
            return None
        path = [self.model.size - 1]
        for k in range(num_stages, 0, -1):
            path.append(int(before[k, path[-1]]))
        return self.model.stages(path[::-1])

    def _extend(self, loads_s: NDArray[np.float64], before: Ints, first: int, longest_s: float, below_s: float) -> None:
        """Every stage from `first`, after each number of stages with which the rest can still be held."""
        numbers = np.flatnonzero((loads_s[:-1, first] < INFINITY) & self._can_hold_rest(first, longest_s))
        if len(numbers) == 0:
            return
        if time.perf_counter() > self.deadline_s:
            raise TimeoutError
        ends = self.model.ends(first, longest_s, self.memory_bytes)
        stage_s = self.model.loads_s(first, ends)
        ends, stage_s = ends[stage_s < below_s], stage_s[stage_s < below_s]
        for k in numbers:
            reached_s = np.maximum(stage_s, loads_s[k, first])
            better = reached_s < loads_s[k + 1, ends]
            loads_s[k + 1, ends[better]], before[k + 1, ends[better]] = reached_s[better], first

    def _can_hold_rest(self, first: int, longest_s: float) -> Bools:
        """[K]: whether the devices that are left after k stages could hold the layers that are left."""
        num_left = np.arange(self.num_devices, 0, -1)
        rest_s = self.model.before_s[-1] - self.model.before_s[first]
        rest_bytes = self.model.before_bytes[-1] - self.model.before_bytes[first]
        return np.asarray((rest_s <= num_left * longest_s * _SLACK) & (rest_bytes <= num_left * self.memory_bytes))
