"""The parts of the memory of stages as the rows of an array, and a table of them for all short stages of a chain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gplan.core import StageBytes
from gplan.graph.down_sets import Ints

PARTS = StageBytes.__struct_fields__
"""The parts of a stage's memory, in the order in which arrays hold them."""

_MOST_FOR_ONE = 1000  # stages in a table for each one that is asked for; a table costs as much as about ten requests


def first_of(parts: StageBytes[Ints]) -> StageBytes[int]:
    """The first stage of some."""
    return StageBytes(**{name: int(getattr(parts, name)[0]) for name in PARTS})


def rows_of(parts: StageBytes[Ints] | StageBytes[int], shape: tuple[int, ...]) -> Ints:
    """[parts, *shape], from parts that may be the same for all stages."""
    return np.stack([np.broadcast_to(getattr(parts, name), shape) for name in PARTS]).astype(np.int64)


def parts_of(rows: Ints) -> StageBytes[Ints]:
    """The parts, from [parts, *shape]."""
    return StageBytes(**dict(zip(PARTS, rows, strict=True)))


@dataclass
class PartTable:
    """Numbers of stages of a chain, such as the parts of their memory, by a function of where they begin and end, [E] each.

    Searches ask for the same short stages very often. So all stages of up to so many layers are computed at once, in a
    table of O(positions x layers), and looked up from then on. What would need a much larger table is computed directly.
    """

    num_positions: int
    compute: Callable[[Ints, Ints], Ints]  # [rows, E]
    # [rows, P, layers]: by where stages end and their layers, from 1; 0 where there is no stage
    table: Ints | None = None

    def rows(self, first: Ints, end: Ints) -> Ints:
        """[rows, ...]: the numbers of stages with at least one layer each, of the shape of `first` and `end`."""
        num_layers = end - first
        assert num_layers.min(initial=1) > 0 <= first.min(initial=0), "every stage has a layer"
        most = int(num_layers.max(initial=1))
        if self.table is None or most > self.table.shape[-1]:
            # a power of 2, so that few tables are made
            size = min(1 << (most - 1).bit_length(), self.num_positions - 1)
            if size * self.num_positions > _MOST_FOR_ONE * max(1, first.size):
                return self.compute(first.ravel(), end.ravel()).reshape(-1, *first.shape)
            self.table = self._table(size)
        found: Ints = self.table[:, end, num_layers - 1]
        return found

    def _table(self, size: int) -> Ints:
        end, less_one = np.indices((self.num_positions, size))
        there = less_one < end
        rows = self.compute((end - less_one - 1)[there], end[there])
        table = np.zeros((len(rows), self.num_positions, size), dtype=np.int64)
        table[:, there] = rows
        return table
