"""Which layers come before which, directly or through others: sets of layers as the bits of whole numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Reach:
    """The order that a graph of L layers demands; every pair (before, after) has the smaller number first."""

    num_layers: int
    pairs: tuple[tuple[int, int], ...]

    @cached_property
    def is_chain(self) -> bool:
        """Whether every layer must come after the one before it, so that there is one order only."""
        return {(i, i + 1) for i in range(self.num_layers - 1)} <= set(self.pairs)

    @cached_property
    def before(self) -> tuple[int, ...]:
        """[L]: the layers that must come before each, as bits."""
        found = [0] * self.num_layers
        for layer, inputs in enumerate(self._inputs):
            for other in inputs:
                found[layer] |= found[other] | 1 << other
        return tuple(found)

    @cached_property
    def num_before(self) -> tuple[int, ...]:
        """[L]: how many layers must come before each."""
        return tuple(x.bit_count() for x in self.before)

    @cached_property
    def num_after(self) -> tuple[int, ...]:
        """[L]: how many layers must come after each."""
        return tuple(sum(later >> layer & 1 for later in self.before) for layer in range(self.num_layers))

    @cached_property
    def covers(self) -> tuple[tuple[int, int], ...]:
        """The pairs that do not follow from others."""
        return tuple(
            (other, layer)
            for layer, inputs in enumerate(self._inputs)
            for other in inputs
            if not any(self.before[x] >> other & 1 for x in inputs)
        )

    @cached_property
    def sinks(self) -> tuple[int, ...]:
        """The layers that nothing comes after."""
        return tuple(layer for layer, count in enumerate(self.num_after) if count == 0)

    @cached_property
    def fixed_steps(self) -> tuple[tuple[int, int], ...]:
        """Pairs (u, v) of layers where whatever holds u and all before it must continue with v."""
        settled = [v for v in range(self.num_layers) if self.num_before[v] + self.num_after[v] == self.num_layers - 1]
        by_count = {self.num_before[v]: v for v in settled}
        return tuple((by_count[n], by_count[n + 1]) for n in sorted(by_count) if n + 1 in by_count)

    def comes_before(self, one: int, other: int) -> bool:
        """Whether one layer must come before another."""
        return bool(self.before[other] >> one & 1)

    def latest(self, layers: Sequence[int]) -> tuple[int, ...]:
        """Those of some layers that none of the others must come after."""
        return tuple(x for x in layers if not any(self.comes_before(x, y) for y in layers))

    def earliest(self, layers: Sequence[int]) -> tuple[int, ...]:
        """Those of some layers that none of the others must come before."""
        return tuple(x for x in layers if not any(self.comes_before(y, x) for y in layers))

    @cached_property
    def _inputs(self) -> tuple[tuple[int, ...], ...]:
        inputs: list[list[int]] = [[] for _ in range(self.num_layers)]
        for before, after in sorted(set(self.pairs)):
            inputs[after].append(before)
        return tuple(tuple(x) for x in inputs)


def is_connected(num_nodes: int, edges: Iterable[tuple[int, int]]) -> bool:
    """Whether the edges, in either direction, join all nodes that they touch and nodes 0, ..., num_nodes - 1.

    >>> is_connected(3, [(0, 1), (2, 7), (7, 1)]), is_connected(3, [(0, 1)])
    (True, False)
    """
    group = {node: node for node in range(num_nodes)}

    def head(node: int) -> int:
        group.setdefault(node, node)
        while group[node] != node:
            group[node] = group[group[node]]
            node = group[node]
        return node

    for one, other in edges:
        group[head(one)] = head(other)
    return len({head(node) for node in list(group)}) <= 1
