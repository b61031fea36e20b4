"""A partition made better by moving one cut at a time: a good plan to start from, and ties settled at the end.

Better is a shorter step (by more than rounding); then a smaller largest load, a smaller second-largest load, fewer
bytes across cuts.
"""

from __future__ import annotations

import time

import numpy as np

from gplan.balancer.batch import steps_s
from gplan.balancer.price import Problem, moments_of
from gplan.balancer.segments import Bools, loads_s, parts_at, peak_of
from gplan.costs import Floats, Ints

_ROUNDING = 1e-12  # share by which steps that count as equal may differ


def polish(problem: Problem, ends: Ints, *, deadline_s: float) -> Ints:
    """The partition, given where each stage ends, [K], after every single move of a cut that made it better."""
    if problem.num_stages == 1:
        return ends
    equal_s = _ROUNDING * float(steps_s(problem, ends[None])[0])
    best, best_key = ends, _keys(problem, ends[None], equal_s)[0]
    while time.perf_counter() < deadline_s:
        moved = _moves(best)
        moved = moved[fits_memory(problem, moved)]
        if not len(moved):
            break
        keys = _keys(problem, moved, equal_s)
        index = np.lexsort(keys.T[::-1])[0]
        if tuple(keys[index]) >= tuple(best_key):
            break
        best, best_key = moved[index], keys[index]
    return best


def fits_memory(problem: Problem, ends: Ints) -> Bools:
    """[N]: which of N partitions, [N, K], fit the memory."""
    fits = np.ones(len(ends), dtype=np.bool_)
    if problem.memory_bytes is None:
        return fits
    firsts = _firsts(ends)
    for stage in range(problem.num_stages):
        parts = parts_at(problem, firsts[:, stage], ends[:, stage])
        fits &= peak_of(moments_of(problem, stage), parts) <= problem.memory_bytes
    return fits


def _keys(problem: Problem, ends: Ints, equal_s: float) -> Floats:
    """[N, 4]: the step in units of `equal_s`, the two largest loads, and the bytes across cuts of N partitions."""
    costs, firsts = problem.costs, _firsts(ends)
    steps = np.rint(steps_s(problem, ends) / equal_s) if equal_s else np.zeros(len(ends))
    loads = np.sort(loads_s(problem, firsts, ends), axis=1)
    crossing = (costs.activation_bytes + costs.gradient_bytes)[firsts].sum(axis=1)
    return np.column_stack([steps, loads[:, -1], loads[:, -2], crossing])


def _firsts(ends: Ints) -> Ints:
    return np.hstack([np.zeros((len(ends), 1), dtype=np.int64), ends[:, :-1]])


def _moves(ends: Ints) -> Ints:
    """Every partition that differs from this one in one cut."""
    bounds = [0, *ends.tolist()]
    moves = []
    for stage in range(len(ends) - 1):
        for end in range(bounds[stage] + 1, bounds[stage + 2]):
            if end != ends[stage]:
                moved = ends.copy()
                moved[stage] = end
                moves.append(moved)
    return np.array(moves, dtype=np.int64).reshape(-1, len(ends))
