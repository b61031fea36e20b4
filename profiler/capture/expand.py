"""A traced graph with its repeated blocks in their places: every `gplan::repeat` becomes a copy of the first block.

In the copy the first block's arguments are replaced by those of the repetition, and its parameters, buffers and tensor
attributes by those at the same place in the repeated module. Where the first block did anything that a copy might not
do again (it reads what is neither its argument nor its own, writes into an argument, leaves a value behind for others,
or has sizes that depend on data), the recorder is told to have such blocks traced in full.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from profiler.capture.inplace import writers
from profiler.capture.repeated_blocks import FirstCall, Recorder, Repetition, UncertainRepeatError, Unit

_MARK, _REPEAT = torch.ops.gplan.mark.default, torch.ops.gplan.repeat.default


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor that a model holds: parameter, buffer, or a constant found while tracing."""

    name: str
    tensor: Tensor
    is_constant: bool


@dataclass(frozen=True, slots=True)
class Expanded:
    """A graph of its own, and what the placeholders in it that are no inputs stand for."""

    graph: Graph
    held: dict[Node, Held] = field(default_factory=dict)


def expanded(module: GraphModule, held: Mapping[Node, Held], recorder: Recorder) -> Expanded:
    """A copy of the graph of `module` with all repetitions written out; raises UncertainRepeatError where that is not certainly right.

    `held` says which of its placeholders stand for what the model holds.
    """
    copier = _Copier(module, held, recorder)
    for node in module.graph.nodes:
        copier.copy(node)
    if copier.num_marks != 2 * len(recorder.firsts) or copier.num_repeats != len(recorder.repetitions):
        raise UncertainRepeatError("a block was called inside a part of the graph that has a graph of its own")
    return copier.made


@dataclass(frozen=True, slots=True)
class _Pattern:
    """The operations of a first call, and what each value from outside is to it."""

    nodes: tuple[Node, ...]
    path: str
    inputs: tuple[Node, ...]  # the tensors among the arguments
    own: dict[Node, int]  # place among the unit's own tensors
    constants: tuple[Node, ...]  # made while tracing, the same for every call
    results: tuple[Node, ...]


class _Copier:
    """Copies a traced graph node by node."""

    def __init__(self, module: GraphModule, held: Mapping[Node, Held], recorder: Recorder) -> None:
        self.made = Expanded(Graph(owning_module=module))
        self.num_marks = self.num_repeats = 0
        self._module, self._held, self._recorder = module, held, recorder
        self._copies: dict[Node, Node] = {}
        self._nodes: dict[int, Node] = {}  # copied placeholders by the identity of their tensors
        self._results: dict[Node, list[Node]] = {}  # of every `repeat`
        self._marks: dict[int, list[Node]] = {}
        self._patterns: dict[int, _Pattern] = {}

    def copy(self, node: Node) -> None:
        """Add what a node stands for."""
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
            self._copies[node] = copy = self.made.graph.node_copy(node, self._copies.__getitem__)
            if node in self._held:
                self._nodes[id(self._held[node].tensor)] = copy  # of tensors that are tied the last is read
                self.made.held[copy] = self._held[node]

    def _repeated(self, repeat: Node) -> list[Node]:
        """The results of a copy of the block that a node repeats."""
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
            copies[node] = self.made.graph.node_copy(node, copies.__getitem__)
            _move_stack(copies[node], pattern.path, path)
        return [copies[node] for node in pattern.results]

    def _state(self, pattern: _Pattern, node: Node, repetition: Repetition, path: str) -> Node:
        """The placeholder of what a repetition holds where the first call holds what `node` stands for."""
        first = self._held[node]
        if node not in pattern.own:
            return self._placeholder(node, Held(_moved(first.name, pattern.path, path), first.tensor, True))
        name, tensor = repetition.unit.own[pattern.own[node]]
        if id(tensor) not in self._nodes:
            self._nodes[id(tensor)] = self._placeholder(node, Held(f"{path}.{name}", tensor, first.is_constant))
        return self._nodes[id(tensor)]

    def _placeholder(self, like: Node, held: Held) -> Node:
        with self.made.graph.inserting_after(self._copies[like]):
            node = self.made.graph.placeholder(like.name[:2] + held.name.replace(".", "_"))
        node.meta = dict(like.meta)
        self.made.held[node] = held
        return node

    def _pattern(self, first: FirstCall) -> _Pattern:
        """The nodes between two marks; raises UncertainRepeatError for what a copy might not do again."""
        if first.index in self._patterns:
            return self._patterns[first.index]
        start, end = self._marks[first.index]
        nodes, inputs, results = _between(start, end), _arguments(start), _arguments(end)
        outside = {x for node in nodes for x in _inputs(node)} - set(nodes)
        own, constants = _own_and_constant(outside - set(inputs), first.unit, self._held)
        is_certain = (
            own.keys() | {*constants, *inputs} >= outside
            and not any(_own_place(x, first.unit, self._held) is not None for x in inputs)
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
    """The nodes among a node's arguments; the exporter's passes leave `users` and `all_input_nodes` incomplete."""
    return [x for x in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(x, Node)]


def _between(start: Node, end: Node) -> list[Node]:
    found, node = [], start.next
    while node is not end:
        found.append(node)
        node = node.next
    return found


def _used_later(end: Node, nodes: set[Node]) -> bool:
    """Whether anything after a block reads what is not among its results."""
    node = end.next
    while node.op != "root":
        if not nodes.isdisjoint(_inputs(node)):
            return True
        node = node.next
    return False


def _arguments(node: Node) -> list[Node]:
    return list(node.args[0])  # type: ignore[arg-type]


def _own_and_constant(
    nodes: Iterable[Node], unit: Unit, held: Mapping[Node, Held]
) -> tuple[dict[Node, int], list[Node]]:
    """Of some placeholders those of the unit's own tensors, and those of constants that its code makes.

    A unit with tensor attributes has no other constants: which of both a constant is would not be certain.
    """
    own, constants = {}, []
    for node in nodes:
        place = _own_place(node, unit, held)
        if place is not None:
            own[node] = place
        elif node in held and held[node].is_constant and not unit.num_attributes:
            constants.append(node)
    return own, constants


def _own_place(node: Node, unit: Unit, held: Mapping[Node, Held]) -> int | None:
    if node not in held:
        return None
    return next((place for place, (_, x) in enumerate(unit.own) if x is held[node].tensor), None)


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
    """Let a copied node name the modules of the repetition."""
    stack: Mapping[str, Sequence[str]] = node.meta["nn_module_stack"]
    node.meta["nn_module_stack"] = {key: (_moved(path, old, new), kind) for key, (path, kind) in stack.items()}


def _moved(path: str, old: str, new: str) -> str:
    """A path inside one module as a path inside another."""
    return new + path.removeprefix(old) if path == old or path.startswith(f"{old}.") else path
