"""The smallest largest stage of a chain, exactly: dynamic programs over (stage index, cut).

The stage index is in the state because the memory of a stage depends on it: under 1F1B stage s keeps K - s
micro-batches. Ties are settled exactly too: among the partitions with the smallest largest load, the smallest
second-largest load; among those, the fewest bytes across cuts. Three programs find them in turn, the later two with
one stage exempt from the lower cap, as a plan has one largest stage.

Each program is exact and O(K L W), with W the length of the longest stage worth looking at: a load that was guessed
and found sufficient limits it, so that a long chain cut into many stages stays cheap.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gplan.balancer.price import Problem, Solution
from gplan.balancer.segments import INFINITY, Segments, Values, all_segments, best_cuts, fitting, loads_s, suffix_tables
from gplan.costs import Floats


def smallest_largest(problem: Problem) -> Solution | None:
    """The partition with the smallest largest load, ties settled as above; None where none fits the memory."""
    for segments, limit_s in _ever_wider(problem):
        loads = _within(segments, segments.load_s, INFINITY)
        largest_s = float(suffix_tables(segments, loads, np.maximum)[0, 0, 0])
        if largest_s <= limit_s:
            break
    if largest_s == INFINITY:
        return None
    return Solution(cuts=_settle_ties(segments, largest_s), lower_bound_s=largest_s, solver="dp")


def _ever_wider(problem: Problem) -> Iterator[tuple[Segments, float]]:
    """Ever more segments, each time with the load up to which none is left out; at last all of them."""
    layers = np.arange(problem.num_layers + 1)
    loads = loads_s(problem, layers[:, None], layers[None, :])
    lengths = layers[None, :] - layers[:, None]
    widest = all_segments(problem).width
    limit_s = 1.2 * max(float(loads[0, -1]) / problem.num_stages, float(loads[lengths == 1].max()))
    while (width := int(lengths[loads <= limit_s].max())) < widest:
        yield Segments(problem, max(width, 1)), limit_s
        limit_s *= 1.5
    yield all_segments(problem), INFINITY


def _settle_ties(segments: Segments, largest_s: float) -> tuple[int, ...]:
    """The cuts with that largest load, then the smallest second-largest, then the fewest bytes across cuts."""
    nothing = np.zeros(segments.load_s.shape)
    below, free = _within(segments, segments.load_s, largest_s), _within(segments, nothing, largest_s)
    second_s = float(suffix_tables(segments, below, np.maximum, exempt=free)[0, 1, 0])
    most = _within(segments, segments.cut_bytes, second_s)
    one = _within(segments, segments.cut_bytes, largest_s)
    tables = suffix_tables(segments, most, np.add, exempt=one)
    return best_cuts(segments, tables, most, np.add, exempt=one)


def _within(segments: Segments, values: Floats, limit_s: float) -> Values:
    """The values of the segments with at most that load that fit the memory at each stage index."""
    capped = np.where(segments.load_s <= limit_s, values, INFINITY)
    return fitting(segments, capped)
