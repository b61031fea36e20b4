"""Which layers of a model must run before which others: a directed acyclic graph, held by networkx.

An edge (u, v) says that layer v reads what layer u makes. The orders in which the layers can run, cycles, and the edges
that follow from others come from networkx, which is imported only for models with branches: of a chain everything is
known from its length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import networkx as nx


@dataclass(frozen=True)
class LayerGraph:
    """Layers 0, ..., L-1 and edges (before, after). Raises ValueError for an edge with a layer that does not exist."""

    num_layers: int
    edges: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        for before, after in self.edges:
            if not (0 <= before < self.num_layers and 0 <= after < self.num_layers):
                raise ValueError(
                    f"layer {before} before layer {after}: expected layers from 0 to {self.num_layers - 1}"
                )

    @cached_property
    def is_chain(self) -> bool:
        """Whether 0, 1, ..., L-1 is the only order: every layer but the first has an edge from the one before it."""
        has_all_steps = {(i, i + 1) for i in range(self.num_layers - 1)} <= set(self.edges)
        return has_all_steps and all(before < after for before, after in self.edges)

    @cached_property
    def digraph(self) -> nx.DiGraph[int]:
        """The graph in networkx, layers and edges by rising number."""
        import networkx as nx

        graph: nx.DiGraph[int] = nx.DiGraph()
        graph.add_nodes_from(range(self.num_layers))
        graph.add_edges_from(sorted(self.edges))
        return graph

    @cached_property
    def generations(self) -> tuple[tuple[int, ...], ...]:
        """Layers that can run at once, after all those of earlier generations. Raises ValueError for a cycle."""
        import networkx as nx

        try:
            return tuple(map(tuple, nx.topological_generations(self.digraph)))
        except nx.NetworkXUnfeasible:
            edges = nx.find_cycle(self.digraph)
            cycle = " -> ".join(str(before) for before, _ in [*edges, edges[0]])
            raise ValueError(f"layers {cycle} wait for each other; expected a graph without cycles") from None

    @cached_property
    def order(self) -> tuple[int, ...]:
        """An order in which the layers can run, generation by generation. Raises ValueError for a cycle."""
        if self.is_chain:
            return tuple(range(self.num_layers))
        return tuple(layer for generation in self.generations for layer in generation)

    @cached_property
    def reduced_edges(self) -> tuple[tuple[int, int], ...]:
        """The edges that do not follow from others, by rising second layer."""
        if self.is_chain:
            return tuple((i, i + 1) for i in range(self.num_layers - 1))
        import networkx as nx

        return tuple(sorted(nx.transitive_reduction(self.digraph).edges, key=lambda edge: edge[::-1]))

    @cached_property
    def _is_before(self) -> NDArray[np.bool_]:
        """[L, L]: whether the first layer must come before the second; the transitive closure."""
        if self.is_chain:
            return np.triu(np.ones((self.num_layers, self.num_layers), dtype=np.bool_), k=1)
        closure = np.zeros((self.num_layers, self.num_layers), dtype=np.bool_)
        for layer in self.order:
            inputs = list(self.digraph.predecessors(layer))
            closure[:, layer] = closure[:, inputs].any(axis=1)
            closure[inputs, layer] = True
        return closure

    def comes_before(self, one: int, other: int) -> bool:
        """Whether one layer must come before another, directly or through others."""
        return bool(self._is_before[one, other])

    @cached_property
    def num_before(self) -> tuple[int, ...]:
        """[L]: how many layers must come before each."""
        return tuple(self._is_before.sum(axis=0).tolist())

    def last_of(self, layers: Sequence[int]) -> tuple[int, ...]:
        """Those of some layers that no other of them must follow."""
        return tuple(x for x in layers if not any(self.comes_before(x, y) for y in layers))
