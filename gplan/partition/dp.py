"""The dynamic programs over paths of candidates: the least cost from each position to the end,
and from the beginning to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import numpy as np

from gplan.graph.down_sets import Floats, Ints

Combine: TypeAlias = Callable[[Floats, Floats], Floats]
"""How the costs of the stages add up: np.maximum or np.add."""

INFINITY = float("inf")


class StagePairs(Protocol):
    """The candidates of one stage, [E] each, by rising first position."""

    @property
    def first(self) -> Ints:
        """Where they begin."""
        ...

    @property
    def end(self) -> Ints:
        """Where they end."""
        ...


def suffix_tables(
    candidates: Sequence[StagePairs],
    values: Sequence[Floats],
    combine: Combine,
    *,
    num_positions: int,
    exempt: Sequence[Floats] | None = None,
) -> Floats:
    """[K+1, 2, P]: the least cost of stages s, ..., K-1 from each position on, `values[s]` being those of the candidates.

    With [:, 1] at most one of these stages may be costed by `exempt` instead. Exact; O(candidates).
    """
    num_stages = len(candidates)
    tables = np.full((num_stages + 1, 2, num_positions), INFINITY)
    tables[num_stages, :, -1] = 0.0
    for stage in reversed(range(num_stages)):
        some, runs = candidates[stage], _Runs(candidates[stage].first)
        for may_exempt in range(2):
            costs = combine(values[stage], tables[stage + 1, may_exempt][some.end])
            if may_exempt and exempt is not None:
                costs = np.minimum(costs, combine(exempt[stage], tables[stage + 1, 0][some.end]))
            runs.write_least(costs, tables[stage, may_exempt])
    return tables


def prefix_tables(
    candidates: Sequence[StagePairs], values: Sequence[Floats], combine: Combine, *, num_positions: int
) -> Floats:
    """[K+1, P]: the least cost of stages 0, ..., s-1 up to each position. Exact; O(candidates log candidates)."""
    tables = np.full((len(candidates) + 1, num_positions), INFINITY)
    tables[0, 0] = 0.0
    for stage, some in enumerate(candidates):
        by_end = np.argsort(some.end, kind="stable")
        costs = combine(values[stage], tables[stage][some.first])
        _Runs(some.end[by_end]).write_least(costs[by_end], tables[stage + 1])
    return tables


def best_path(
    candidates: Sequence[StagePairs],
    tables: Floats,
    values: Sequence[Floats],
    combine: Combine,
    *,
    exempt: Sequence[Floats] | None = None,
) -> Ints:
    """[K]: which candidate of each stage one path takes that attains `tables[0, 1, 0]` (of `suffix_tables`), if finite."""
    path, first, may_exempt = [], 0, 1
    for stage, some in enumerate(candidates):
        rows = rows_from(some, first)
        after = tables[stage + 1][:, some.end[rows]]
        row = combine(values[stage][rows], after[may_exempt])
        if exempt is not None and may_exempt:
            exempt_row = combine(exempt[stage][rows], after[0])
            if exempt_row.min() < row.min():
                row, may_exempt = exempt_row, 0
        path.append(rows.start + int(row.argmin()))
        first = int(some.end[path[-1]])
    return np.array(path, dtype=np.int64)


def rows_from(candidates: StagePairs, first: int) -> slice:
    """Where the candidates from one position are."""
    return slice(
        int(np.searchsorted(candidates.first, first)), int(np.searchsorted(candidates.first, first, side="right"))
    )


class _Runs:
    """Runs of equal positions in a sorted array."""

    def __init__(self, positions: Ints) -> None:
        self._starts = np.flatnonzero(np.concatenate([[True], positions[1:] != positions[:-1]]))
        self._positions = positions[self._starts]

    def write_least(self, costs: Floats, table: Floats) -> None:
        """The least cost of each run, written at its position."""
        table[self._positions] = np.minimum.reduceat(costs, self._starts)
