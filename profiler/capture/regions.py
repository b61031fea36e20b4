"""Cut a region with a graph of its own, such as the whole forward under autocast or a backbone under no_grad, into layers.

torch.export keeps a `with torch.autocast(...)` or a `with torch.no_grad()` as one operation with an inner graph. A region
that spans several layers becomes one such operation for each of them, with the same setting.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from profiler.capture.authored_layers import unit_paths
from profiler.capture.grouping import groups_by_module, merged, operations_of, uncut_spans, vmap_spans
from profiler.capture.inplace import rewrite_in_place
from profiler.capture.trace import module_path

_PLACE_OF_BODY: dict[Any, int] = {  # among the arguments
    torch.ops.higher_order.wrap_with_set_grad_enabled: 1,
    torch.ops.higher_order.wrap_with_autocast: 4,
}


def split_regions(graph: Graph, owner: GraphModule, model: nn.Module) -> None:
    """Replace every region of `graph`, whose inner graphs are attributes of `owner`, by one for each layer that it spans."""
    for node in [x for x in graph.nodes if x.target in _PLACE_OF_BODY]:
        body: GraphModule = getattr(owner, _body_name(node))
        if not any(x.op == "call_function" for x in body.graph.nodes):
            continue
        split_regions(body.graph, body, model)
        parts = _parts(body, model)
        body.recompile()
        if len(parts) > 1:
            _replace(node, body, parts, owner, model)


def _parts(body: GraphModule, model: nn.Module) -> list[tuple[Node, ...]]:
    """The operations of a region in the layers that they belong to."""
    groups = groups_by_module(body.graph, model)
    if len(groups) < 2:
        return []
    given = [x for x in body.graph.nodes if x.op == "placeholder"]
    operations = operations_of(body.graph, model)
    inseparable = [*rewrite_in_place(body.graph, given), *uncut_spans(operations), *vmap_spans(operations)]
    return [x.nodes for x in merged(body.graph, groups, inseparable)]


def _replace(
    region: Node, body: GraphModule, parts: Sequence[tuple[Node, ...]], owner: GraphModule, model: nn.Module
) -> None:
    graph, units, name, place = region.graph, unit_paths(model), _body_name(region), _PLACE_OF_BODY[region.target]
    given = [x for x in body.graph.nodes if x.op == "placeholder"]
    values = dict(zip(given, region.args[place + 1 :], strict=True))  # of the body in the graph around it
    returned = next(iter(reversed(body.graph.nodes))).args[0]
    kept = {x for x in pytree.tree_leaves(returned) if isinstance(x, Node)}
    with graph.inserting_before(region):
        for number, nodes in enumerate(parts):
            needed = {x: None for node in nodes for x in node.all_input_nodes if x not in nodes and x.op != "get_attr"}
            outputs = [x for x in nodes if x in kept or not set(nodes).issuperset(x.users)]
            setattr(owner, f"{name}_{number}", GraphModule(body, _part(nodes, needed, outputs)))
            args = *region.args[:place], graph.get_attr(f"{name}_{number}"), *(values[x] for x in needed)
            call = graph.call_function(region.target, args)  # type: ignore[arg-type]
            inside = next((x for x in nodes if module_path(x) in units), nodes[0])
            call.meta = {**region.meta, **inside.meta, "val": tuple(x.meta.get("val") for x in outputs)}
            for index, node in enumerate(outputs):
                values[node] = entry = graph.call_function(operator.getitem, (call, index))
                entry.meta = {**node.meta}
    for user, value in _readings(region, returned):
        user.replace_all_uses_with(values.get(value, value))
        graph.erase_node(user)
    if not isinstance(returned, Node):
        graph.erase_node(region)


def _body_name(region: Node) -> str:
    body = region.args[_PLACE_OF_BODY[region.target]]
    assert isinstance(body, Node)
    return str(body.target)


def _readings(region: Node, returned: object) -> Iterator[tuple[Node, Node]]:
    """The operations that stand for a result of a region in the graph around it, and these results in its inner graph."""
    if isinstance(returned, Node):
        yield region, returned
        return
    for user in list(region.users):
        yield user, returned[user.args[1]]  # type: ignore[index]


def _part(nodes: Sequence[Node], needed: Iterable[Node], outputs: Sequence[Node]) -> Graph:
    """A graph of some operations, from the values that they need to those that others read."""
    graph, copies = Graph(), dict[Node, Node]()
    for x in needed:
        copies[x] = graph.placeholder(x.name)
        copies[x].meta = {**x.meta}

    def copy_of(node: Node) -> Node:
        if node not in copies:  # an inner graph
            copies[node] = graph.get_attr(str(node.target))
        return copies[node]

    for node in nodes:
        copies[node] = graph.node_copy(node, copy_of)
    graph.output(tuple(copies[x] for x in outputs))
    return graph
