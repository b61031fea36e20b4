"""The partition with the smallest simulated step: branch and bound over the cuts, from the first stage to the last.

A node is a prefix, the first s stages. A sweep grows all nodes by one stage at a time, drops those whose bound cannot
beat the best plan known, and keeps at most `width` of the others, the most promising. If none was left out, the best
plan is proven optimal; otherwise the smallest bound left out says how much better a plan could be, and the next sweep
is wider, until the time is up. What a prefix is bounded by, and which prefixes make others pointless, is the matter
of a `Relaxation`: labels for GPipe, a simulation of the prefix for every other schedule.

Exact up to rounding: plans within 1e-12 of each other count as equal. Ties are settled by moving single cuts only.
The worst case is exponential in K; the time is limited, and the proof then states the gap.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gplan.balancer.arcs import Arcs, arcs_within, fitting, on_paths
from gplan.balancer.batch import steps_s
from gplan.balancer.bounds import StepBounds, busy_within, sifted
from gplan.balancer.labels import GPipeLabels
from gplan.balancer.largest import smallest_largest, stages_between
from gplan.balancer.moves import polish
from gplan.balancer.nodes import Nodes, Relaxation, SimulatedPrefixes
from gplan.balancer.price import Problem, Solution, laid_out, stages_of, step_s, without_memory
from gplan.downsets import Ints, position_of
from gplan.nouns import Stage
from gplan.units import seconds_text

TIME_LIMIT_S = 10.0

_ROUNDING = 1e-12
_SLACK = 1e-9  # share by which closed forms may be off
_FIRST_WIDTH = 64
_WIDER = 8  # times, from sweep to sweep
_NUM_LEAVES = 256  # complete prefixes that are simulated to choose among
_CHUNK_FLOATS = 4_000_000  # arrival times held at once while nodes are simulated


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The best partition so far, as the arcs it takes [K], its step, and a bound of every step."""

    path: Ints
    step_s: float
    lower_bound_s: float

    @property
    def proven(self) -> bool:
        """Whether no partition is better."""
        return self.lower_bound_s >= self.worth_s

    @property
    def worth_s(self) -> float:
        """Only plans below this are better by more than rounding."""
        return self.step_s * (1.0 - _ROUNDING)


def smallest_step(
    problem: Problem, *, start: Solution | None = None, time_limit_s: float = TIME_LIMIT_S
) -> Solution | None:
    """The partition with the smallest simulated step; None where no partition is possible.

    `start` is a plan to begin with, by default that with the smallest largest stage. Raises TooManyArcs for graphs
    with very many down-sets.
    """
    start = start or smallest_largest(problem)
    if start is None:
        return None
    deadline_s = time.perf_counter() + time_limit_s
    known_s = step_s(*_priced(problem, start.stages))
    arcs = arcs_within(without_memory(problem), busy_within(problem, known_s * (1.0 + _ROUNDING)))
    assert arcs is not None, "the partition that is known is a path"
    arcs = sifted(problem, arcs, known_s * (1.0 + _SLACK))
    known = Known(path=path_of(problem, arcs, start.stages), step_s=known_s, lower_bound_s=0.0)
    bounds, known = _promising(StepBounds(problem, arcs), known)
    path = polish(problem, bounds.arcs, known.path, deadline_s=deadline_s)
    known = replace(known, path=path, step_s=float(steps_s(problem, bounds.arcs, path[None])[0]))
    bounds, known = _promising(bounds, known)
    relaxation: Relaxation = GPipeLabels(bounds) if problem.schedule == "gpipe" else SimulatedPrefixes(bounds)
    width = _FIRST_WIDTH
    while not known.proven and time.perf_counter() < deadline_s:
        known = sweep(bounds, relaxation, known, width=width, deadline_s=deadline_s)
        width *= _WIDER
    return _solution(bounds, known, relaxation, time_limit_s)


def path_of(problem: Problem, arcs: Sequence[Arcs], stages: Sequence[Sequence[int]]) -> Ints:
    """[K]: the arcs that a partition takes; it must be made of them."""
    path, first, held = [], 0, list[int]()
    for some, stage in zip(arcs, stages, strict=True):
        held.extend(stage)
        position = position_of(problem.costs.downsets, held)
        path.append(int(np.flatnonzero((some.first == first) & (some.end == position))[0]))
        first = int(some.end[path[-1]])
    return np.array(path, dtype=np.int64)


