"""Group the operations of a trace into layers by the author's modules, regions with graphs of their own included.

torch.export keeps a `with torch.autocast(...)` or a `with torch.no_grad()` as one operation with an inner graph, such as
the whole forward under autocast or a backbone under no_grad. A region that spans several layers becomes one such
operation for each of them, with the same setting. Granularity "op" is in gplan_profiler/capture/operation_layers.py.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from gplan.core.errors import ModelError
from gplan_profiler.capture.authored_layers import PART
from gplan_profiler.capture.inplace import rewrite_in_place
from gplan_profiler.capture.state_readings import repeat_state_readings, without_repeats
from gplan_profiler.capture.trace import module_path, operation_name
from gplan_profiler.capture.value_forms import has_fixed_size
from gplan_profiler.memory.allocations import tensors_in
from gplan_profiler.torch_compat import pytree

_PLACE_OF_BODY: dict[Any, int] = {  # among the arguments
    torch.ops.higher_order.wrap_with_set_grad_enabled: 1,
    torch.ops.higher_order.wrap_with_autocast: 4,
}

_NO_UNIT = "", ""


@dataclass(frozen=True, slots=True)
class Group:
    """The operations of one layer, in the order of the trace."""

    name: str
    kind: str
    nodes: tuple[Node, ...]


def operations_of(graph: Graph, model: nn.Module) -> list[Node]:
    """The operations of a graph, in its order; raises ModelError if there are none."""
    found = [node for node in graph.nodes if node.op not in ("placeholder", "output", "get_attr")]
    if not found:
        raise ModelError(f"{type(model).__name__} performs no operation on its inputs; there is nothing to cut")
    return found


def groups_by_module(graph: Graph, model: nn.Module, units: Mapping[str, str]) -> list[Group]:
    """Consecutive operations of one call of a unit form a layer; those between units belong to the unit before them.

    Between the parts of a divided layer they are cut where the fewest bytes cross instead, as late as possible. `units`
    has the path of the unit of every module inside one (`unit_paths`).
    """
    operations = operations_of(graph, model)
    owners: list[tuple[str, str]] = []  # the unit and its call
    places: list[tuple[int, int]] = []  # for each layer, where it may begin at the earliest and at the latest
    after_unit = 0  # the place after the last operation of a unit
    for place, node in enumerate(operations):
        if node.target is operator.getitem:  # stays with the operation that makes the tuple
            after_unit += after_unit == place
            continue
        unit = units.get(module_path(node)) or None
        owner = None if unit is None else (unit, call_of(node, unit))
        if not owners or (owner is not None and owners[-1] not in (owner, _NO_UNIT)):
            owners.append(owner or _NO_UNIT)
            places.append((after_unit, place))
        elif owner is not None:
            owners[-1] = owner  # operations before the first unit belong to it
        if owner is not None:
            after_unit = place + 1
    starts = [0, *_starts(operations, places[1:], units)]
    nodes: list[list[Node]] = [[] for _ in owners]
    home: dict[Node, int] = {}
    for place, node in enumerate(operations):
        is_entry = node.target is operator.getitem
        home[node] = home[node.args[0]] if is_entry else bisect_right(starts, place) - 1  # type: ignore[index]
        nodes[home[node]].append(node)
    names = distinct([unit or type(model).__name__ for unit, _ in owners])
    kinds = [type(model.get_submodule(unit)).__name__ for unit, _ in owners]
    return [Group(name, kind, tuple(group)) for name, kind, group in zip(names, kinds, nodes, strict=True)]


def _starts(operations: Sequence[Node], places: Sequence[tuple[int, int]], units: Mapping[str, str]) -> Iterator[int]:
    """Where layers begin that may begin at some places, the earliest and the latest; see `groups_by_module`."""
    index = {node: place for place, node in enumerate(operations)}
    change = [0] * (len(operations) + 1)  # in the bytes that cross a cut before an operation
    for place, node in enumerate(operations):
        last = max((index.get(x, len(operations)) for x in node.users), default=place)
        tensors = (x for x in tensors_in(node.meta.get("val")) if has_fixed_size(x))
        num_bytes = sum(x.numel() * x.element_size() for x in tensors)
        change[place + 1] += num_bytes
        if last < len(operations):
            change[last + 1] -= num_bytes
    crossing = [*accumulate(change)]
    for earliest, latest in places:
        between = operations[earliest:latest]
        if any(units.get(module_path(x)) == PART for x in between):
            possible = [x for x in range(earliest, latest + 1) if operations[x].target is not operator.getitem]
            yield min(possible, key=lambda place: (crossing[place], -place))
        else:
            yield latest


def joined_by_unit(
    operations: Iterable[Group], model: nn.Module, units: Mapping[str, str], own: Container[str]
) -> list[Group]:
    """Layers of single operations joined to those of `groups_by_module`, but for the modules at the paths `own`.

    What runs after its unit has ended joins the layer that is there.
    """
    found, ended, current = list[Group](), set[tuple[str, str]](), _NO_UNIT
    for group in operations:
        path = module_path(group.nodes[0])
        unit = units.get(path) or None
        owner = _NO_UNIT if unit is None else (unit, call_of(group.nodes[0], unit))
        if path in own:
            found.append(group)
            ended.add(current)
            current = _NO_UNIT
        elif not found or (owner != current and owner not in ended and unit is not None):
            ended.add(current)
            current = owner
            name = unit or type(model).__name__
            found.append(Group(name, type(model.get_submodule(unit or "")).__name__, group.nodes))
        else:
            found[-1] = replace(found[-1], nodes=(*found[-1].nodes, *group.nodes))
    names = distinct([x.name for x in found])
    return [replace(x, name=name) for x, name in zip(found, names, strict=True)]


def call_of(node: Node, path: str) -> str:
    """Which call of the module at this path an operation was traced in; equal for the operations of one call."""
    return next((key for key, (inner, _) in node.meta["nn_module_stack"].items() if inner == path), "")


def in_trace_order(graph: Graph, groups: Iterable[Iterable[Node]]) -> list[tuple[Node, ...]]:
    """The groups with their nodes in the order of the graph."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    return [tuple(sorted(group, key=order.__getitem__)) for group in groups]


