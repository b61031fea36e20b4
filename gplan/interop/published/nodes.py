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

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import TypeAlias

import msgspec
import networkx as nx

from gplan.core import Device, Granularity, Layer, LayerCost, Link, ModelId, Profile, StepCost, Timing, Value, ValueCost
from gplan.core.errors import FileError

# The nodes and edges of dnn-partitioning's JSON, field by field as they stand in the file.


class Node(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A layer or operator, of the forward or of the backward pass. Times and sizes are in the file's units."""

    id: int
    fpga_latency: float
    size: float  # bytes on the accelerator: weights, activations, everything
    is_backward_node: bool | int
    supported_on_fpga: bool | int
    color_class: int | None = None  # nodes of one class share a device; None: a class of its own
    name: str | None = None

    @property
    def label(self) -> str:
        """What messages and layers call it."""
        return self.name or f"node {self.id}"


class Edge(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The output of one node is read by another; `cost` is the time to move that output, the same on all its edges."""

    source_id: int
    dest_id: int
    cost: float


# What the readers of all formats share: the checks of numbers and of cycles, and the way to a Profile.
#
# A reader hands over layers in the order of the file; here they come into an order in which they can run, ties broken by
# the file's order.


MS_PER_S = 1000.0
MICROBATCH_SIZE = 1  # whatever the file's micro-batch was: neither format says it
_LARGEST = 1e15  # beyond any time or size, and sums of it are still whole numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenLayer:
    """A layer as a file gives it, for one micro-batch."""

    name: str
    kind: str
    forward_s: float
    backward_s: float
    weight_bytes: int
    gradient_bytes: int = 0
    stash_bytes: int = 0
    num_parameters: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenGraph:
    """What a file says: layers in its order, and values between their numbers in that order."""

    layers: tuple[GivenLayer, ...]
    values: tuple[Value, ...]
    link: Link
    granularity: Granularity
    memory_bytes: int | None  # of each device
    notes: tuple[str, ...]


def given_value(
    producer: int,
    consumers: Iterable[int],
    *,
    num_bytes: int = 0,
    gradient_bytes: int = 0,
    transfer_s: float | None = None,
    is_gradient: bool = False,
) -> Value:
    """A value from one layer to others, at the one micro-batch size."""
    cost = ValueCost(microbatch_size=MICROBATCH_SIZE, num_bytes=num_bytes, gradient_bytes=gradient_bytes)
    rising = tuple(sorted(set(consumers)))
    return Value(producer=producer, consumers=rising, costs=(cost,), transfer_s=transfer_s, is_gradient=is_gradient)


def profile_of(graph: GivenGraph, *, name: str, content: bytes) -> Profile:
    """The graph as a profile called `name`, in an order in which its layers can run. Its precedence has no cycle."""
    order = _running_order(len(graph.layers), graph.values)
    place = {layer: i for i, layer in enumerate(order)}
    values = tuple(x.renumbered(place) for x in graph.values)
    return Profile(
        model=ModelId(name=name, settings=(), digest=hashlib.sha256(content).hexdigest()),
        device=Device(name=f"accelerator of {name}", kind="given", memory_bytes=graph.memory_bytes),
        layers=tuple(_layer(graph.layers[layer], i, values) for i, layer in enumerate(order)),
        shared_weights=(),
        loss=(),
        loss_reduction="mean",
        step=StepCost.none(),
        link=graph.link,
        overhead_s=0.0,
        whole_model=(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=(),
        origin="given",
        notes=graph.notes,
        granularity=graph.granularity,
        values=values,
    )


def check_number(value: float, *, place: str, least: float = 0.0) -> None:
    """Raise FileError with the place in the file, such as "x.json: $.nodes[3].size", for what no cost can be."""
    if not least <= value <= _LARGEST:
        raise FileError(f"{place} is {value!r}; expected a number from {least:g} to {_LARGEST:g}")


def check_no_cycle(graph: nx.DiGraph[str], *, name: str) -> None:
    """Raise FileError that names the nodes of a cycle, if there is one."""
    if nx.is_directed_acyclic_graph(graph):
        return
    cycle = [edge[0] for edge in nx.find_cycle(graph)]
    raise FileError(
        f"{name} has a cycle: {' -> '.join([*cycle, cycle[0]])}; expected nodes that can run one after the other"
    )


def check_joined(num_layers: int, values: Sequence[Value], *, name: str) -> None:
    """Raise FileError where there are no layers, or several and nothing between them: a file cut off, or no model."""
    if not num_layers:
        raise FileError(f"{name} has no node that takes part in the plan; expected at least one")
    if num_layers > 1 and not values:
        raise FileError(f"{name} has {num_layers} layers and no edge between them; expected edges: is it cut off?")


def _running_order(num_layers: int, values: Sequence[Value]) -> list[int]:
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(range(num_layers))
    forward = [x for x in values if not x.is_gradient]
    graph.add_edges_from((x.producer, y) for x in forward if x.producer is not None for y in x.consumers)
    return list(nx.lexicographical_topological_sort(graph))


def _layer(given: GivenLayer, index: int, values: Sequence[Value]) -> Layer:
    cost = LayerCost(
        microbatch_size=MICROBATCH_SIZE,
        forward=Timing.exactly(given.forward_s),
        backward=Timing.exactly(given.backward_s),
        stash_bytes=given.stash_bytes,
        forward_workspace_bytes=0,
        backward_workspace_bytes=0,
        output_bytes=sum(x.costs[0].num_bytes for x in values if _is_alive_after(x, index)),
        output_gradient_bytes=sum(x.costs[0].gradient_bytes for x in values if _is_alive_after(x, index)),
        output_unsaved_bytes=0,
    )
    return Layer(
        name=given.name,
        kind=given.kind,
        num_parameters=given.num_parameters,
        weight_bytes=given.weight_bytes,
        gradient_bytes=given.gradient_bytes,
        costs=(cost,),
    )


def _is_alive_after(value: Value, index: int) -> bool:
    return not value.is_gradient and (value.producer or 0) <= index < value.consumers[-1]


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
