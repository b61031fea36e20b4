"""Branch and bound over the cuts, from the first stage to the last: the smallest simulated step of paths of some candidates.

A node is a prefix, the first s stages. A sweep grows all nodes by one stage at a time, drops those whose bound cannot
beat the best plan known, and keeps at most `width` of the others, the most promising. If none was left out, the best
plan is proven optimal; otherwise the smallest bound left out says how much better a plan could be, and the next sweep
is wider, until the time is up. What a prefix is bounded by, and which prefixes make others pointless, is the matter
of a `Relaxation`: labels for GPipe, a simulation of the prefix for every other schedule.

Exact up to rounding: plans within 1e-12 of each other count as equal. The worst case is exponential in K.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from gplan.graph.down_sets import Ints
from gplan.partition.batch_simulation import steps_s
from gplan.partition.bounds import StepBounds
from gplan.partition.candidates import Candidates, fitting, on_paths
from gplan.partition.dominance import GPipeLabels
from gplan.partition.dp import rows_from
from gplan.partition.local_search import polish
from gplan.partition.prefixes import CandidateBounds, Nodes, Relaxation, SimulatedPrefixes
from gplan.partition.problem import Problem

_ROUNDING = 1e-12
_SLACK = 1e-9  # share by which a bound may be off
_FIRST_WIDTH = 64
_WIDER = 8  # times, from sweep to sweep
_NUM_LEAVES = 256  # complete prefixes that are simulated to choose among
_CHUNK_FLOATS = 4_000_000  # arrival times held at once while nodes are simulated


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
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
        return min(self.value * (1.0 - _ROUNDING), self.limit)


def searched(problem: Problem, candidates: Sequence[Candidates], known: Known, *, deadline_s: float) -> Known:
    """What is known after a search among the paths of these candidates, which need not fit the memory yet."""
    bounds = _promising(StepBounds(problem, candidates), known)
    if bounds is None:
        return replace(known, lower_bound=known.worth)
    known = polished(problem, bounds.candidates, known, deadline_s=deadline_s)
    bounds = _promising(bounds, known)
    if bounds is None:
        return replace(known, lower_bound=known.worth)
    known = replace(known, lower_bound=max(known.lower_bound, bounds.whole_s))
    relaxation: Relaxation = GPipeLabels(bounds) if problem.schedule == "gpipe" else SimulatedPrefixes(bounds)
    width = _FIRST_WIDTH
    while not known.proven and time.perf_counter() < deadline_s:
        known = sweep(bounds, relaxation, known, width=width, deadline_s=deadline_s)
        width *= _WIDER
    return polished(problem, bounds.candidates, known, deadline_s=deadline_s)


def polished(problem: Problem, candidates: Sequence[Candidates], known: Known, *, deadline_s: float) -> Known:
    """The best plan after moves of single cuts; as it is where it is not made of these candidates."""
    path = path_of(candidates, known.ends)
    if path is None:
        return known
    path = polish(problem, candidates, path, values=partial(steps_s, problem, candidates), deadline_s=deadline_s)
    return replace(known, ends=ends_of(candidates, path), value=float(steps_s(problem, candidates, path[None])[0]))


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


def _promising(bounds: StepBounds, known: Known) -> StepBounds | None:
    """The bounds of the candidates that fit the memory and that a plan worth having could take; None where there is none."""
    worth_s = known.worth * (1.0 + _SLACK)
    worthy = [some.take(x <= worth_s) for some, x in zip(bounds.candidates, bounds.through_s, strict=True)]
    worthy = [fitting(bounds.problem, stage, some) for stage, some in enumerate(worthy)]
    candidates = on_paths(worthy, bounds.problem.costs.num_positions)
    return None if candidates is None else StepBounds(bounds.problem, candidates)


def sweep(bounds: CandidateBounds, relaxation: Relaxation, known: Known, *, width: int, deadline_s: float) -> Known:
    """What is known after growing prefixes to partitions, at most `width` of them at a time."""
    nodes, left_out_s = relaxation.root(), float("inf")
    for _ in range(bounds.problem.num_stages):
        parts = list(_children(bounds, relaxation, nodes, known, deadline_s))
        if time.perf_counter() > deadline_s:
            return known
        if not parts:
            nodes = nodes.take(np.arange(0))
            break
        nodes = relaxation.undominated(Nodes.joined(parts))
        order = np.argsort(nodes.bounds_s, kind="stable")
        left_out_s = min(left_out_s, float(nodes.bounds_s[order[width:]].min(initial=np.inf)))
        nodes = nodes.take(order[:width])
    return _with_leaves(bounds, relaxation, known, nodes, left_out_s)


def _children(
    bounds: CandidateBounds, relaxation: Relaxation, nodes: Nodes, known: Known, deadline_s: float
) -> Iterator[Nodes]:
    """The nodes with one more stage that can still lead to a better plan, in chunks; fewer if the time is up."""
    some, through_s = bounds.candidates[nodes.stage], bounds.through_s[nodes.stage]
    parents, children = _pairs(some, nodes.last_end)
    worthy = through_s[children] < known.worth
    parents, children = parents[worthy], children[worthy]
    chunk = max(256, min(16384, _CHUNK_FLOATS // (bounds.problem.num_stages * bounds.problem.num_microbatches)))
    for start in range(0, len(parents), chunk):
        if time.perf_counter() > deadline_s:
            return
        chosen = children[start : start + chunk]
        grown = relaxation.grow(nodes.take(parents[start : start + chunk]), chosen)
        promising = np.flatnonzero(np.maximum(grown.bounds_s, through_s[chosen]) < known.worth)
        if len(promising):
            yield grown.take(promising)


def _pairs(candidates: Candidates, starts: Ints) -> tuple[Ints, Ints]:
    """Every start with every candidate that begins there: indices of both."""
    begin = np.searchsorted(candidates.first, starts)
    counts = np.searchsorted(candidates.first, starts, side="right") - begin
    offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(np.arange(len(starts)), counts), np.repeat(begin, counts) + offsets


def _with_leaves(
    bounds: CandidateBounds, relaxation: Relaxation, known: Known, leaves: Nodes, left_out: float
) -> Known:
    """What is known with these partitions, and no bound below `left_out` left out."""
    best = known
    if len(leaves):
        most_promising = leaves.paths[np.argsort(leaves.bounds_s, kind="stable")[:_NUM_LEAVES]]
        values = relaxation.values(most_promising)
        index = int(values.argmin())
        if values[index] < known.value:
            ends = ends_of(bounds.candidates, most_promising[index])
            best = replace(known, ends=ends, value=float(values[index]))
    return replace(best, lower_bound=max(known.lower_bound, min(left_out, best.worth)))
