"""The smallest largest stage, exactly: dynamic programs over (stage, position).

The stage is in the state because its device and its memory depend on it: under 1F1B stage s keeps K - s micro-batches.
Ties are settled exactly too: among the partitions with the smallest largest load, the smallest second-largest load;
among those, the fewest bytes across cuts. Three programs find them in turn, the later two with one stage exempt from
the lower cap, as a plan has one largest stage.

The best plan without a memory limit is also the best one with it if it fits. Whether any plan fits follows from bytes alone
(`memory_feasibility.py`). Only stages up to a cap are looked at, which rises from a lower bound until there is a plan: every plan
that is better than one within the cap is within it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from gplan.graph.down_sets import Ints, position_of
from gplan.partition.candidates import (
    INFINITY,
    CandidateLimit,
    Candidates,
    TooManyCandidates,
    best_path,
    candidates_within,
    on_paths,
    suffix_tables,
)
from gplan.partition.memory_feasibility import any_fits
from gplan.partition.plan_evaluation import fits_memory
from gplan.partition.problem import (
    Problem,
    Solution,
    compute_sums_s,
    layers_compute_s,
    nothing_recomputed,
    with_valid_bound,
    without_memory,
)

_STEPS = (1.0, 1.01, 1.03, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 100.0, INFINITY)
"""Loads to look up to, as multiples of the least that is possible."""


def smallest_largest(problem: Problem) -> Solution | None:
    """The partition with the smallest largest load, ties settled as above; None where no partition is possible.

    Raises TooManyCandidates for graphs with very many down-sets.
    """
    least_s = least_load_s(problem)
    if problem.has_memory_limit:
        free = smallest_largest(without_memory(problem))
        if free is None or fits_memory(nothing_recomputed(problem), free.stages):
            return free
        with suppress(TooManyCandidates):  # then it is not known
            if not any_fits(problem):
                return None
        least_s = free.lower_bound_s
    for times in _STEPS:
        cap_s = INFINITY if times == INFINITY else least_s * times * (1 + 1e-12)  # least_s may be 0
        cap = CandidateLimit.of_load(cap_s, num_stages=problem.num_stages)
        candidates = candidates_within(problem, cap)
        if candidates is not None:
            break
    else:
        return None
    size = problem.costs.num_positions
    loads = [some.load_s for some in candidates]
    largest_s = float(suffix_tables(candidates, loads, np.maximum, num_positions=size)[0, 0, 0])
    ends = _settle_ties(problem, candidates, largest_s)
    return with_valid_bound(
        problem, Solution(stages=stages_between(problem, ends), lower_bound_s=largest_s, solver="dp")
    )


def stages_between(problem: Problem, ends: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The layers of each stage, given at which positions they end."""
    starts = [0, *ends[:-1]]
    downsets = problem.costs.downsets
    return tuple(downsets.layers(int(first), int(end)) for first, end in zip(starts, ends, strict=True))


def least_load_s(problem: Problem) -> float:
    """What the largest load is at least: the work shared out evenly, or a layer that is most of it."""
    sums, speeds = compute_sums_s(problem), problem.speeds
    overhead_s = problem.costs.microbatch_overhead_s
    even_s = float(sums[-1] + overhead_s * problem.num_stages) / sum(speeds)
    return max(even_s, (float(layers_compute_s(problem).max()) + overhead_s) / max(speeds))


def _settle_ties(problem: Problem, candidates: list[Candidates], largest_s: float) -> list[int]:
    """Where the stages end: with that largest load, the smallest second-largest, then the fewest bytes across cuts."""
    size, costs = problem.costs.num_positions, problem.costs
    kept = on_paths([some.take(some.load_s <= largest_s) for some in candidates], size)
    assert kept is not None, "the largest load is that of a path"
    loads, free = [x.load_s for x in kept], [np.zeros(len(x)) for x in kept]
    second_s = float(suffix_tables(kept, loads, np.maximum, num_positions=size, exempt=free)[0, 1, 0])
    crossing = (costs.crossing.activation_bytes + costs.crossing.gradient_bytes).astype(np.float64)
    one = [crossing[x.first] for x in kept]
    most = [np.where(x.load_s <= second_s, values, INFINITY) for x, values in zip(kept, one, strict=True)]
    tables = suffix_tables(kept, most, np.add, num_positions=size, exempt=one)
    path = best_path(kept, tables, most, np.add, exempt=one)
    return [int(some.end[i]) for some, i in zip(kept, path, strict=True)]


def ends_of_stages(problem: Problem, stages: Sequence[Sequence[int]]) -> Ints:
    """[S]: the positions at which stages end, given their layers; the inverse of `stages_between`."""
    ends, before = [], list[int]()
    for layers in stages:
        before.extend(layers)
        ends.append(position_of(problem.costs.downsets, before))
    return np.array(ends, dtype=np.int64)