def distinct(names: Sequence[str]) -> list[str]:
    """The names, repeated ones numbered: name, name#2, name#3."""
    seen: dict[str, int] = {}
    found = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        found.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return found


def inseparable_operations(graph: Graph, state: Iterable[Node], model: nn.Module) -> list[Collection[Node]]:
    """Sets of operations that must run in one layer; in-place operations are rewritten where they need not.

    These are the uses of a storage that is written, a value that cannot cross a cut (not a tensor, or one whose size
    depends on data) with its readers, and the first and last operation of each torch.vmap.
    """
    found: list[Collection[Node]] = [*rewrite_in_place(graph, state)]
    open_ones = list[Node]()
    for node in operations_of(graph, model):
        value = node.meta.get("val")
        if node.users and not (isinstance(value, Tensor) and has_fixed_size(value)):
            found.append({node, *node.users})
        if is_vmap_edge(node) and "increment" in operation_name(node):
            open_ones.append(node)
        elif is_vmap_edge(node):
            found.append({open_ones.pop(), node})
    return found


def is_vmap_edge(node: Node) -> bool:
    """Whether a torch.vmap, or another transform of torch.func, begins or ends here."""
    return operation_name(node).endswith("crement_nesting")


def merged(graph: Graph, groups: Sequence[Group], inseparable: Iterable[Collection[Node]]) -> list[Group]:
    """The groups, joined with all between them where a set of `inseparable` nodes spans several.

    An input or state among such nodes counts as in the first group, the output as in the last.
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
    names = ["..".join(dict.fromkeys((run[0].name, run[-1].name))) for run in runs]
    return [Group(name, run[0].kind, nodes) for name, run, nodes in zip(names, runs, nodes_of, strict=True)]


def split_regions(
    graph: Graph, owner: GraphModule, model: nn.Module, units: Mapping[str, str], state: Container[Node]
) -> None:
    """Replace every region of `graph`, whose inner graphs are attributes of `owner`, by one for each layer that it spans.

    `state` are the placeholders of weights, buffers and constants.
    """
    for region in [x for x in graph.nodes if x.target in _PLACE_OF_BODY]:
        name = str(region.args[_PLACE_OF_BODY[region.target]].target)
        body: GraphModule = getattr(owner, name)
        if not any(x.op == "call_function" for x in body.graph.nodes):
            continue
        given = [x for x in body.graph.nodes if x.op == "placeholder"]
        operands = zip(given, region.args[_PLACE_OF_BODY[region.target] + 1 :], strict=True)
        state_inside = {x for x, operand in operands if operand in state}
        split_regions(body.graph, body, model, units, state_inside)
        copies = repeat_state_readings(body.graph, state_inside)
        groups = groups_by_module(body.graph, model, units)
        if len(groups) > 1:
            groups = merged(body.graph, groups, inseparable_operations(body.graph, given, model))
        body.recompile()
        if len(groups) > 1:
            _replace(region, name, body, [without_repeats(x.nodes, copies) for x in groups], owner, units)


def _replace(
    region: Node,
    name: str,
    body: GraphModule,
    parts: Sequence[tuple[Node, ...]],
    owner: GraphModule,
    units: Container[str],
) -> None:
    """Replace a region by one for each part of its graph, called `name` in `owner`."""
    graph, place = region.graph, _PLACE_OF_BODY[region.target]
    given = [x for x in body.graph.nodes if x.op == "placeholder"]
    values = dict(zip(given, region.args[place + 1 :], strict=True))  # of the body in the graph around it
    returned: Any = next(iter(reversed(body.graph.nodes))).args[0]
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
    # the region is its only result itself, or a tuple of which entries are read
    readings = [(region, returned)] if isinstance(returned, Node) else [(x, returned[x.args[1]]) for x in region.users]
    for user, value in readings:
        user.replace_all_uses_with(values.get(value, value))
        graph.erase_node(user)
    if not isinstance(returned, Node):
        graph.erase_node(region)


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
