"""Expand repeated blocks in a traced graph: every `gplan::repeat` becomes a copy of the first block.

In the copy, arguments, parameters, buffers and tensor attributes are replaced by those of the repeated module. A block
is refused at the recorder, and traced in full, if a copy may differ: it reads a value that is neither its argument nor
its own, writes into an argument, makes a value that others read, or has sizes that depend on data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from profiler.capture.inplace import writers
from profiler.capture.repeated_blocks import FirstCall, RepeatRecorder, Repetition, UncertainRepeatError, Unit

_MARK, _REPEAT = torch.ops.gplan.mark.default, torch.ops.gplan.repeat.default


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A tensor of a model's state: a parameter, a buffer, or a constant found by the trace."""

    name: str
    tensor: Tensor
    is_constant: bool


def expanded(
    module: GraphModule, state: Mapping[Node, StateTensor], recorder: RepeatRecorder
) -> tuple[Graph, dict[Node, StateTensor]]:
    """A copy of the graph of `module` with all repetitions expanded, and its state; `state` is that of `module`.

    State are the tensors of placeholders that are no inputs. Raises UncertainRepeatError if a copy may differ.
    """
    copier = _Copier(module, state, recorder)
    for node in module.graph.nodes:
        copier.copy(node)
    if copier.num_marks != 2 * len(recorder.firsts) or copier.num_repeats != len(recorder.repetitions):
        raise UncertainRepeatError("a block was called inside a part of the graph that has a graph of its own")
    return copier.graph, copier.state


@dataclass(frozen=True, slots=True)
class _Pattern:
    """The operations of a first call, and the role of each value from outside."""

    nodes: tuple[Node, ...]
    path: str
    inputs: tuple[Node, ...]  # the tensors among the arguments
    own: dict[Node, int]  # index among the unit's own tensors
    constants: tuple[Node, ...]  # made by the trace, equal in every call
    results: tuple[Node, ...]


class _Copier:
    """Copies a traced graph node by node."""

    def __init__(self, module: GraphModule, state: Mapping[Node, StateTensor], recorder: RepeatRecorder) -> None:
        self.graph, self.state = Graph(owning_module=module), dict[Node, StateTensor]()
        self.num_marks = self.num_repeats = 0
        self._module, self._state_tensors, self._recorder = module, state, recorder
        self._copies: dict[Node, Node] = {}
        self._nodes: dict[int, Node] = {}  # copied placeholders by the identity of their tensors
        self._results: dict[Node, list[Node]] = {}  # of every `repeat`
        self._marks: dict[int, list[Node]] = {}
        self._patterns: dict[int, _Pattern] = {}

    def copy(self, node: Node) -> None:
        """Add a node, or the block that it repeats."""
        source = node.args[0] if node.args else None
        if node.target is _MARK:
            self.num_marks += 1
            self._marks.setdefault(int(node.args[1]), []).append(node)  # type: ignore[arg-type]
        elif node.target is _REPEAT:
            self.num_repeats += 1
            self._results[node] = self._repeated(node)
        elif isinstance(source, Node) and source in self._results:
            self._copies[node] = self._results[source][int(node.args[1])]  # type: ignore[arg-type]
        else:
            self._copies[node] = copy = self.graph.node_copy(node, self._copies.__getitem__)
            if node in self._state_tensors:
                self._nodes[id(self._state_tensors[node].tensor)] = copy  # of tensors that are tied the last is read
                self.state[copy] = self._state_tensors[node]

    def _repeated(self, repeat: Node) -> list[Node]:
        """Add a copy of the block that a node repeats; returns its results."""
        repetition = self._recorder.repetitions[int(repeat.args[2])]  # type: ignore[arg-type]
        pattern = self._pattern(repetition.first)
        path, arguments = _innermost(repeat), [self._copies[x] for x in _arguments(repeat)]
        copies = dict(zip(pattern.inputs, arguments, strict=True))
        if any(copies[node] is not x for node, x in zip(pattern.inputs, arguments, strict=True)):
            raise UncertainRepeatError(
                "one value is several arguments of a block, and several values are those of its repetition"
            )
        for node in (*pattern.own, *pattern.constants):
            copies[node] = self._state(pattern, node, repetition, path)
        for node in pattern.nodes:
            copies[node] = self.graph.node_copy(node, copies.__getitem__)
            _move_stack(copies[node], pattern.path, path)
        return [copies[node] for node in pattern.results]

    def _state(self, pattern: _Pattern, node: Node, repetition: Repetition, path: str) -> Node:
        """The placeholder of the repetition's state tensor at the place of the first call's `node`."""
        first = self._state_tensors[node]
        if node not in pattern.own:
            return self._placeholder(node, StateTensor(_moved(first.name, pattern.path, path), first.tensor, True))
        name, tensor = repetition.unit.own[pattern.own[node]]
        if id(tensor) not in self._nodes:
            self._nodes[id(tensor)] = self._placeholder(node, StateTensor(f"{path}.{name}", tensor, first.is_constant))
        return self._nodes[id(tensor)]

    def _placeholder(self, like: Node, state: StateTensor) -> Node:
        with self.graph.inserting_after(self._copies[like]):
            node = self.graph.placeholder(like.name[:2] + state.name.replace(".", "_"))
        node.meta = dict(like.meta)
        self.state[node] = state
        return node

    def _pattern(self, first: FirstCall) -> _Pattern:
        """The nodes between two marks; raises UncertainRepeatError for a block that may not be copied."""
        if first.index in self._patterns:
            return self._patterns[first.index]
        start, end = self._marks[first.index]
        nodes, inputs, results = _between(start, end), _arguments(start), _arguments(end)
        outside = {x for node in nodes for x in _inputs(node)} - set(nodes)
        own, constants = _own_and_constant(outside - set(inputs), first.unit, self._state_tensors)
        is_certain = (
            own.keys() | {*constants, *inputs} >= outside
            and not any(_own_place(x, first.unit, self._state_tensors) is not None for x in inputs)
            and set(results) <= set(nodes)
            and not _used_later(end, set(nodes) - set(results))
            and all(_can_be_copied(self._module, node) for node in nodes)
            and not any(True for _ in writers(nodes, [*inputs, *constants]))
        )
        if not is_certain:
            raise self._recorder.refuse(first.unit.group)
        found = _Pattern(tuple(nodes), _innermost(start), tuple(inputs), own, tuple(constants), tuple(results))
        self._patterns[first.index] = found
        return found


