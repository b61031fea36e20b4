"""The JSON of dnn-partitioning (github.com/msr-fiddle/dnn-partitioning; its README describes the fields).

An object with `maxSizePerFPGA` (bytes of an accelerator), `nodes` (`id`, `fpgaLatency`, `isBackwardNode`, `colorClass`,
`size`, `supportedOnFpga`) and `edges` (`sourceId`, `destId`, `cost`). Times have no unit in the format; its graphs hold
numbers of PipeDream's profiles, which are milliseconds. Other fields, such as those about CPUs, are ignored.

Nodes of one colour class share a device, so a class is a layer. The forward pass decides the precedence: an edge between
forward nodes of two classes and, for classes without forward nodes, the reversed edges between backward nodes. Classes
on a cycle are one layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, TypeAlias

import msgspec
import networkx as nx

from gplan.core.errors import FileError
from published.graph import LARGEST, PublishedGraph, check_no_cycle

_COST_TOLERANCE = 1e-6  # that of dnn-partitioning's planner, in the file's unit
Amount: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=LARGEST)]


class _Node(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A layer or operator of the forward or backward pass, with the field names and units of the file."""

    id: int
    fpga_latency: Amount
    size: Amount  # bytes on the accelerator
    is_backward_node: bool | int
    supported_on_fpga: bool | int
    color_class: int | None = None  # None: a class of its own
    name: str | None = None

    @property
    def label(self) -> str:
        """How messages name the node."""
        return self.name or f"node {self.id}"


class _Edge(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One node reads the output of another; `cost` is the time to move that output, equal on all its edges."""

    source_id: int
    dest_id: int
    cost: Amount


class _File(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    max_size: Annotated[float, msgspec.Meta(ge=1, le=LARGEST)] = msgspec.field(name="maxSizePerFPGA")
    nodes: tuple[_Node, ...]
    edges: tuple[_Edge, ...]


def dnn_partitioning_graph(text: str, *, name: str) -> PublishedGraph:
    """The graph of the colour classes; `name` is the file's, for errors."""
    file = _parsed(text, name)
    classes = _ColourClasses(nodes=file.nodes, edges=file.edges)
    return PublishedGraph(
        nodes=tuple(tuple(str(x.id) for x in members) for members in classes.members),
        compute=tuple(sum(x.fpga_latency for x in members) for members in classes.members),
        num_bytes=tuple(round(sum(x.size for x in members)) for members in classes.members),
        shared=classes.shared(),
        precedence=classes.precedence(),
        unit="ms",
        memory_bytes=int(file.max_size),
        objective="device-load",
    )


def _parsed(text: str, name: str) -> _File:
    """Raises FileError with the place of the first value that cannot be used."""
    try:
        file = msgspec.json.decode(text, type=_File)
    except (msgspec.DecodeError, RecursionError) as error:
        raise FileError(f"{name} is not a profile of dnn-partitioning, or is cut off: {error}") from error
    if (problem := next(_problems(file), None)) is not None:
        raise FileError(f"{name}: $.{problem}")
    text_of = {x.id: f"{x.label} (id {x.id})" for x in file.nodes}
    check_no_cycle(nx.DiGraph((text_of[x.source_id], text_of[x.dest_id]) for x in file.edges), name=name)
    return file


def _problems(file: _File) -> Iterator[str]:
    first: dict[int, int] = {}
    cost_of: dict[int, float] = {}
    for i, node in enumerate(file.nodes):
        if not node.supported_on_fpga:
            yield f"nodes[{i}].supportedOnFpga is 0, so {node.label} runs on a CPU only; expected nodes that all run on the accelerator"
        if first.setdefault(node.id, i) != i:
            yield f"nodes[{i}].id is {node.id}, as of $.nodes[{first[node.id]}]; expected unique ids"
    for i, edge in enumerate(file.edges):
        for field, end in (("sourceId", edge.source_id), ("destId", edge.dest_id)):
            if end not in first:
                yield f"edges[{i}].{field} is {end}; expected the id of one of the {len(first)} nodes"
        before = cost_of.setdefault(edge.source_id, edge.cost)
        if abs(before - edge.cost) > _COST_TOLERANCE:
            yield f"edges[{i}].cost is {edge.cost!r} and {before!r} on an edge before; expected one cost for the output of a node"
        source, reader = (file.nodes[first[x]] for x in (edge.source_id, edge.dest_id))
        if source.is_backward_node and not reader.is_backward_node:
            yield f"edges[{i}] runs from {source.label} of the backward pass to {reader.label} of the forward pass"


_Class = tuple[str, int]


@dataclass(frozen=True, kw_only=True)
class _ColourClasses:
    """The layers that the classes of a file make, numbered by the place of their first node in the file."""

    nodes: Sequence[_Node]
    edges: Sequence[_Edge]

    @cached_property
    def members(self) -> list[list[_Node]]:
        """[L]: the nodes of each layer, in the order of the file."""
        members: list[list[_Node]] = [[] for _ in set(self._layer_of.values())]
        for node in self.nodes:
            members[self._layer_of[node.id]].append(node)
        return members

    def shared(self) -> dict[tuple[int, ...], float]:
        """The layers that share the output of any node, and the time to move all that they share."""
        cost_of = {x.source_id: x.cost for x in self.edges}
        shared: dict[tuple[int, ...], float] = {}
        for node, readers in self._readers.items():
            ends = tuple(sorted({self._layer_of[node], *readers}))
            shared[ends] = shared.get(ends, 0.0) + cost_of[node]
        return shared

    def precedence(self) -> tuple[tuple[int, int], ...]:
        """Pairs of layers. Layers that read a forward output in the backward pass only come after its producer
        where the forward pass demands it."""
        graph: nx.DiGraph[int] = nx.DiGraph()
        graph.add_nodes_from(range(len(self.members)))
        layer_of_class = {self._class_of[x.id]: self._layer_of[x.id] for x in self.nodes}
        pairs = ((layer_of_class[a], layer_of_class[b]) for a, b in self._class_precedence.edges)
        graph.add_edges_from((a, b) for a, b in pairs if a != b)
        after = {layer: nx.descendants(graph, layer) for layer in graph}
        read = {
            (self._layer_of[x.id], reader)
            for x in self.nodes
            if not x.is_backward_node and self._readers.get(x.id, set()) <= after[self._layer_of[x.id]]
            for reader in self._readers.get(x.id, set())
        }
        return tuple(sorted({*graph.edges, *read}))

    @cached_property
    def _readers(self) -> dict[int, set[int]]:
        """By the id of a node: the other layers that read its output."""
        found: dict[int, set[int]] = {}
        for edge in self.edges:
            if self._layer_of[edge.source_id] != self._layer_of[edge.dest_id]:
                found.setdefault(edge.source_id, set()).add(self._layer_of[edge.dest_id])
        return found

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
