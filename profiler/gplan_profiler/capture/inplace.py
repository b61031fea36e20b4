"""Make the in-place operations of a traced graph safe for cutting.

An in-place operation whose result is the only later use of its storage is rewritten out of place: `relu_(x)` becomes
`relu(x)`, and later uses of x read the result. Where other views of the storage are read later (`x[:, 0].add_(1)`), the
operation stays, and no cut may lie between the storage's first use and its last write; of an input of the model, its
last use, as a later stage may get the input from the batch. Buffers are still written in place. One pass over the
graph, linear in its operations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, GraphModule, Node

from gplan_profiler.capture.opaque_calls import CustomFunction
from gplan_profiler.torch_compat import OpOverload, pytree

_SAME_STORAGE = {"dropout", "alias", "contiguous", "reshape", "flatten", "to", "type_as", "expand_as"}


def rewrite_in_place(graph: Graph, state: Iterable[Node]) -> tuple[frozenset[Node], ...]:
    """Rewrite in-place operations; returns the nodes of each storage between which no cut may lie.

    `state` are the placeholders of parameters, buffers and constants, which may be written.
    """
    kept, storages = set(state), _Storages()
    order = {node: place for place, node in enumerate(graph.nodes)}
    written: list[tuple[Node, Node]] = []  # a member of a storage, and an operation that still writes into it
    for node in graph.nodes:
        if isinstance(node.target, CustomFunction):
            written += [(x, node) for x in _settled(node, node.target, storages, kept, order)]
            continue
        target = node.args[0] if node.args else None  # that an operation such as `add_` writes into
        if not isinstance(target, Node) or target in kept or target not in set(written_arguments(node)):
            storages.add(node, aliased_arguments(node))
            continue
        plain, members = _out_of_place(node.target), storages.members(target)
        others = (x for x in members if x is not target)  # the storage by other names
        is_read_after = any(order[user] > order[node] for x in others for user in x.users)
        if plain is None or not kept.isdisjoint(members) or is_read_after:
            storages.add(node, aliased_arguments(node))
            if kept.isdisjoint(members):
                written.append((target, node))
            continue
        node.target = plain
        storages.add(node, ())
        for user in [user for user in target.users if order[user] > order[node]]:
            user.replace_input_with(target, node)
    spans: dict[int, tuple[set[Node], int]] = {}
    for target, node in written:  # in the order of the graph
        members = storages.members(target)
        last = len(order) if any(x.op == "placeholder" for x in members) else order[node]
        spans[id(members)] = members, last
    return tuple(
        frozenset(x for y in members for x in (y, *y.users) if order[x] <= last) for members, last in spans.values()
    )


def _settled(
    node: Node, function: CustomFunction, storages: _Storages, kept: set[Node], order: dict[Node, int]
) -> list[Node]:
    """The values that a custom function still writes into; it works on copies if nothing reads them later."""
    targets = list(written_arguments(node))
    members = {x for target in targets for x in storages.members(target)}
    is_read = any(order[user] > order[node] for x in members for user in x.users)
    if targets and not is_read and kept.isdisjoint(members):
        node.target, targets = function.on_copies(), []
    storages.add(node, aliased_arguments(node))
    return [x for x in targets if kept.isdisjoint(storages.members(x))]


def aliased_arguments(node: Node) -> list[Node]:
    """The arguments whose storage the result of an operation may share, by the operator's own schema."""
    if isinstance(node.target, CustomFunction):
        return _arguments_at(node, node.target.shares)
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None:
        return [x for x in node.all_input_nodes if x.op == "call_function"]
    if schema.name.split("::")[-1] in _SAME_STORAGE:
        return node.all_input_nodes[:1]
    returned = {mark for x in schema.returns if x.alias_info for mark in x.alias_info.before_set}
    pairs = ((arg, x.alias_info) for arg, x in zip(node.args, schema.arguments, strict=False) if x.alias_info)
    # lists of views (chunk, split, unbind) are marked `a -> *`
    return [x for x, alias in pairs if isinstance(x, Node) and (alias.before_set & returned or "*" in alias.after_set)]