def _inputs(node: Node) -> list[Node]:
    """The nodes among a node's arguments; after export, `users` and `all_input_nodes` can be incomplete."""
    return [x for x in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(x, Node)]


def _between(start: Node, end: Node) -> list[Node]:
    found, node = [], start.next
    while node is not end:
        found.append(node)
        node = node.next
    return found


def _used_later(end: Node, nodes: set[Node]) -> bool:
    """Whether any of the nodes is read after a block's end."""
    node = end.next
    while node.op != "root":
        if not nodes.isdisjoint(_inputs(node)):
            return True
        node = node.next
    return False


def _arguments(node: Node) -> list[Node]:
    return list(node.args[0])  # type: ignore[arg-type]


def _own_and_constant(
    nodes: Iterable[Node], unit: Unit, state: Mapping[Node, StateTensor]
) -> tuple[dict[Node, int], list[Node]]:
    """The placeholders of the unit's own tensors, and of constants made by its code.

    Constants of a unit with tensor attributes are left out, because the two cannot be told apart.
    """
    own, constants = {}, []
    for node in nodes:
        place = _own_place(node, unit, state)
        if place is not None:
            own[node] = place
        elif node in state and state[node].is_constant and not unit.num_attributes:
            constants.append(node)
    return own, constants


def _own_place(node: Node, unit: Unit, state: Mapping[Node, StateTensor]) -> int | None:
    if node not in state:
        return None
    return next((place for place, (_, x) in enumerate(unit.own) if x is state[node].tensor), None)


def _can_be_copied(module: GraphModule, node: Node) -> bool:
    if node.op == "get_attr":
        inner = getattr(module, str(node.target), None)
        return isinstance(inner, GraphModule) and all(x.op != "get_attr" for x in inner.graph.nodes)
    values = pytree.tree_leaves(node.meta.get("val"))
    sizes = [size for x in values for size in (x.shape if isinstance(x, Tensor) else (x,))]
    return node.op == "call_function" and all(type(size) in (int, type(None)) for size in sizes)


def _innermost(node: Node) -> str:
    """The path of the module that a node was traced in."""
    return str(list(node.meta["nn_module_stack"].values())[-1][0])


def _move_stack(node: Node, old: str, new: str) -> None:
    """Replace the module paths of a copied node by those of the repetition."""
    stack: Mapping[str, Sequence[str]] = node.meta["nn_module_stack"]
    node.meta["nn_module_stack"] = {key: (_moved(path, old, new), kind) for key, (path, kind) in stack.items()}


def _moved(path: str, old: str, new: str) -> str:
    """A path inside module `old` as a path inside module `new`."""
    return new + path.removeprefix(old) if path == old or path.startswith(f"{old}.") else path
