"""In-place operations of a traced graph, made safe for cutting.

An in-place operation whose result is the only later use of its storage is rewritten out of place: `relu_(x)` becomes
`relu(x)`, and later uses of x read the result. Where other views of the storage are read later (`x[:, 0].add_(1)`), the
operation stays and no cut may fall between the storage's first and last use. Buffers are mutated in place as before.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import Graph, Node

_SAME_STORAGE = {"dropout", "alias", "contiguous", "reshape", "flatten", "to", "type_as", "expand_as"}


def rewrite_in_place(graph: Graph, state: set[Node]) -> tuple[tuple[Node, Node], ...]:
    """Rewrite what can be; returns (first node, last node) for each storage that must not be cut.

    `state` holds the placeholders of parameters, buffers and constants, which may be mutated.
    """
    storages = _Storages(graph)
    spans = []
    for node in list(graph.nodes):
        if not _is_in_place(node) or node.args[0] in state:
            continue
        target = node.args[0]
        assert isinstance(target, Node)
        order = {x: i for i, x in enumerate(graph.nodes)}
        plain = _out_of_place(node.target)
        others = [x for x in storages.members(target) if x is not target and order[x] < order[node]]
        read_later = any(order[user] > order[node] for other in others for user in other.users)
        if plain is not None and not read_later:
            node.target = plain
            storages.renew(node)
            for user in list(target.users):
                if order[user] > order[node]:
                    user.replace_input_with(target, node)
        else:
            members = storages.members(target)
            touched = [*members, *(user for member in members for user in member.users)]
            spans.append((min(touched, key=order.__getitem__), max(touched, key=order.__getitem__)))
    return tuple(spans)


class _Storages:
    """Which nodes may share a storage, from the operators' own schemas."""

    def __init__(self, graph: Graph) -> None:
        self._group: dict[Node, set[Node]] = {}
        for node in graph.nodes:
            self._group[node] = {node}
            for source in _aliased_arguments(node):
                joined = self._group[source] | self._group[node]
                for member in joined:
                    self._group[member] = joined

    def members(self, node: Node) -> set[Node]:
        return self._group[node]

    def renew(self, node: Node) -> None:
        """After a rewrite the node, and what is derived from it, has a storage of its own."""
        derived = {node}
        for user in _downstream(node):
            if any(source in derived for source in _aliased_arguments(user)):
                derived.add(user)
        for member in self._group[node]:
            self._group[member] = self._group[member] - derived
        for member in derived:
            self._group[member] = derived


def _downstream(node: Node) -> Iterable[Node]:
    current = node.next
    while current.op != "root":
        yield current
        current = current.next


def _aliased_arguments(node: Node) -> list[Node]:
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None:
        return [x for x in node.all_input_nodes if node.op == "call_function"]
    if schema.name.split("::")[-1] in _SAME_STORAGE:
        return node.all_input_nodes[:1]
    returned = {mark for x in schema.returns if x.alias_info for mark in x.alias_info.before_set}
    pairs = zip(node.args, schema.arguments, strict=False)
    return [
        arg
        for arg, described in pairs
        if isinstance(arg, Node) and described.alias_info and described.alias_info.before_set & returned
    ]


def _is_in_place(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not schema.arguments or not node.args:
        return False
    first = schema.arguments[0].alias_info
    return isinstance(node.args[0], Node) and first is not None and first.is_write


def _out_of_place(target: object) -> object | None:
    """The operator that returns what the in-place one would have written, or None."""
    if not isinstance(target, torch._ops.OpOverload):
        return None
    namespace, name = target._schema.name.split("::")
    if not name.endswith("_") or namespace != "aten":
        return None
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    return getattr(packet, target._overloadname, None) if packet is not None else None
