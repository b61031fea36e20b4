"""Operations that read weights or buffers and nothing else: every layer that needs the result runs them itself.

Such as a cast or a view of a tied weight, or a scaled one. Their result is as large as the weight and can be computed
wherever the weight is, so it never crosses a cut: the stages share the weight, and its gradients are summed. Operations
that do more than view, copy or compute element by element stay where they are, as do those on a state that is written.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Sequence

import torch
from torch.fx import Graph, Node

from gplan_profiler.capture.inplace import aliased_arguments, writers, written_arguments
from gplan_profiler.capture.opaque_calls import CustomFunction
from gplan_profiler.capture.trace import operation_name
from gplan_profiler.memory.allocations import tensors_in
from gplan_profiler.torch_compat import HigherOrderOperator, OpOverload

_COPIES = {"cat", "clone", "contiguous", "pad", "repeat", "stack", "to", "to_copy", "type_as"}
_DROPPING = {"p", "dropout_p", "dropout", "train", "training"}  # arguments that switch dropout off if they are 0
_PLACE_OF_MODULE = "nn_module_stack"  # in the notes of an operation: the modules that it was traced in


def is_view(node: Node) -> bool:
    """Whether an operation is a view of its one operand, by its schema; a copy to another layout counts as one."""
    if node.target is operator.getitem:
        return True
    if len(node.all_input_nodes) != 1 or not isinstance(node.target, OpOverload):
        return False
    source = node.all_input_nodes[0]
    is_alias = aliased_arguments(node) == [source] and not any(True for _ in written_arguments(node))
    before, after = ({x.dtype for x in tensors_in(y.meta.get("val"))} for y in (source, node))
    return is_alias and before == after and operation_name(node) != "dropout"


def may_draw(node: Node) -> bool:
    """Whether the result of an operation may be random: by torch's tags, always for operations outside torch.

    Operations with dropout are not random if its probability is 0 or training is off, by the arguments in the graph or
    their defaults; computed arguments may be anything.
    """
    if not isinstance(node.target, OpOverload):
        return isinstance(node.target, HigherOrderOperator | CustomFunction)
    if node.target.namespace != "aten" or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return node.target.namespace != "aten"
    described = node.target._schema.arguments
    given = {x.name: value for x, value in zip(described, node.args, strict=False)} | node.kwargs
    return not any(given.get(x.name, x.default_value) == 0 for x in described if x.name in _DROPPING)


def is_cheap(node: Node) -> bool:
    """Whether running an operation again costs less than sending its result: a view, a copy, or one by elements."""
    if node.target is operator.getitem:  # of a chunk or split
        return True
    if not isinstance(node.target, OpOverload) or any(True for _ in written_arguments(node)) or may_draw(node):
        return False
    name = operation_name(node)
    return is_view(node) or name in _COPIES or name == "dropout" or torch.Tag.pointwise in node.target.tags


def repeat_state_readings(graph: Graph, state: Iterable[Node]) -> frozenset[Node]:
    """Give every reader of a cheap operation on `state` alone a copy of it, in the reader's module; returns the copies.

    `state` are the placeholders of weights, buffers and constants.
    """
    known = set(state)
    found = set(known)
    for node in graph.nodes:
        if _reads_only(node, found) and is_cheap(node):
            found.add(node)
    written = {x for _, x in writers(graph.nodes, found)}
    unwritten, safe = found - written, known - written
    for node in graph.nodes:
        if node in unwritten and _reads_only(node, safe):
            safe.add(node)
    copies, repeated = set[Node](), safe - known
    for node in reversed([x for x in graph.nodes if x in repeated]):
        for reader in list(node.users):
            with graph.inserting_before(reader):
                copy = graph.node_copy(node)
            copy.meta[_PLACE_OF_MODULE] = reader.meta.get(_PLACE_OF_MODULE)
            reader.replace_input_with(node, copy)
            copies.add(copy)
        copies.discard(node)
        graph.erase_node(node)
    return frozenset(copies)


def _reads_only(node: Node, known: set[Node]) -> bool:
    return node.op == "call_function" and bool(node.all_input_nodes) and known.issuperset(node.all_input_nodes)


def without_repeats(nodes: Sequence[Node], copies: Container[Node]) -> tuple[Node, ...]:
    """The operations of one layer, in their order, with equal ones among `copies` run once."""
    first, kept = dict[object, Node](), list[Node]()
    for node in nodes:
        same = first.setdefault((node.target, repr((node.args, node.kwargs))), node) if node in copies else node
        if same is node:
            kept.append(node)
        else:
            node.replace_all_uses_with(same)
            node.graph.erase_node(node)
    return tuple(kept)
