"""What the memory of all stages of a chain is made of, computed once: searches look at the same stages very often."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gplan.core import StageBytes
from gplan.graph.down_sets import Ints


@dataclass(frozen=True)
class PartTable:
    """The parts of the memory of stages, computed once for all stages of up to so many layers."""

    num_positions: int
    computed: Callable[[Ints, Ints], StageBytes[Ints]]

    def parts(self, first: Ints, end: Ints) -> StageBytes[Ints]:
        """The parts of stages, each of the shape of `first` and `end`."""
        num_layers = end - first
        table = self._table(int(num_layers.max(initial=1)))
        return StageBytes(**dict(zip(StageBytes.__struct_fields__, table[:, end, num_layers - 1], strict=True)))

    def _table(self, most: int) -> Ints:
        """[parts, P, layers]: by where stages end and how many layers they have; only those that there are."""
        found = next((table for size, table in self._tables.items() if size >= most), None)
        if found is None:
            size = 1 << (most - 1).bit_length()  # so that few are made
            end, num_layers = (x.ravel() for x in np.indices((self.num_positions, size)))
            num_layers = num_layers + 1
            there = num_layers <= end
            rows = self.computed((end - num_layers)[there], end[there])
            found = np.zeros((len(StageBytes.__struct_fields__), self.num_positions * size), dtype=np.int64)
            found[:, there] = np.array(
                [np.broadcast_to(getattr(rows, x), there.sum()) for x in StageBytes.__struct_fields__]
            )
            self._tables[size] = found = found.reshape(-1, self.num_positions, size)
        return found

    @cached_property
    def _tables(self) -> dict[int, Ints]:
        return {}
