"""Branch and bound over the cuts, from the first stage to the last: the partition with the smallest step, load or peak.

A node is a prefix, the first s stages. A sweep grows all nodes by one stage at a time, drops those whose bound cannot
beat the best plan known, and keeps at most `width` of the others, the most promising. If none was left out, the best
plan is proven optimal; otherwise the smallest bound left out says how much better a plan could be, and the next sweep
is wider, until the time is up. Nodes are bounded by their goal (`goals.py`: a simulation, the loads or the memory so
far) and by weights (`lagrangian.py`).

A plan whose value is within a limit is made of candidates that are within bounds which follow from the limit. Mostly the
candidates within the value of a good plan are few, and one search settles it. Where they are too many, the limit starts
just above the least possible value and rises: a limit without a plan raises the bound; the best plan of the first limit
that has one within it is the optimum.

Exact up to rounding: plans within 1e-12 of each other count as equal; ties are settled by moving single cuts only. The
worst case is exponential in K.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

from gplan.graph.down_sets import Floats, Ints
from gplan.partition.batch_simulation import num_at_once
from gplan.partition.candidates import (
    CandidateLimit,
    Candidates,
    TooManyCandidates,
    candidates_within,
    ends_of,
    fitting,
    on_paths,
    path_of,
)
from gplan.partition.goals import Goal
from gplan.partition.lagrangian import WeightedBounds, WeightUpdates, first_weighted_bounds
from gplan.partition.local_search import polish
from gplan.partition.memory_feasibility import DeviceMemoryLimits
from gplan.partition.problem import ROUNDING, Problem, compute_sums_s, without_memory

_FEW_CANDIDATES = 1_000_000  # that are searched in one go
_QUICK_CANDIDATES = 100_000  # that are bounded whatever the time
_MANY_CANDIDATES = 4_000_000  # of one rising limit
_RISES = (
    2e-4, 5e-4, 1e-3, 2e-3, 4e-3, 7e-3, 0.01, 0.015, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.35, 0.6, 1.0, 2.0, 5.0,
    float("inf"),
)  # fmt: skip
_NARROW = 1.5  # times the longest stage of the best plan known: the stages that are looked at where all are too many
_SLACK = 1e-9  # share by which a bound may be off
_FIRST_WIDTH = 64
_WIDER = 8  # times, from sweep to sweep
_NUM_LEAVES = 256  # complete prefixes that are simulated to choose among
_MOST_AT_ONCE = 16384  # nodes grown at once
_NUM_BLENDED = 17  # plans, to begin a search for a peak that is small enough with
_BURST = 25  # rounds of play, after which a partition is tried
_NUM_BURSTS = 16
_FEW_BURSTS = 4  # after these it ends where nothing gets better
_SHARE_OF_PLAY = 0.5  # of the time that is left
_WORTH_A_BURST = 1e-4  # share of the bound by which it must rise for another


@dataclass(frozen=True, slots=True, kw_only=True)
class Incumbent:
    """The best partition so far, at which positions its stages end [S], its value, and a bound of all values.

    The value is the step in seconds, or whatever else is to be small.
    """

    ends: Ints
    value: float
    lower_bound: float
    limit: float = float("inf")  # plans above it are not looked for

    @property
    def proven(self) -> bool:
        """Whether no partition is better, or none within the limit."""
        return self.lower_bound >= self.worth

    @property
    def worth(self) -> float:
        """Only plans below this are better by more than rounding, and within the limit."""
        return min(self.value * (1.0 - ROUNDING), self.limit)

    def bounded(self, lower_bound: float) -> Incumbent:
        """The same with a bound that may be higher."""
        return replace(self, lower_bound=max(self.lower_bound, min(lower_bound, self.worth)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """A search for the partition of a problem with the smallest value of a goal."""

    problem: Problem
    goal: type[Goal]
    enough: float | None = None  # stop at the first value up to this; None: search for the smallest

    def is_settled(self, incumbent: Incumbent) -> bool:
        """Whether no better value is looked for: none is there, or it is settled whether one is good enough."""
        if self.enough is None:
            return incumbent.proven
        return incumbent.proven or incumbent.value <= self.enough or incumbent.lower_bound > self.enough

    def run(self, incumbent: Incumbent, *, deadline_s: float) -> Incumbent:
        """What is known after a search that begins with a plan."""
        least, last_limit = self.goal.least_of(self.problem), incumbent.limit
        known = incumbent.bounded(least)
        if self.enough is not None and self.is_settled(known):
            return known
        try:
            limit = min(known.value * (1.0 + ROUNDING), last_limit)
            return self._within(known, limit, most=_FEW_CANDIDATES, deadline_s=deadline_s)
        except TooManyCandidates:
            pass
        for rise in _RISES:
            limit = min(least * (1.0 + rise), known.value * (1.0 + ROUNDING), last_limit)
            try:
                found = self._within(known, limit, most=_MANY_CANDIDATES, deadline_s=deadline_s)
            except TooManyCandidates:
                return self._among_narrow(known, deadline_s=deadline_s)
            is_last = found.value <= limit or limit >= min(known.value, last_limit)
            known = replace(found, limit=last_limit)
            if not found.proven or is_last or self.is_settled(known):
                break
        return known

    def bound_up_to(self, limit: float) -> float:
        """A lower bound of all values without a search, at most the limit; 0 where the candidates are too many."""
        try:
            cap = self.goal.cap(self.problem, limit)
            candidates = candidates_within(without_memory(self.problem), cap, most=_QUICK_CANDIDATES)
        except TooManyCandidates:
            return 0.0
        left = None if candidates is None else self.fitting(candidates)
        if left is None:
            return limit
        inflation = self.problem.selector.inflation if self.problem.recompute == "selected" else 1.0
        space = SearchSpace(search=self, bounds=first_weighted_bounds(self.goal(self.problem, left)))
        return min(limit, max(space.bounds.whole_s, space.whole) * (1 - _SLACK) / inflation)

    def moved(self, incumbent: Incumbent, *, deadline_s: float) -> Incumbent:
        """What is known after moves from that plan alone."""
        cap = self.goal.cap(self.problem, incumbent.value * (1 + _SLACK))
        try:
            candidates = candidates_within(self.problem, cap, most=_MANY_CANDIDATES)
        except TooManyCandidates:
            candidates = self._narrow(incumbent)
        if candidates is None:
            return incumbent
        return self.polished(self.goal(self.problem, candidates), incumbent, deadline_s)

    def polished(self, goal: Goal, incumbent: Incumbent, deadline_s: float) -> Incumbent:
        """The incumbent after moves of single cuts; as it is where it is not made of the goal's candidates."""
        path = path_of(goal.candidates, incumbent.ends)
        if path is None:
            return incumbent
        may_be = DeviceMemoryLimits(self.problem, goal.candidates).fits if self.checks_devices else None
        path = polish(self.problem, goal.candidates, path, values=goal.values, may_be=may_be, deadline_s=deadline_s)
        value = float(goal.values(path[None])[0])
        return replace(incumbent, ends=ends_of(goal.candidates, path), value=value)

    @property
    def checks_devices(self) -> bool:
        """Whether candidates that fit by themselves may be too large together."""
        return self.problem.has_chunks and self.problem.has_memory_limit

    def fitting(self, candidates: Sequence[Candidates]) -> list[Candidates] | None:
        """The candidates that may fit, beside the other stages of their device; None where that leaves no path."""
        size = self.problem.costs.num_positions
        left = on_paths([fitting(self.problem, stage, x) for stage, x in enumerate(candidates)], size)
        if left is None or not self.checks_devices:
            return left
        limits = DeviceMemoryLimits(self.problem, left)
        return on_paths([some.take(limits.fitting(stage)) for stage, some in enumerate(left)], size)

    def _within(self, known: Incumbent, limit: float, *, most: int, deadline_s: float) -> Incumbent:
        """What is known after looking for plans within the limit; a plan above it may be found beside."""
        free = without_memory(self.problem)
        limited = replace(known, limit=limit)
        candidates = candidates_within(free, self.goal.cap(free, limit), most=most)
        if candidates is None:
            return limited.bounded(float("inf"))
        return self._searched(candidates, limited, deadline_s=deadline_s)

    def _searched(self, candidates: list[Candidates], incumbent: Incumbent, *, deadline_s: float) -> Incumbent:
        bounds = first_weighted_bounds(self.goal(self.problem, candidates))
        return branch_and_bound(SearchSpace(search=self, bounds=bounds), incumbent, deadline_s=deadline_s)

    def _among_narrow(self, known: Incumbent, *, deadline_s: float) -> Incumbent:
        """What is known after a search of short stages alone, which proves nothing of the others."""
        candidates = self._narrow(known)
        if candidates is None:
            return known
        found = self._searched(candidates, known, deadline_s=deadline_s)
        return replace(found, lower_bound=known.lower_bound)

    def _narrow(self, incumbent: Incumbent) -> list[Candidates] | None:
        """Stages not much longer than those of the incumbent."""
        sums = compute_sums_s(self.problem)
        longest_s = float(np.diff(sums[incumbent.ends], prepend=0.0).max()) + self.problem.costs.microbatch_overhead_s
        cap = CandidateLimit(by_load=False, most_s=[_NARROW * longest_s] * self.problem.num_stages)
        try:
            return candidates_within(self.problem, cap, most=_MANY_CANDIDATES)
        except TooManyCandidates:
            return None


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """The partitions of some candidates, with bounds of those that take a candidate or begin with a prefix."""

    search: Search
    bounds: WeightedBounds

    @property
    def goal(self) -> Goal:
        """What is to be small."""
        return self.bounds.goal

    @property
    def candidates(self) -> Sequence[Candidates]:
        """The candidates of each stage."""
        return self.bounds.candidates

    @cached_property
    def through(self) -> list[Floats]:
        """[E] for each stage: the least value of every partition that takes this candidate."""
        known = self.goal.through()
        if known is None:
            return self.bounds.through_s
        return [np.maximum(one, other) for one, other in zip(known, self.bounds.through_s, strict=True)]

    @property
    def whole(self) -> float:
        """The least value of every partition."""
        return float(self.through[0].min(initial=np.inf))

    def narrowed(self, incumbent: Incumbent) -> SearchSpace | None:
        """The space of the candidates that a plan worth having could take; None where there is none."""
        worth = incumbent.worth * (1.0 + _SLACK)
        kept = [some.take(x <= worth) for some, x in zip(self.candidates, self.through, strict=True)]
        return self._among(on_paths(kept, self.search.problem.costs.num_positions))

    def begun(self, incumbent: Incumbent, *, deadline_s: float) -> tuple[SearchSpace | None, Incumbent]:
        """The space of what fits the memory, narrowed before and after moves from the incumbent or the plan with even
        stages, with the bound of all its paths; None where nothing better is in it."""
        space = self.narrowed(incumbent)
        if space is not None:
            space = space._among(self.search.fitting(space.candidates))
        if space is None:
            return None, incumbent
        incumbent = space._started(incumbent.bounded(space.whole), deadline_s)
        return (space if self.search.is_settled(incumbent) else space.narrowed(incumbent)), incumbent

    def strengthened(self, incumbent: Incumbent, *, deadline_s: float) -> tuple[SearchSpace, Incumbent]:
        """The space with better weights (fictitious play), and the best of the partitions found on the way."""
        now_s = time.perf_counter()
        until_s = now_s + _SHARE_OF_PLAY * (deadline_s - now_s)
        path = path_of(self.candidates, incumbent.ends)
        updates = WeightUpdates.begun(self.bounds, self.bounds.best_path() if path is None else path)
        for burst in range(_NUM_BURSTS):
            before, bound = incumbent, updates.weighted.whole_s
            updates.go_on(_BURST, deadline_s=until_s)
            incumbent = incumbent.bounded(updates.weighted.whole_s)
            for start in self._plans([updates.middle_path()], incumbent):
                found = self.search.polished(self.goal, start, until_s)
                incumbent = found if found.value < incumbent.value else incumbent
            rise = updates.weighted.whole_s - bound
            is_stuck = burst >= _FEW_BURSTS and rise < _WORTH_A_BURST * bound and incumbent.value == before.value
            if self.search.is_settled(incumbent) or is_stuck or time.perf_counter() > until_s:
                break
        return replace(self, bounds=updates.weighted), incumbent

    def root(self) -> Nodes:
        """The empty prefix."""
        none: Ints = np.zeros((1, 0), dtype=np.int64)
        return Nodes(paths=none, last_end=none.sum(axis=1), added=np.zeros(1), bounds=np.array([self.whole]))

    def grow(self, parents: Nodes, children: Ints) -> Nodes:
        """Each parent with one more stage, bounded; those that do not fit by infinity."""
        weighted, stage, paths = self.bounds, parents.stage, np.column_stack([parents.paths, children])
        end = self.candidates[stage].end[children]
        added = parents.added + weighted.values[stage][children]
        bounds = np.maximum(parents.bounds, (added + weighted.rest_s[stage + 1][end]) * (1 - ROUNDING))
        bounds = np.maximum(bounds, self.through[stage][children])
        there = np.flatnonzero(self._limits.may_fit(paths)) if self.search.checks_devices else np.arange(len(paths))
        least = np.full(len(paths), np.inf)
        least[there] = self.goal.of_prefixes(paths[there])
        return Nodes(paths=paths, last_end=end, added=added, bounds=np.maximum(bounds, least))

    @cached_property
    def _limits(self) -> DeviceMemoryLimits:
        return DeviceMemoryLimits(self.search.problem, self.candidates)

    def _among(self, candidates: list[Candidates] | None) -> SearchSpace | None:
        return None if candidates is None else replace(self, bounds=self.bounds.among(candidates))

    def _started(self, incumbent: Incumbent, deadline_s: float) -> Incumbent:
        """What moves make of the incumbent, or of the plan with even stages if that is better.

        Where a value is good enough, the plan with the most even loads that has it is taken.
        """
        if self.search.enough is not None:
            blended = self._plans(self.bounds.blended_paths(_NUM_BLENDED), incumbent)
            enough = next((x for x in blended if x.value <= self.search.enough), None)
            if enough is not None:
                return enough
        even_plans = self._plans([self.bounds.even_path()], incumbent)
        start = min([incumbent, *even_plans], key=lambda x: x.value)
        return self.search.polished(self.goal, start, deadline_s)

    def _plans(self, paths: Sequence[Ints], incumbent: Incumbent) -> list[Incumbent]:
        """Those of some partitions that fit, with all else that is known."""
        every = np.array(paths)
        if self.search.checks_devices:
            every = every[self._limits.fits(every)]
        pairs = zip(every, self.goal.values(every).tolist(), strict=True)
        return [replace(incumbent, ends=ends_of(self.candidates, path), value=value) for path, value in pairs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """N prefixes of s stages each, with a lower bound of every plan that begins with them."""

    paths: Ints  # [N, s]: the candidate that each stage takes
    last_end: Ints  # [N]: the position at which the next stage begins
    added: Floats  # [N]: what the stages add to the weighted mean
    bounds: Floats  # [N]

    def __len__(self) -> int:
        return len(self.bounds)

    @property
    def stage(self) -> int:
        """The index of the stage that comes next."""
        return int(self.paths.shape[1])

    def take(self, index: Ints) -> Nodes:
        """Some of the nodes."""
        return Nodes(**{x.name: getattr(self, x.name)[index] for x in fields(self)})

    @classmethod
    def joined(cls, parts: list[Nodes]) -> Nodes:
        """All nodes of all parts."""
        return cls(**{x.name: np.concatenate([getattr(part, x.name) for part in parts]) for x in fields(cls)})


def branch_and_bound(space: SearchSpace, incumbent: Incumbent, *, deadline_s: float) -> Incumbent:
    """What is known after a search of the space: sweeps over prefixes, each wider than the one before."""
    search = space.search
    left, incumbent = space.begun(incumbent, deadline_s=deadline_s)
    width = _FIRST_WIDTH
    while left is not None and not search.is_settled(incumbent) and time.perf_counter() < deadline_s:
        incumbent = sweep(left, incumbent, width=width, deadline_s=deadline_s)
        if width == _FIRST_WIDTH and not search.is_settled(incumbent):
            left, incumbent = left.strengthened(incumbent, deadline_s=deadline_s)
        if not search.is_settled(incumbent):
            left = left.narrowed(incumbent)
        width *= _WIDER
    if left is None:
        return replace(incumbent, lower_bound=incumbent.worth)
    return search.polished(left.goal, incumbent, deadline_s)


def sweep(space: SearchSpace, incumbent: Incumbent, *, width: int, deadline_s: float) -> Incumbent:
    """What is known after growing prefixes to partitions, at most `width` of them at a time."""
    nodes, left_out = space.root(), float("inf")
    for _ in range(space.search.problem.num_stages):
        parts = list(_children(space, nodes, incumbent, deadline_s))
        if time.perf_counter() > deadline_s:
            return incumbent
        if not parts:
            return incumbent.bounded(left_out)
        nodes = Nodes.joined(parts)
        order = np.argsort(nodes.bounds, kind="stable")
        left_out = min(left_out, float(nodes.bounds[order[width:]].min(initial=np.inf)))
        nodes = nodes.take(order[:width])
    leaves = nodes.paths[np.argsort(nodes.bounds, kind="stable")[:_NUM_LEAVES]]
    values = space.goal.values(leaves)
    index = int(values.argmin())
    if values[index] < incumbent.value:
        incumbent = replace(incumbent, ends=ends_of(space.candidates, leaves[index]), value=float(values[index]))
    return incumbent.bounded(left_out)


def _children(space: SearchSpace, nodes: Nodes, incumbent: Incumbent, deadline_s: float) -> Iterator[Nodes]:
    """The nodes with one more stage that can still lead to a better plan, in chunks; fewer if the time is up."""
    some, through = space.candidates[nodes.stage], space.through[nodes.stage]
    parents, children = _pairs(some, nodes.last_end)
    worthy = through[children] < incumbent.worth
    parents, children = parents[worthy], children[worthy]
    chunk = min(_MOST_AT_ONCE, num_at_once(space.search.problem))
    for start in range(0, len(parents), chunk):
        if time.perf_counter() > deadline_s:
            return
        grown = space.grow(nodes.take(parents[start : start + chunk]), children[start : start + chunk])
        promising = np.flatnonzero(grown.bounds < incumbent.worth)
        if len(promising):
            yield grown.take(promising)


def _pairs(candidates: Candidates, starts: Ints) -> tuple[Ints, Ints]:
    """Every start with every candidate that begins there: indices of both."""
    begin = np.searchsorted(candidates.first, starts)
    counts = np.searchsorted(candidates.first, starts, side="right") - begin
    offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(np.arange(len(starts)), counts), np.repeat(begin, counts) + offsets
