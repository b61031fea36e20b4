"""Colour classes of dnn-partitioning's nodes -> layers, and the outputs of nodes -> values between layers.

Which layers must come before which follows from the forward pass, as in the planner that the files come from: an edge
between forward nodes of two classes; and, for a class without forward nodes, the edges between backward nodes turned
round. Classes that need each other are one layer. An output that a layer reads in the backward pass only puts neither
layer before the other.

Every node whose output leaves its layer is one value, so that each device pays for it once. Where a forward node's
readers of the backward pass would be forced to come after it, the value is marked as one of the backward pass, which
forces nothing; what the forward pass does force is kept by values without cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import networkx as nx

from gplan.interop.importing.building import MS_PER_S, GivenLayer, given_value
from gplan.interop.importing.nodes import Edge, Node
from gplan.nouns import Value

_Class: TypeAlias = tuple[str, int]


@dataclass(frozen=True, kw_only=True)
class ColourClasses:
    """The layers that the classes of a file make; they are numbered by the place of their first node in the file."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]

    @property
    def has_operators(self) -> bool:
        """Whether the nodes are finer than layers: a class ties several of the forward pass together."""
        return any(len(_forward(members)) > 1 for members in self._members)

    def layers(self) -> tuple[GivenLayer, ...]:
        """One for each class, or for classes that need each other."""
        names = [_dearest(x).label for x in self._members]
        return tuple(
            GivenLayer(
                name=name if names.count(name) == 1 else f"{name} ({members[0].id})",
                kind=name.rstrip("0123456789_") or name,
                forward_s=sum(x.fpga_latency for x in members if not x.is_backward_node) / MS_PER_S,
                backward_s=sum(x.fpga_latency for x in members if x.is_backward_node) / MS_PER_S,
                weight_bytes=round(sum(x.size for x in members)),
            )
            for name, members in zip(names, self._members, strict=True)
        )

    def values(self) -> tuple[Value, ...]:
        """One for each node that another layer reads; then those without cost that keep the layers in order."""
        priced = [self._value(node) for node in self.nodes if self._readers(node)]
        forward = [x for x in priced if not x.is_gradient]
        kept = {(x.producer, y) for x in forward for y in x.consumers}
        missing: dict[int, list[int]] = {}
        for before, after in self._precedence.edges:
            if (before, after) not in kept:
                missing.setdefault(before, []).append(after)
        return (*priced, *(given_value(layer, after, transfer_s=0.0) for layer, after in missing.items()))

    def notes(self) -> tuple[str, ...]:
        """What the reader must know of classes that are not plain."""
        num_fused = len(set(self._class_of.values())) - len(self._members)
        num_loose = sum(bool(self._is_loose(x)) for x in self.nodes if not x.is_backward_node)
        fused = f"{num_fused} colour classes are in the layers of others, which need them and which they need"
        loose = (
            f"{num_loose} outputs of the forward pass are read in the backward pass by layers that may come before: "
            "max-device-load charges them once per device as its planner does, other objectives as gradients"
        )
        return (*([fused] if num_fused else []), *([loose] if num_loose else []))

    def _value(self, node: Node) -> Value:
        return given_value(
            self._layer_of[node.id],
            self._readers(node),
            transfer_s=self._cost_of[node.id] / MS_PER_S,
            is_gradient=bool(node.is_backward_node) or self._is_loose(node),
        )

    def _is_loose(self, node: Node) -> bool:
        """Whether a layer that need not come after a forward node's reads its output in the backward pass."""
        layer, readers = self._layer_of[node.id], self._readers(node)
        is_plain = readers <= set(self._precedence.successors(layer))
        return not (is_plain or readers <= nx.descendants(self._precedence, layer))

    def _readers(self, node: Node) -> set[int]:
        """The other layers that read the node's output."""
        return self._readers_of.get(node.id, set())

    @cached_property
    def _readers_of(self) -> dict[int, set[int]]:
        found: dict[int, set[int]] = {}
        for edge in self.edges:
            if self._layer_of[edge.source_id] != self._layer_of[edge.dest_id]:
                found.setdefault(edge.source_id, set()).add(self._layer_of[edge.dest_id])
        return found

    @cached_property
    def _cost_of(self) -> dict[int, float]:
        """To move the output of each node that has readers, in the unit of the file."""
        return {x.source_id: x.cost for x in self.edges}

    @cached_property
    def _precedence(self) -> nx.DiGraph[int]:
        """Between layers; without cycles."""
        graph: nx.DiGraph[int] = nx.DiGraph()
        graph.add_nodes_from(range(len(self._members)))
        layer_of_class = {self._class_of[x.id]: self._layer_of[x.id] for x in self.nodes}
        pairs = ((layer_of_class[a], layer_of_class[b]) for a, b in self._class_precedence.edges)
        graph.add_edges_from((a, b) for a, b in pairs if a != b)
        return graph

    @cached_property
    def _members(self) -> list[list[Node]]:
        """The nodes of each layer, in the order of the file."""
        members: list[list[Node]] = [[] for _ in set(self._layer_of.values())]
        for node in self.nodes:
            members[self._layer_of[node.id]].append(node)
        return members

    @cached_property
    def _layer_of(self) -> dict[int, int]:
        """The layer of each node, by its id."""
        component_of = {
            member: component
            for component, members in enumerate(nx.strongly_connected_components(self._class_precedence))
            for member in members
        }
        number: dict[int, int] = {}
        return {node.id: number.setdefault(component_of[self._class_of[node.id]], len(number)) for node in self.nodes}

    @cached_property
    def _class_precedence(self) -> nx.DiGraph[_Class]:
        node_of = {x.id: x for x in self.nodes}
        with_forward = {self._class_of[x.id] for x in self.nodes if not x.is_backward_node}
        graph: nx.DiGraph[_Class] = nx.DiGraph()
        graph.add_nodes_from(self._class_of.values())
        for edge in self.edges:
            source, reader = node_of[edge.source_id], node_of[edge.dest_id]
            ends = self._class_of[source.id], self._class_of[reader.id]
            if not source.is_backward_node and not reader.is_backward_node:
                graph.add_edge(*ends)
            elif source.is_backward_node and not with_forward.issuperset(ends):
                graph.add_edge(*reversed(ends))
        return graph

    @cached_property
    def _class_of(self) -> dict[int, _Class]:
        """By the id of the node; a node without a class has its own."""
        return {x.id: ("node", x.id) if x.color_class is None else ("class", x.color_class) for x in self.nodes}


def _forward(members: Sequence[Node]) -> list[Node]:
    return [x for x in members if not x.is_backward_node]


def _dearest(members: Sequence[Node]) -> Node:
    """The node that a layer is called after: of the forward pass, where there is one."""
    return max(_forward(members) or members, key=lambda node: node.fpga_latency)
