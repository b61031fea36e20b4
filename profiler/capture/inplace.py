"""Make the in-place operations of a traced graph safe for cutting.

An in-place operation whose result is the only later use of its storage is rewritten out of place: `relu_(x)` becomes
`relu(x)`, and later uses of x read the result. Where other views of the storage are read later (`x[:, 0].add_(1)`), the
operation stays, and no cut may lie between the storage's first and last use. Buffers are still written in place. One
pass over the graph, linear in its operations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from profiler.capture.opaque_calls import CustomFunction

_SAME_STORAGE = {"dropout", "alias", "contiguous", "reshape", "flatten", "to", "type_as", "expand_as"}


def rewrite_in_place(graph: Graph, state: Iterable[Node]) -> tuple[frozenset[Node], ...]:
    """Rewrite in-place operations; returns the nodes of each storage that must not be cut.

    `state` are the placeholders of parameters, buffers and constants, which may be written.
    """
    kept, storages = set(state), _Storages()
    order = {node: place for place, node in enumerate(graph.nodes)}
    written: list[Node] = []  # storages that must stay in one piece, by a member
    for node in graph.nodes:
        if isinstance(node.target, CustomFunction):
            written += _settled(node, node.target, storages, kept, order)
            continue
        target = _written_in_place(node)
        if target is None or target in kept:
            storages.add(node, aliased_arguments(node))
            continue
        plain, members = _out_of_place(node.target), storages.members(target)
        if plain is None or not kept.isdisjoint(members) or _is_read_after(node, members, target, order):
            storages.add(node, aliased_arguments(node))
            if kept.isdisjoint(members):
                written.append(target)
            continue
        node.target = plain
        storages.add(node, ())
        for user in [user for user in target.users if order[user] > order[node]]:
            user.replace_input_with(target, node)
    spans = {id(members): members for members in map(storages.members, written)}
    return tuple(_touching(members) for members in spans.values())


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
    pairs = zip(node.args, schema.arguments, strict=False)
    return [
        arg
        for arg, described in pairs
        if isinstance(arg, Node) and described.alias_info and _is_returned(described.alias_info, returned)
    ]


def _is_returned(alias: Any, returned: set[str]) -> bool:
    """Whether a result aliases the argument; lists of views (chunk, split, unbind) are marked `a -> *`."""
    return bool(alias.before_set & returned) or "*" in alias.after_set


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
        yield from _written_inside(node)
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

    users: set[Node] = field(default_factory=set)
    writers: set[Node] = field(default_factory=set)


def written_state(nodes: Iterable[Node], state: Iterable[Node]) -> tuple[Touched, ...]:
    """The users and writers of every state tensor that one of the nodes writes into, by the operators' schemas."""
    origin = {node: node for node in state}
    found = {node: Touched() for node in origin}
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
    leaves = pytree.tree_leaves(node.args)
    bodies = [(place, body) for place, x in enumerate(leaves) if (body := _body(x)) is not None]
    operands = leaves[bodies[-1][0] + 1 :] if bodies else []
    for _, body in bodies:
        parameters = [x for x in body.nodes if x.op == "placeholder"]
        yield body, dict(zip(parameters, operands, strict=False))


def _written_inside(node: Node) -> Iterator[Node]:
    """The operands that an operation's inner graphs write into."""
    for body, operands in inner_graphs(node):
        written = {x for _, x in writers(body.nodes, operands)}
        for parameter, operand in operands.items():
            if parameter in written and isinstance(operand, Node):
                yield operand


def _body(value: object) -> Graph | None:
    if not isinstance(value, Node) or value.op != "get_attr" or value.graph.owning_module is None:
        return None
    inner = getattr(value.graph.owning_module, str(value.target), None)
    return inner.graph if isinstance(inner, GraphModule) else None


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


def _is_read_after(node: Node, members: Iterable[Node], target: Node, order: dict[Node, int]) -> bool:
    """Whether the storage is read later by another name than `target`."""
    others = (member for member in members if member is not target)
    return any(order[user] > order[node] for other in others for user in other.users)


def _touching(members: Iterable[Node]) -> frozenset[Node]:
    """The operations that make or read a storage."""
    return frozenset(x for member in members for x in (member, *member.users))


def _written_in_place(node: Node) -> Node | None:
    """The value that an in-place operation such as `add_` writes into."""
    target = node.args[0] if node.args else None
    return target if isinstance(target, Node) and target in set(written_arguments(node)) else None


def _out_of_place(target: object) -> object | None:
    """The operator that returns what the in-place one would have written, or None."""
    if not isinstance(target, torch._ops.OpOverload):
        return None
    namespace, name = target._schema.name.split("::")
    if not name.endswith("_") or namespace != "aten":
        return None
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    return getattr(packet, target._overloadname, None) if packet is not None else None
