"""A partition made better by moving one cut at a time: a good plan to start from, and ties settled at the end.

Better is a smaller value, such as a shorter step (by more than rounding); then a smaller largest load of a device, a
smaller second-largest load, fewer bytes across cuts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gplan.graph.down_sets import Bools, Floats, Ints
from gplan.partition.candidates import Candidates, rows_from
from gplan.partition.problem import ROUNDING, Problem

_MOST_MOVES = 4096  # of one cut, looked at at once


def polish(
    problem: Problem,
    candidates: Sequence[Candidates],
    path: Ints,
    *,
    values: Callable[[Ints], Floats],
    deadline_s: float,
    may_be: Callable[[Ints], Bools] | None = None,
) -> Ints:
    """The partition, given the candidates it takes, [S], after every move of one cut that made it better.

    `values(paths)` are to be small, [N] of N partitions, such as their steps; only those that `may_be` are taken.
    """
    if problem.num_stages == 1:
        return path
    key_of = _Keys(problem, candidates, values, equal=ROUNDING * float(values(path[None])[0]))
    best, best_key = path, key_of(path[None])[0]
    while time.perf_counter() < deadline_s:
        moved = _moves(candidates, best)
        if may_be is not None and len(moved):
            moved = moved[may_be(moved)]
        keys = key_of(moved)
        order = np.lexsort(keys.T[::-1])
        if not len(keys) or tuple(keys[order[0]]) >= tuple(best_key):
            break
        best, best_key = moved[order[0]], keys[order[0]]
    return best


@dataclass(frozen=True)
class _Keys:
    """[N, 4] of N partitions: the values in units of `equal`, the two largest loads of devices,
    the bytes across cuts."""

    problem: Problem
    candidates: Sequence[Candidates]
    values: Callable[[Ints], Floats]
    equal: float

    def __call__(self, paths: Ints) -> Floats:
        """The smaller, the better, from the first number on."""
        costs, candidates = self.problem.costs, self.candidates
        if not len(paths):
            return np.zeros((0, 4))
        values = np.rint(self.values(paths) / self.equal) if self.equal else np.zeros(len(paths))
        by_stage = [some.load_s[paths[:, s]] for s, some in enumerate(candidates)]
        by_device = [sum(by_stage[s] for s in stages) for stages in self.problem.stages_by_device]
        loads = np.sort(np.column_stack([np.zeros(len(paths)), *by_device]), axis=1)
        crossing = costs.crossing.activation_bytes + costs.crossing.gradient_bytes
        is_sent = [self.problem.boundaries(s).before for s in range(len(candidates))]
        bytes_across = sum(crossing[some.first[paths[:, s]]] * is_sent[s] for s, some in enumerate(candidates))
        rows = [values, loads[:, -1], loads[:, -2], np.asarray(bytes_across, dtype=np.float64)]
        return np.stack(rows, axis=1)


def _moves(candidates: Sequence[Candidates], path: Ints) -> Ints:
    """[N, K]: every partition that differs from this one in one cut."""
    moves = [path[None][:0]]
    for stage in range(len(path) - 1):
        here, following = candidates[stage], candidates[stage + 1]
        rows = rows_from(here, int(here.first[path[stage]]))
        to_here = np.flatnonzero(following.end == following.end[path[stage + 1]])
        _, mine, theirs = np.intersect1d(here.end[rows], following.first[to_here], return_indices=True)
        kept = slice(0, _MOST_MOVES)
        moved = np.repeat(path[None], len(mine[kept]), axis=0)
        moved[:, stage] = rows.start + mine[kept]
        moved[:, stage + 1] = to_here[theirs[kept]]
        moves.append(moved[moved[:, stage] != path[stage]])
    return np.concatenate(moves)
