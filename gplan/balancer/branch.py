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
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from gplan.balancer.batch import steps_s
from gplan.balancer.bounds import StepBounds, segments_within
from gplan.balancer.chain import smallest_largest
from gplan.balancer.labels import GPipeLabels
from gplan.balancer.moves import polish
from gplan.balancer.nodes import Nodes, Relaxation, SimulatedPrefixes
from gplan.balancer.price import Problem, Solution
from gplan.costs import Ints
from gplan.units import seconds_text

TIME_LIMIT_S = 10.0

_ROUNDING = 1e-12
_FIRST_WIDTH = 64
_WIDER = 8  # times, from sweep to sweep
_NUM_LEAVES = 256  # complete prefixes that are simulated to choose among
_CHUNK_FLOATS = 4_000_000  # arrival times held at once while nodes are simulated


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The best partition so far, where its stages end [K], its step, and a bound of every step."""

    ends: Ints
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


def smallest_step(problem: Problem, *, time_limit_s: float = TIME_LIMIT_S) -> Solution | None:
    """The partition with the smallest simulated step; None where none fits the memory."""
    start = smallest_largest(problem)
    if start is None:
        return None
    deadline_s = time.perf_counter() + time_limit_s
    ends = polish(problem, np.array([*start.cuts, problem.num_layers]), deadline_s=deadline_s)
    step_s = float(steps_s(problem, ends[None])[0])
    bounds = StepBounds(problem, segments_within(problem, step_s))
    relaxation: Relaxation = GPipeLabels(bounds) if problem.schedule == "gpipe" else SimulatedPrefixes(bounds)
    known = Known(ends=ends, step_s=step_s, lower_bound_s=bounds.whole_s)
    width = _FIRST_WIDTH
    while not known.proven and time.perf_counter() < deadline_s:
        known = sweep(bounds, relaxation, known, width=width, deadline_s=deadline_s)
        width *= _WIDER
    return _solution(problem, known, relaxation, time_limit_s)


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
    return _with_leaves(bounds.problem, known, nodes, left_out_s)


def _children(
    bounds: StepBounds, relaxation: Relaxation, nodes: Nodes, known: Known, deadline_s: float
) -> Iterator[Nodes]:
    """The nodes with one more stage that can still lead to a better plan, in chunks; fewer if the time is up."""
    through_s = bounds.through_s[nodes.stage][nodes.last_end]
    parents, lengths = np.nonzero(through_s < known.worth_s)
    chunk = max(256, min(16384, _CHUNK_FLOATS // (bounds.problem.num_stages * bounds.problem.num_microbatches)))
    for start in range(0, len(parents), chunk):
        if time.perf_counter() > deadline_s:
            return
        some, more = parents[start : start + chunk], lengths[start : start + chunk]
        grown = nodes.take(some)
        children = relaxation.grow(grown, grown.last_end + more + 1)
        promising = np.flatnonzero(np.maximum(children.bounds_s, through_s[some, more]) < known.worth_s)
        if len(promising):
            yield children.take(promising)


def _with_leaves(problem: Problem, known: Known, leaves: Nodes, left_out_s: float) -> Known:
    """What is known with these partitions, and no bound below `left_out_s` left out."""
    ends, step_s = known.ends, known.step_s
    if len(leaves):
        most_promising = leaves.ends[np.argsort(leaves.bounds_s, kind="stable")[:_NUM_LEAVES]]
        steps = steps_s(problem, most_promising)
        index = int(steps.argmin())
        if steps[index] < step_s:
            ends, step_s = most_promising[index], float(steps[index])
    return Known(ends=ends, step_s=step_s, lower_bound_s=max(known.lower_bound_s, min(left_out_s, step_s)))


def _solution(problem: Problem, known: Known, relaxation: Relaxation, time_limit_s: float) -> Solution:
    ends = polish(problem, known.ends, deadline_s=time.perf_counter() + 0.1 * time_limit_s)
    step_s = float(steps_s(problem, ends[None])[0])
    notes: tuple[str, ...] = ()
    if not known.proven:
        notes = (f"the search for a shorter step was stopped after {seconds_text(time_limit_s)}",)
    return Solution(
        cuts=tuple(ends[:-1].tolist()),
        lower_bound_s=step_s if known.proven else known.lower_bound_s,
        solver=relaxation.solver,
        notes=notes,
    )
