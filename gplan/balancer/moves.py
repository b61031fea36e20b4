"""A partition made better by moving one cut at a time: a good plan to start from, and ties settled at the end.

Better is a shorter step (by more than rounding); then a smaller largest load, a smaller second-largest load, fewer
bytes across cuts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from gplan.balancer.arcs import Arcs
from gplan.balancer.batch import steps_s
from gplan.balancer.problem import Problem
from gplan.balancer.tables import rows_from
from gplan.downsets import Floats, Ints

_ROUNDING = 1e-12  # share of the step by which steps that count as equal may differ
_MOST_MOVES = 4096  # of one cut, looked at at once


def polish(problem: Problem, arcs: Sequence[Arcs], path: Ints, *, deadline_s: float) -> Ints:
    """The partition, given the arcs it takes, [K], after every single move of a cut that made it better."""
    if problem.num_stages == 1:
        return path
    equal_s = _ROUNDING * float(steps_s(problem, arcs, path[None])[0])
    best, best_key = path, _keys(problem, arcs, path[None], equal_s)[0]
    while time.perf_counter() < deadline_s:
        moved = _moves(arcs, best)
        if not len(moved):
            break
        keys = _keys(problem, arcs, moved, equal_s)
        index = np.lexsort(keys.T[::-1])[0]
        if tuple(keys[index]) >= tuple(best_key):
            break
        best, best_key = moved[index], keys[index]
    return best


def _keys(problem: Problem, arcs: Sequence[Arcs], paths: Ints, equal_s: float) -> Floats:
    """[N, 4]: the step in units of `equal_s`, the two largest loads, and the bytes across cuts of N partitions."""
    costs = problem.costs
    steps = np.rint(steps_s(problem, arcs, paths) / equal_s) if equal_s else np.zeros(len(paths))
    loads = np.sort(np.column_stack([some.load_s[paths[:, s]] for s, some in enumerate(arcs)]), axis=1)
    crossing = costs.activation_bytes + costs.gradient_bytes
    bytes_across = sum(crossing[some.first[paths[:, s]]] for s, some in enumerate(arcs))
    return np.column_stack([steps, loads[:, -1], loads[:, -2], bytes_across])


def _moves(arcs: Sequence[Arcs], path: Ints) -> Ints:
    """[N, K]: every partition that differs from this one in one cut."""
    moves = [path[None][:0]]
    for stage in range(len(path) - 1):
        here, following = arcs[stage], arcs[stage + 1]
        rows = rows_from(here, int(here.first[path[stage]]))
        to_here = np.flatnonzero(following.end == following.end[path[stage + 1]])
        _, mine, theirs = np.intersect1d(here.end[rows], following.first[to_here], return_indices=True)
        kept = slice(0, _MOST_MOVES)
        moved = np.repeat(path[None], len(mine[kept]), axis=0)
        moved[:, stage] = rows.start + mine[kept]
        moved[:, stage + 1] = to_here[theirs[kept]]
        moves.append(moved[moved[:, stage] != path[stage]])
    return np.concatenate(moves)
