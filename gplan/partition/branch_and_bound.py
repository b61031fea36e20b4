"""Branch and bound over the cuts, from the first stage to the last: the partition with the smallest step, load or peak.

A node is a prefix, the first s stages. A sweep grows all nodes by one stage at a time, drops those whose bound cannot
beat the best plan known, and keeps at most `width` of the others, the most promising. If none was left out, the best
plan is proven optimal; otherwise the smallest bound left out says how much better a plan could be, and the next sweep
is wider, until the time is up. What a prefix is bounded by, and which prefixes make others pointless, is the matter
of a `Relaxation`: labels for GPipe, a simulation of the prefix for other schedules with one stage on each device,
Lagrangian weights where devices hold several.

Where stages and micro-batches are many and partitions few, all are bounded instead (`all_bounded`): the step of a partition is
at least its longest path, and any path is a sum over its stages, so the longest path of one partition bounds all others at
the cost of a sum. The partition with the smallest bound is simulated next, until none is below the best one.

Exact up to rounding: plans within 1e-12 of each other count as equal. The worst case is exponential in K.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

import numpy as np

from gplan.core.units import seconds_text
from gplan.graph.down_sets import Bools, Floats, Ints
from gplan.partition.batch_simulation import num_at_once
from gplan.partition.candidates import Candidates
from gplan.partition.dp import rows_from
from gplan.partition.lagrangian import Goal
from gplan.partition.local_search import polish
from gplan.partition.minimax import stages_between
from gplan.partition.partial_plans import CandidateBounds, PartialPlans, Relaxation
from gplan.partition.problem import ROUNDING, Problem, Solution

_FIRST_WIDTH = 64
_WIDER = 8  # times, from sweep to sweep
_NUM_LEAVES = 256  # complete prefixes that are simulated to choose among
_MOST_AT_ONCE = 16384  # nodes grown at once
_MANY_ACTIONS = 2048  # stages times micro-batches, from which few partitions are bounded by paths
_FEW_PARTITIONS = 20_000
_FEW_S = 1.0  # that these may take at least: mostly they are settled by then, and preparing them takes longer
_NUM_CHECKED = 256  # partitions whose memory is looked at together


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


class SearchSpace(Protocol):
    """The partitions among which `branch_and_bound` looks for a better one: bounds, dominance and local search."""

    @property
    def bounds(self) -> CandidateBounds:
        """The candidates of each stage, with bounds of the plans that take them."""
        ...

    @property
    def relaxation(self) -> Relaxation:
        """How prefixes are bounded, and which of them make others pointless."""
        ...

    def is_settled(self, incumbent: Incumbent) -> bool:
        """Whether no better value is looked for."""
        ...

    def begun(self, incumbent: Incumbent, *, deadline_s: float) -> tuple[Self | None, Incumbent]:
        """The space narrowed after a local search for the first incumbent; None where nothing better is in it."""
        ...

    def narrowed(self, incumbent: Incumbent) -> Self | None:
        """The space without candidates that no better plan takes; None where none is left."""
        ...

    def strengthened(self, incumbent: Incumbent, *, deadline_s: float) -> tuple[Self, Incumbent]:
        """The space with better bounds, and what was found on the way; called once, after the first sweep."""
        ...

    def polished(self, incumbent: Incumbent, *, deadline_s: float) -> Incumbent:
        """The incumbent after a local search."""
        ...

    @property
    def goal(self) -> Goal:
        """What is to be small, as the largest of sums over the stages."""
        ...

    def fits(self, paths: Ints) -> Bools:
        """[N]: whether partitions, [N, S], fit the memory."""
        ...


def branch_and_bound(space: SearchSpace, incumbent: Incumbent, *, deadline_s: float) -> Incumbent:
    """What is known after a search of the space: sweeps over prefixes, each wider than the one before."""
    left, incumbent = space.begun(incumbent, deadline_s=deadline_s)
    if left is not None and not left.is_settled(incumbent):
        problem = left.bounds.problem
        is_large = problem.num_stages * problem.num_microbatches >= _MANY_ACTIONS
        every = all_paths(left.bounds.candidates, most=_FEW_PARTITIONS) if is_large else None
        if every is not None:
            incumbent = all_bounded(left, every, incumbent, deadline_s=max(deadline_s, time.perf_counter() + _FEW_S))
    width = _FIRST_WIDTH
    while left is not None and not left.is_settled(incumbent) and time.perf_counter() < deadline_s:
        incumbent = sweep(left.bounds, left.relaxation, incumbent, width=width, deadline_s=deadline_s)
        if width == _FIRST_WIDTH and not left.is_settled(incumbent):
            left, incumbent = left.strengthened(incumbent, deadline_s=deadline_s)
        if not left.is_settled(incumbent):
            left = left.narrowed(incumbent)
        width *= _WIDER
    if left is None:
        return replace(incumbent, lower_bound=incumbent.worth)
    return left.polished(incumbent, deadline_s=deadline_s)


def solution_of(problem: Problem, known: Incumbent, *, solver: str, wanted: str, time_limit_s: float) -> Solution:
    """The best partition of a search for what was `wanted`, with a note if the time limit stopped it."""
    return Solution(
        stages=stages_between(problem, known.ends.tolist()),
        lower_bound_s=known.value if known.proven else known.lower_bound,
        solver=solver,
        notes=() if known.proven else (f"the search for {wanted} was stopped after {seconds_text(time_limit_s)}",),
    )


def all_paths(candidates: Sequence[Candidates], *, most: int) -> Ints | None:
    """[N, S]: the candidates of every partition, all of which are on paths; None where there are more than `most`."""
    size = int(candidates[-1].end[-1]) + 1
    num_ways: Floats = np.equal(np.arange(size), size - 1).astype(np.float64)
    for some in reversed(candidates):
        num_ways = np.asarray(np.bincount(some.first, weights=num_ways[some.end], minlength=size))
    if num_ways[0] > most:
        return None
    paths, ends = np.zeros((1, 0), dtype=np.int64), np.zeros(1, dtype=np.int64)
    for some in candidates:
        parents, children = _pairs(some, ends)
        paths, ends = np.column_stack([paths[parents], children]), some.end[children]
    return paths


def all_bounded(space: SearchSpace, paths: Ints, incumbent: Incumbent, *, deadline_s: float) -> Incumbent:
    """What is known after the most promising of all partitions, [N, S], were looked at, until the time is up."""
    goal, candidates = space.goal, space.bounds.candidates
    figures, stages = [goal.figures(stage) for stage in range(len(candidates))], range(len(candidates))
    least, is_checked = np.zeros(len(paths)), np.zeros(len(paths), dtype=np.bool_)
    while time.perf_counter() < deadline_s and least.min() * (1 + ROUNDING) < incumbent.worth:
        index = int(least.argmin())
        if not is_checked[index]:
            some = np.flatnonzero(~is_checked)
            some = some[np.argsort(least[some], kind="stable")[:_NUM_CHECKED]]
            is_checked[some] = True
            least[some[~space.fits(paths[some])]] = np.inf
            continue
        weights = goal.heaviest(np.array([figures[s][:, paths[index, s]] for s in stages]))
        sums = np.zeros(len(paths))
        for s in stages:
            sums += (weights[s] @ figures[s])[paths[:, s]]
        value = float(goal.values(paths[index : index + 1])[0])  # with tied weights it can be above its own sum
        least = np.maximum(least, sums)
        least[index] = max(least[index], value)
        if value < incumbent.value:
            incumbent = replace(incumbent, ends=ends_of(candidates, paths[index]), value=value)
    least_value = min(float(least.min()) * (1 + ROUNDING), incumbent.worth)
    return replace(incumbent, lower_bound=max(incumbent.lower_bound, least_value))


def locally_improved(
    problem: Problem,
    candidates: Sequence[Candidates],
    incumbent: Incumbent,
    *,
    values: Callable[[Ints], Floats],
    may_be: Callable[[Ints], Bools] | None = None,
    deadline_s: float,
) -> Incumbent:
    """The incumbent after moves of single cuts; as it is where it is not made of these candidates."""
    path = path_of(candidates, incumbent.ends)
    if path is None:
        return incumbent
    path = polish(problem, candidates, path, values=values, may_be=may_be, deadline_s=deadline_s)
    return replace(incumbent, ends=ends_of(candidates, path), value=float(values(path[None])[0]))


def ends_of(candidates: Sequence[Candidates], path: Ints) -> Ints:
    """[S]: at which positions the stages of a partition end, given the candidates that it takes."""
    return np.array([some.end[i] for some, i in zip(candidates, path, strict=True)], dtype=np.int64)


def path_of(candidates: Sequence[Candidates], ends: Sequence[int] | Ints) -> Ints | None:
    """[S]: the candidates that a partition takes, given at which positions its stages end; None where one is not there."""
    path, first = [], 0
    for some, end in zip(candidates, ends, strict=True):
        rows = rows_from(some, first)
        index = rows.start + int(np.searchsorted(some.end[rows], end))
        if index >= rows.stop or some.end[index] != end:
            return None
        path.append(index)
        first = int(end)
    return np.array(path, dtype=np.int64)


def sweep(
    bounds: CandidateBounds, relaxation: Relaxation, incumbent: Incumbent, *, width: int, deadline_s: float
) -> Incumbent:
    """What is known after growing prefixes to partitions, at most `width` of them at a time."""
    nodes, left_out_s = relaxation.root(), float("inf")
    for _ in range(bounds.problem.num_stages):
        parts = list(_children(bounds, relaxation, nodes, incumbent, deadline_s))
        if time.perf_counter() > deadline_s:
            return incumbent
        if not parts:
            nodes = nodes.take(np.arange(0))
            break
        nodes = relaxation.undominated(PartialPlans.joined(parts))
        order = np.argsort(nodes.bounds_s, kind="stable")
        left_out_s = min(left_out_s, float(nodes.bounds_s[order[width:]].min(initial=np.inf)))
        nodes = nodes.take(order[:width])
    return _with_leaves(bounds, relaxation, incumbent, nodes, left_out_s)


def _children(
    bounds: CandidateBounds, relaxation: Relaxation, nodes: PartialPlans, incumbent: Incumbent, deadline_s: float
) -> Iterator[PartialPlans]:
    """The nodes with one more stage that can still lead to a better plan, in chunks; fewer if the time is up."""
    some, through_s = bounds.candidates[nodes.stage], bounds.through_s[nodes.stage]
    parents, children = _pairs(some, nodes.last_end)
    worthy = through_s[children] < incumbent.worth
    parents, children = parents[worthy], children[worthy]
    chunk = min(_MOST_AT_ONCE, num_at_once(bounds.problem))
    for start in range(0, len(parents), chunk):
        if time.perf_counter() > deadline_s:
            return
        chosen = children[start : start + chunk]
        grown = relaxation.grow(nodes.take(parents[start : start + chunk]), chosen)
        promising = np.flatnonzero(np.maximum(grown.bounds_s, through_s[chosen]) < incumbent.worth)
        if len(promising):
            yield grown.take(promising)


def _pairs(candidates: Candidates, starts: Ints) -> tuple[Ints, Ints]:
    """Every start with every candidate that begins there: indices of both."""
    begin = np.searchsorted(candidates.first, starts)
    counts = np.searchsorted(candidates.first, starts, side="right") - begin
    offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(np.arange(len(starts)), counts), np.repeat(begin, counts) + offsets


def _with_leaves(
    bounds: CandidateBounds, relaxation: Relaxation, incumbent: Incumbent, leaves: PartialPlans, left_out: float
) -> Incumbent:
    """What is known with these partitions, and no bound below `left_out` left out."""
    best = incumbent
    if len(leaves):
        most_promising = leaves.paths[np.argsort(leaves.bounds_s, kind="stable")[:_NUM_LEAVES]]
        values = relaxation.values(most_promising)
        index = int(values.argmin())
        if values[index] < incumbent.value:
            ends = ends_of(bounds.candidates, most_promising[index])
            best = replace(incumbent, ends=ends, value=float(values[index]))
    return replace(best, lower_bound=max(incumbent.lower_bound, min(left_out, best.worth)))
