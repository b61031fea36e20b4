"""Operations to layers: what the author wrote as a unit becomes one layer, and what no cut may part stays together.

The rule of what a unit is stands in profiler/capture/layers.py, that of operations as layers in
profiler/capture/operations.py.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.fx import Graph, Node

from gplan.errors import ModelError
from profiler.capture.layers import unit_paths
from profiler.capture.trace import module_path


@dataclass(frozen=True, slots=True)
class Group:
    """The operations of one layer, in the order of the trace."""

    name: str
    kind: str
    nodes: tuple[Node, ...]


def operations_of(graph: Graph, model: nn.Module) -> list[Node]:
    """What a graph does, in its order; raises ModelError where that is nothing."""
    found = [node for node in graph.nodes if node.op not in ("placeholder", "output", "get_attr")]
    if not found:
        raise ModelError(f"{type(model).__name__} performs no operation on its inputs; there is nothing to cut")
    return found


def unit_groups(graph: Graph, model: nn.Module) -> list[Group]:
    """Consecutive operations of one unit form a layer; operations between units belong to the unit before them."""
    units = unit_paths(model)
    nodes: list[list[Node]] = []
    owners: list[str] = []
    home: dict[Node, int] = {}
    for node in operations_of(graph, model):
        if node.target is operator.getitem:  # stays with the operation whose tuple it opens
            index = home[node.args[0]]  # type: ignore[index]
        else:
            owner = units.get(module_path(node))
            if not nodes or (owner is not None and owners[-1] not in (owner, "")):
                nodes.append([])
                owners.append(owner or "")
            elif owner is not None:
                owners[-1] = owner  # operations before the first unit belong to it
            index = len(nodes) - 1
        nodes[index].append(node)
        home[node] = index
    names = distinct([owner or type(model).__name__ for owner in owners])
    kinds = [type(model.get_submodule(owner)).__name__ for owner in owners]
    in_order = in_trace_order(graph, nodes)
    return [Group(name, kind, group) for name, kind, group in zip(names, kinds, in_order, strict=True)]


def in_trace_order(graph: Graph, groups: Iterable[Iterable[Node]]) -> list[tuple[Node, ...]]:
    """Each group with its nodes as the graph has them."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    return [tuple(sorted(group, key=order.__getitem__)) for group in groups]


def distinct(names: Sequence[str]) -> list[str]:
    """A name that comes several times becomes name, name#2, name#3."""
    seen: dict[str, int] = {}
    found = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        found.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return found


def merged(graph: Graph, groups: Sequence[Group], inseparable: Iterable[Collection[Node]]) -> list[Group]:
    """With those groups joined, and all between them, that have parts of what no cut may part.

    An input or a value of the state among such nodes counts as of the first group, the output as of the last.
    """
    place = {node: i for i, group in enumerate(groups) for node in group.nodes}
    joined = set[int]()  # cuts, by the group before them, that must not be made
    for nodes in inseparable:
        places = [place.get(x, len(groups) - 1 if x.op == "output" else 0) for x in nodes]
        joined.update(range(min(places), max(places)))
    runs: list[list[Group]] = []
    for i, group in enumerate(groups):
        if i - 1 in joined:
            runs[-1].append(group)
        else:
            runs.append([group])
    nodes_of = in_trace_order(graph, [[x for group in run for x in group.nodes] for run in runs])
    names = ["..".join(group.name for group in run) for run in runs]
    return [Group(name, run[0].kind, nodes) for name, run, nodes in zip(names, runs, nodes_of, strict=True)]


def no_tensors(nodes: Iterable[Node]) -> list[set[Node]]:
    """Each value that is no tensor, such as a size that depends on data, with its readers: it cannot cross a cut."""
    return [{node, *node.users} for node in nodes if node.users and not isinstance(node.meta.get("val"), Tensor)]
