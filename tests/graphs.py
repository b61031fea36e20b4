"""Small random graphs of layers, and their down-sets by brute force."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
from hypothesis import strategies as st

from gplan.graph.down_sets import GraphDownSets, down_sets
from gplan.graph.layer_graph import LayerGraph


@dataclass(frozen=True)
class Graph:
    num_layers: int
    pairs: list[tuple[int, int]]  # before, after

    @property
    def positions(self) -> GraphDownSets:
        found = down_sets(LayerGraph(self.num_layers, tuple(self.pairs)), most=10_000)
        assert found is not None
        return found

    def brute(self) -> Iterator[frozenset[int]]:
        """Every subset that is a down-set."""
        for size in range(self.num_layers + 1):
            for chosen in map(frozenset, combinations(range(self.num_layers), size)):
                if all(before in chosen for before, after in self.pairs if after in chosen):
                    yield chosen

    def chains(self, num_stages: int) -> Iterator[tuple[tuple[int, ...], ...]]:
        """The layers of the stages, none empty, of every chain of down-sets."""
        inner = [x for x in self.brute() if 0 < len(x) < self.num_layers]
        everything = frozenset(range(self.num_layers))
        for chosen in combinations(inner, num_stages - 1):
            ends = [frozenset[int](), *chosen, everything]
            if all(x < y for x, y in pairwise(ends)):
                yield tuple(tuple(sorted(y - x)) for x, y in pairwise(ends))


@st.composite
def graphs(draw: st.DrawFn, max_layers: int = 6) -> Graph:
    """Some layers, of which those that come before are not always those with the lower numbers."""
    num_layers = draw(st.integers(1, max_layers))
    places = draw(st.permutations(range(num_layers)))
    every = [(places[i], places[j]) for i, j in combinations(range(num_layers), 2)]
    return Graph(num_layers, draw(st.lists(st.sampled_from(every), unique=True)) if every else [])


def towers(first: int, second: int) -> Graph:
    """Two chains without a connection."""
    one, other = [(i, i + 1) for i in range(first - 1)], [(first + i, first + i + 1) for i in range(second - 1)]
    return Graph(first + second, one + other)


def sets_of(positions: GraphDownSets) -> list[frozenset[int]]:
    """The layers before each position."""
    return [frozenset(np.flatnonzero(row).tolist()) for row in positions.members]
