"""The common form of published profiles: layers that are placed as a whole, and the values that they share.

A stage holds the layers between two down-sets of the precedence graph. Its load is the time of its layers; the
device-load objective adds the transfer time of each value whose layers lie on several devices, once per device that
holds any of them (Tarnawski et al. 2020, "Efficient Algorithms for Device Placement of DNN Graph Operators", max-load).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import networkx as nx

from gplan.core.errors import FileError

Stages: TypeAlias = tuple[tuple[int, ...], ...]
Objective: TypeAlias = Literal["device-load", "compute"]

LARGEST = 1e15  # larger than any time or size; sums of such numbers are still exact integers
_NO_TIME = {"ms": 1e-6, "s": 1e-9}  # a layer of less than this takes no time


@dataclass(frozen=True, kw_only=True)
class PublishedGraph:
    """A published profile. Times are in `unit`; layers are numbered from 0 in any order."""

    nodes: tuple[tuple[str, ...], ...]  # [L]: ids of the file's nodes that make up each layer
    compute: tuple[float, ...]  # [L]: time of forward and backward
    num_bytes: tuple[int, ...]  # [L]: in the memory of a device
    shared: Mapping[tuple[int, ...], float]  # layers that make or read a value (rising) -> time to move it
    precedence: tuple[tuple[int, int], ...]  # pairs (before, after) of layers; no cycles
    unit: Literal["ms", "s"]
    memory_bytes: int | None  # of each device, where the file states it
    objective: Objective  # of the planner that the format belongs to

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.nodes)

    @property
    def running_order(self) -> list[int]:
        """The layers in an order in which they can run, as in the file where it leaves a choice."""
        graph: nx.DiGraph[int] = nx.DiGraph(self.precedence)
        graph.add_nodes_from(range(self.num_layers))
        return list(nx.lexicographical_topological_sort(graph))

    def load(self, layers: Sequence[int], objective: Objective) -> float:
        """The load of a device that holds these layers."""
        held = set(layers)
        paid = 0.0
        if objective == "device-load":
            paid = sum(time for ends, time in self.shared.items() if 0 < len(held.intersection(ends)) < len(ends))
        return sum(self.compute[x] for x in layers) + paid

    def value(self, stages: Stages, objective: Objective) -> float:
        """The largest load of some stages."""
        return max(self.load(x, objective) for x in stages)

    def fits(self, stages: Stages, memory_bytes: int | None) -> bool:
        """Whether every stage fits the memory of a device."""
        return memory_bytes is None or all(sum(self.num_bytes[x] for x in stage) <= memory_bytes for stage in stages)


def contracted(graph: PublishedGraph) -> PublishedGraph:
    """The graph where each layer that takes no time and has one neighbour is joined to it.

    dnn-partitioning's planner prepares graphs in this way whatever the memory, so a plan that needs such a layer on
    another device does not exist for it (msr-fiddle/dnn-partitioning, throughput-dp/dp.cpp,
    performTrivialNodeOptimizations).
    """
    members = {i: [i] for i in range(graph.num_layers)}
    time, limit = dict(enumerate(graph.compute)), _NO_TIME[graph.unit]
    joined: nx.Graph[int] = nx.Graph(graph.precedence)
    joined.add_nodes_from(members)
    while (lone := next((x for x in members if time[x] < limit and joined.degree(x) == 1), None)) is not None:
        (neighbour,) = joined[lone]
        members[neighbour] += members.pop(lone)
        time[neighbour] += time[lone]
        joined.remove_node(lone)
    groups = tuple(tuple(sorted(x)) for x in members.values())
    place = {layer: i for i, group in enumerate(groups) for layer in group}
    shared: dict[tuple[int, ...], float] = {}
    for ends, moved in graph.shared.items():
        left = tuple(sorted({place[x] for x in ends}))
        if len(left) > 1:
            shared[left] = shared.get(left, 0.0) + moved
    return replace(
        graph,
        nodes=tuple(tuple(x for layer in group for x in graph.nodes[layer]) for group in groups),
        compute=tuple(sum(graph.compute[x] for x in group) for group in groups),
        num_bytes=tuple(sum(graph.num_bytes[x] for x in group) for group in groups),
        shared=shared,
        precedence=tuple(sorted({(place[a], place[b]) for a, b in graph.precedence if place[a] != place[b]})),
    )


def check_no_cycle(graph: nx.DiGraph[str], *, name: str) -> None:
    """Raise FileError that names the nodes of a cycle, if there is one."""
    if nx.is_directed_acyclic_graph(graph):
        return
    cycle = [edge[0] for edge in nx.find_cycle(graph)]
    raise FileError(
        f"{name} has a cycle: {' -> '.join([*cycle, cycle[0]])}; expected nodes that can run one after the other"
    )


def check_connected(graph: PublishedGraph, *, name: str) -> None:
    """Raise FileError where there are no layers, or several and nothing between them."""
    if not graph.num_layers:
        raise FileError(f"{name} has no node that takes part in the plan; expected at least one")
    if graph.num_layers > 1 and not graph.shared:
        raise FileError(
            f"{name} has {graph.num_layers} layers and no edge between them; expected edges: is it cut off?"
        )