def _priced(problem: Problem, stages: Sequence[Sequence[int]]) -> tuple[Problem, tuple[Stage, ...]]:
    there, cuts = laid_out(problem, stages)
    return there, stages_of(there, cuts)


def _promising(bounds: StepBounds, known: Known) -> tuple[StepBounds, Known]:
    """The bounds of the arcs that a better plan could take and that fit the memory; the best plan known takes such arcs."""
    kept = [through_s <= known.step_s * (1.0 + _ROUNDING) for through_s in bounds.through_s]
    for stage, taken in enumerate(known.path):
        kept[stage][taken] = True
    worthy = [some.take(x) for some, x in zip(bounds.arcs, kept, strict=True)]
    worthy = [fitting(bounds.problem, stage, some) for stage, some in enumerate(worthy)]
    arcs = on_paths(worthy, bounds.problem.costs.num_positions)
    assert arcs is not None, "the best plan known is a path"
    ends = [int(some.end[i]) for some, i in zip(bounds.arcs, known.path, strict=True)]
    path = path_of(bounds.problem, arcs, stages_between(bounds.problem, ends))
    closer = StepBounds(bounds.problem, arcs)
    return closer, replace(known, path=path, lower_bound_s=max(known.lower_bound_s, closer.whole_s))


def sweep(bounds: StepBounds, relaxation: Relaxation, known: Known, *, width: int, deadline_s: float) -> Known:
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
    return _with_leaves(bounds, known, nodes, left_out_s)


def _children(
    bounds: StepBounds, relaxation: Relaxation, nodes: Nodes, known: Known, deadline_s: float
) -> Iterator[Nodes]:
    """The nodes with one more stage that can still lead to a better plan, in chunks; fewer if the time is up."""
    some, through_s = bounds.arcs[nodes.stage], bounds.through_s[nodes.stage]
    parents, children = _pairs(some, nodes.last_end)
    worthy = through_s[children] < known.worth_s
    parents, children = parents[worthy], children[worthy]
    chunk = max(256, min(16384, _CHUNK_FLOATS // (bounds.problem.num_stages * bounds.problem.num_microbatches)))
    for start in range(0, len(parents), chunk):
        if time.perf_counter() > deadline_s:
            return
        chosen = children[start : start + chunk]
        grown = relaxation.grow(nodes.take(parents[start : start + chunk]), chosen)
        promising = np.flatnonzero(np.maximum(grown.bounds_s, through_s[chosen]) < known.worth_s)
        if len(promising):
            yield grown.take(promising)


def _pairs(arcs: Arcs, starts: Ints) -> tuple[Ints, Ints]:
    """Every start with every arc that begins there: indices of both."""
    begin = np.searchsorted(arcs.first, starts)
    counts = np.searchsorted(arcs.first, starts, side="right") - begin
    offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(np.arange(len(starts)), counts), np.repeat(begin, counts) + offsets


def _with_leaves(bounds: StepBounds, known: Known, leaves: Nodes, left_out_s: float) -> Known:
    """What is known with these partitions, and no bound below `left_out_s` left out."""
    path, step_s = known.path, known.step_s
    if len(leaves):
        most_promising = leaves.paths[np.argsort(leaves.bounds_s, kind="stable")[:_NUM_LEAVES]]
        steps = steps_s(bounds.problem, bounds.arcs, most_promising)
        index = int(steps.argmin())
        if steps[index] < step_s:
            path, step_s = most_promising[index], float(steps[index])
    return Known(path=path, step_s=step_s, lower_bound_s=max(known.lower_bound_s, min(left_out_s, step_s)))


def _solution(bounds: StepBounds, known: Known, relaxation: Relaxation, time_limit_s: float) -> Solution:
    problem, arcs = bounds.problem, bounds.arcs
    path = polish(problem, arcs, known.path, deadline_s=time.perf_counter() + 0.1 * time_limit_s)
    step_s = float(steps_s(problem, arcs, path[None])[0])
    notes: tuple[str, ...] = ()
    if not known.proven:
        notes = (f"the search for a shorter step was stopped after {seconds_text(time_limit_s)}",)
    return Solution(
        stages=stages_between(problem, [int(some.end[i]) for some, i in zip(arcs, path, strict=True)]),
        lower_bound_s=step_s if known.proven else known.lower_bound_s,
        solver=relaxation.solver,
        notes=notes,
    )
