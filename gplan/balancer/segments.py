"""Every candidate stage as an entry of an array, and the dynamic programs that choose K of them.

A segment is a run of layers. Segments lie in arrays of shape [L+1, W]: entry [i, n] is layers [i, i+n+1), and W, the
width, is the longest that is looked at. What does not exist, or does not fit the memory at that stage index, costs
infinity, so that a partition into K stages is a path of K entries from layer 0 to layer L:

    layers   0 1 2 3 4 5 6      stage 0 = entry [0, 2]
             └─0─┘ └1┘ └2┘      stage 1 = entry [3, 1], stage 2 = entry [5, 1]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from gplan.balancer.price import Problem, moments_of, recomputed_share
from gplan.costs import Floats, Ints
from gplan.memory import Moment, StageBytes, moment_bytes

Bools = NDArray[np.bool_]
Values: TypeAlias = Callable[[int], Floats]
"""Stage index to what each segment would cost there, [L+1, W]; infinity where it cannot be."""
Combine: TypeAlias = Callable[[Floats, Floats], Floats]
"""How the costs of the stages add up: np.maximum or np.add."""
Demand: TypeAlias = tuple[tuple[int, int, int, str, bool], ...]
"""What the moments of a stage ask for; stages with the same demand hold as much."""

INFINITY = float("inf")


@dataclass(frozen=True)
class Segments:
    """The candidate stages of a problem that are at most `width` layers long."""

    problem: Problem
    width: int

    @cached_property
    def first(self) -> Ints:
        """[L+1, W]: the first layer of each segment."""
        return np.broadcast_to(np.arange(self.problem.num_layers + 1)[:, None], self.exists.shape)

    @cached_property
    def end(self) -> Ints:
        """[L+1, W]: the layer after the last of each segment, L where it would be beyond."""
        return np.minimum(self._unclipped_end, self.problem.num_layers)

    @cached_property
    def exists(self) -> Bools:
        """[L+1, W]: whether the segment ends within the chain."""
        exists: Bools = self._unclipped_end <= self.problem.num_layers
        return exists

    @cached_property
    def load_s(self) -> Floats:
        """[L+1, W]: the load of each segment; infinity where there is none."""
        return np.where(self.exists, loads_s(self.problem, self.first, self.end), INFINITY)

    @cached_property
    def cut_bytes(self) -> Floats:
        """[L+1, W]: bytes that cross the left cut of each segment per micro-batch, both directions."""
        costs = self.problem.costs
        crossing = (costs.activation_bytes + costs.gradient_bytes).astype(np.float64)
        return crossing[self.first]

    def peak_bytes(self, stage: int) -> Ints:
        """[L+1, W]: the most memory that each segment would hold as this stage."""
        moments = moments_of(self.problem, stage)
        demand = demand_of(moments)
        if demand not in self._peaks:
            self._peaks[demand] = peak_of(moments, self._parts)
        return self._peaks[demand]

    def fits(self, stage: int) -> Bools:
        """[L+1, W]: whether each segment exists and fits the memory as this stage."""
        limit = self.problem.memory_bytes
        return self.exists if limit is None else self.exists & (self.peak_bytes(stage) <= limit)

    @cached_property
    def _unclipped_end(self) -> Ints:
        return np.arange(self.problem.num_layers + 1)[:, None] + np.arange(1, self.width + 1)[None, :]

    @cached_property
    def _parts(self) -> StageBytes[Ints]:
        return parts_at(self.problem, self.first, self.end)

    @cached_property
    def _peaks(self) -> dict[Demand, Ints]:
        return {}


def all_segments(problem: Problem) -> Segments:
    """Every segment that leaves at least one layer to each of the other stages."""
    return Segments(problem, problem.num_layers - problem.num_stages + 1)


def fitting(segments: Segments, values: Floats) -> Values:
    """The values of the segments that fit the memory at each stage index, infinity for the others."""
    return lambda stage: np.where(segments.fits(stage), values, INFINITY)


def loads_s(problem: Problem, first: Ints, end: Ints) -> Floats:
    """The loads of stages [first, end), in the arithmetic of `stage_load_s`, so that equal is equal."""
    costs, overhead_s = problem.costs, problem.costs.profile.overhead_s
    compute_s = (costs.forward_s[first, end] + overhead_s) + (costs.backward_s[first, end] + overhead_s)
    compute_s = compute_s + recomputed_share(problem) * costs.recompute_s[first, end]
    loads: Floats = compute_s + costs.gradient_s[end] + costs.activation_s[first]
    return loads


def parts_at(problem: Problem, first: Ints, end: Ints) -> StageBytes[Ints]:
    """The parts of the memory of stages [first, end)."""
    parts = problem.costs.stage_bytes
    return StageBytes(**{name: getattr(parts, name)[first, end] for name in StageBytes.__slots__})


def demand_of(moments: Sequence[Moment]) -> Demand:
    """The moments without the names of their actions."""
    return tuple((x.num_stashes, x.num_checkpoints, x.num_done, x.workspace, x.has_gradients) for x in moments)


def peak_of(moments: Sequence[Moment], parts: StageBytes[Ints]) -> Ints:
    """The most that these stages hold at any of the moments."""
    peak = moment_bytes(moments[0], parts)
    for moment in moments[1:]:
        peak = np.maximum(peak, moment_bytes(moment, parts))
    return peak


def suffix_tables(segments: Segments, values: Values, combine: Combine, *, exempt: Values | None = None) -> Floats:
    """[K+1, 2, L+1]: the least cost of cutting layers [i, L) into stages s, ..., K-1.

    With [:, 1, :] at most one of these stages may be costed by `exempt` instead of `values`. Exact; O(K L W).
    """
    num_stages, num_layers = segments.problem.num_stages, segments.problem.num_layers
    tables = np.full((num_stages + 1, 2, num_layers + 1), INFINITY)
    tables[num_stages, :, num_layers] = 0.0
    for stage in reversed(range(num_stages)):
        after = tables[stage + 1][:, segments.end]
        tables[stage] = combine(values(stage)[None], after).min(axis=2)
        if exempt is not None:
            with_exemption = combine(exempt(stage), after[0]).min(axis=1)
            tables[stage, 1] = np.minimum(tables[stage, 1], with_exemption)
    return tables


def prefix_tables(segments: Segments, values: Values, combine: Combine) -> Floats:
    """[K+1, L+1]: the least cost of cutting layers [0, j) into stages 0, ..., s-1. Exact; O(K L W)."""
    num_stages, num_layers = segments.problem.num_stages, segments.problem.num_layers
    lengths = np.arange(segments.width)[None, :]
    first = np.arange(num_layers + 1)[:, None] - lengths - 1  # of the segment that ends before layer j
    before = np.maximum(first, 0)
    tables = np.full((num_stages + 1, num_layers + 1), INFINITY)
    tables[0, 0] = 0.0
    for stage in range(num_stages):
        costs = combine(values(stage)[before, lengths], tables[stage][before])
        tables[stage + 1] = np.where(first >= 0, costs, INFINITY).min(axis=1)
    return tables


def best_cuts(
    segments: Segments, tables: Floats, values: Values, combine: Combine, *, exempt: Values | None = None
) -> tuple[int, ...]:
    """The cuts of one partition that attains `tables[0, 1, 0]` (of `suffix_tables`); it must be finite."""
    cuts, first, may_exempt = [], 0, 1
    for stage in range(segments.problem.num_stages):
        after = tables[stage + 1][:, segments.end[first]]
        row = combine(values(stage)[first], after[may_exempt])
        if exempt is not None and may_exempt:
            exempt_row = combine(exempt(stage)[first], after[0])
            if exempt_row.min() < row.min():
                row, may_exempt = exempt_row, 0
        first = int(segments.end[first, int(row.argmin())])
        cuts.append(first)
    return tuple(cuts[:-1])