def _arguments_at(node: Node, places: Iterable[int]) -> list[Node]:
    return [x for place in places if isinstance(x := node.args[place], Node)]


def written_arguments(node: Node) -> Iterator[Node]:
    """The arguments that an operation writes into, by the operator's own schema."""
    if node.op != "call_function":
        return
    if isinstance(node.target, CustomFunction):
        yield from _arguments_at(node, node.target.writes)
        return
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        for body, operands in inner_graphs(node):
            written = {x for _, x in writers(body.nodes, operands)}
            yield from (x for y, x in operands.items() if y in written and isinstance(x, Node))
        return
    for place, described in enumerate(schema.arguments):
        arg = node.args[place] if place < len(node.args) else node.kwargs.get(described.name)
        if described.alias_info is not None and described.alias_info.is_write:
            yield from (x for x in (arg if isinstance(arg, list | tuple) else [arg]) if isinstance(x, Node))


def writers(nodes: Iterable[Node], kept: Iterable[Node]) -> Iterator[tuple[Node, Node]]:
    """The operations that write into one of some values, or into a view of it: (operation, value)."""
    origin = {node: node for node in kept}
    for node in nodes:
        yield from ((node, origin[x]) for x in written_arguments(node) if x in origin)
        sources = aliased_arguments(node) if hasattr(node.target, "_schema") else node.all_input_nodes
        viewed = [origin[x] for x in sources if x in origin]
        if viewed:
            origin[node] = viewed[0]


@dataclass(frozen=True, slots=True)
class Touched:
    """The operations that use a state tensor or a view of it, and those of them that write into it."""

    value: Node
    users: set[Node] = field(default_factory=set)
    writers: set[Node] = field(default_factory=set)


def written_state(nodes: Iterable[Node], state: Iterable[Node]) -> tuple[Touched, ...]:
    """The users and writers of every state tensor that one of the nodes writes into, by the operators' schemas."""
    origin = {node: node for node in state}
    found = {node: Touched(node) for node in origin}
    for node in nodes:
        sources = [x for x in node.all_input_nodes if x in origin]
        for x in sources:
            found[origin[x]].users.add(node)
        for x in written_arguments(node):
            if x in origin:
                found[origin[x]].writers.add(node)
        viewed = [x for x in aliased_arguments(node) if x in origin]
        if viewed:
            origin[node] = origin[viewed[0]]
    return tuple(x for x in found.values() if x.writers)


def inner_graphs(node: Node) -> Iterator[tuple[Graph, dict[Node, object]]]:
    """The inner graphs of an operation such as a no_grad block, each with the operands of its placeholders."""
    leaves, owner = pytree.tree_leaves(node.args), node.graph.owning_module
    bodies = list[tuple[int, Graph]]()
    for place, x in enumerate(leaves):
        if isinstance(x, Node) and x.op == "get_attr":
            inner = getattr(owner, str(x.target), None)
            bodies += [(place, inner.graph)] if isinstance(inner, GraphModule) else []
    operands = leaves[bodies[-1][0] + 1 :] if bodies else []
    for _, body in bodies:
        parameters = [x for x in body.nodes if x.op == "placeholder"]
        yield body, dict(zip(parameters, operands, strict=False))


class _Storages:
    """Union-find of the nodes that may share a storage; the smaller set is merged into the larger."""

    def __init__(self) -> None:
        self._group: dict[Node, set[Node]] = {}

    def add(self, node: Node, sources: Iterable[Node]) -> None:
        """Add a node that may share its storage with `sources`."""
        joined = {node}
        for source in sources:
            smaller, joined = sorted((joined, self._group[source]), key=len)
            if smaller is not joined:
                joined |= smaller
                self._group.update(dict.fromkeys(smaller, joined))
        self._group[node] = joined

    def members(self, node: Node) -> set[Node]:
        return self._group[node]


def _out_of_place(target: object) -> object | None:
    """The operator that returns what the in-place one would have written, or None."""
    if not isinstance(target, OpOverload):
        return None
    namespace, name = target._schema.name.split("::")
    if not name.endswith("_") or namespace != "aten":
        return None
    return getattr(getattr(torch.ops.aten, name.removesuffix("_"), None), target._overloadname, None)
