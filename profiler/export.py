"""Capture by torch.export: any model that traces, cut between the layers its author wrote.

The model is exported at the micro-batch shape (strict=False, training mode), its in-place operations are made safe, and
every operation is given to a layer. A boundary is the set of values made before it and read after it, so skips and
masks travel from stage to stage. Parameters stay the model's own objects.
"""

from __future__ import annotations

import io
import logging
import operator
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from gplan.errors import ModelError
from profiler.chain import Chain, Tensors, call_arguments
from profiler.inplace import rewrite_in_place
from profiler.layers import unit_paths


class ExportedChain(Chain):
    """Layers made of the operations of an exported program."""

    def __init__(self, model: nn.Module, inputs: object) -> None:
        program = _export(model, inputs)
        self._program = program
        self._graph = program.graph_module.graph
        self._state = _state_nodes(program)
        uncuttable = rewrite_in_place(self._graph, set(self._state))
        groups = _groups(self._graph, model, self._state)
        groups = _merge_uncuttable(groups, uncuttable)
        super().__init__(model, [group.name for group in groups], [_kind(model, group.owner) for group in groups])
        self._groups = groups
        self._tensors = self._state_tensors()
        self._boundaries = _boundaries(self._graph, groups, self._state)
        self._outputs = _output_leaves(self._graph)
        self._structure = program.call_spec.out_spec  # computed anew at each look: far dearer than a small loss

    def stage(self, first: int, end: int) -> nn.Module:
        """Layers [first, end) as a GraphModule that keeps the parameters' own names."""
        graph, copies = Graph(), dict[Node, Node]()
        for node in self._boundaries[first]:
            copies[node] = graph.placeholder(node.name)
        attributes: dict[str, Any] = {}

        def copy_of(node: Node) -> Node:
            if node not in copies:
                name = self._state.get(node) or str(node.target)
                attributes[name] = self._tensors[node] if node in self._state else self._attribute(name)
                copies[node] = graph.get_attr(name)
            return copies[node]

        for group in self._groups[first:end]:
            for node in group.nodes:
                copies[node] = graph.node_copy(node, copy_of)
        outputs = [copy_of(node) for node in self._boundaries[end]]
        graph.output(tuple(graph.call_method("contiguous", (x,)) for x in outputs))
        module = GraphModule(attributes, graph, class_name=f"Layers{first}to{end}")
        module.train()
        return module

    def model_output(self, tensors: Tensors) -> Any:
        """The outputs in the model's own structure, such as a transformers ModelOutput."""
        values = dict(zip(self._boundaries[-1], tensors, strict=True))
        leaves = [values.get(x, x) if isinstance(x, Node) else x for x in self._outputs]
        return pytree.tree_unflatten(leaves, self._structure)

    def _attribute(self, name: str) -> Any:
        found: Any = self._program.graph_module
        for part in name.split("."):
            found = getattr(found, part)
        return found

    def _state_tensors(self) -> dict[Node, Tensor]:
        """The model's own parameters and buffers, and the constants that export lifted, by placeholder."""
        own: dict[str, Tensor] = dict(self.model.named_parameters(remove_duplicate=False))
        own.update(self.model.named_buffers(remove_duplicate=False))
        return {node: own[name] if name in own else self._program.constants[name] for node, name in self._state.items()}


@dataclass(frozen=True, slots=True)
class _Group:
    name: str
    owner: str  # path of the author's module
    nodes: tuple[Node, ...]


def _export(model: nn.Module, inputs: object) -> torch.export.ExportedProgram:
    args, kwargs = call_arguments(inputs)
    try:
        with _without_torchs_own_words():
            return torch.export.export(model, args, kwargs, strict=False)
    except Exception as error:
        where = author_line(error)
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"{type(model).__name__} cannot be captured by torch.export: {where or 'in the model'}: {reason[:300]}. "
            "If that line decides by the values of a tensor (an `if`, a loop, .item()), rewrite it without "
            "(torch.where, torch.cond), or hand the model over as an nn.Sequential or a list of stages, which is cut "
            "between its children without tracing"
        ) from error


@contextmanager
def _without_torchs_own_words() -> Iterator[None]:
    """Export dumps graphs and warnings where it fails; the error that follows says it in one line."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def author_line(error: BaseException) -> str | None:
    """Where in the author's code an error arose: the innermost frame outside installed packages and gplan."""
    installed = {str(Path(path).resolve()) for path in (*sys.path, sys.prefix, sys.base_prefix) if "python" in path}
    ours = str(Path(__file__).parent.parent / "gplan"), str(Path(__file__).parent)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = str(Path(frame.filename).resolve())
        if frame.filename.startswith("<") or path.startswith((*installed, *ours)):
            continue
        return f"{frame.filename}, line {frame.lineno}: {frame.line}"
    return None


def _state_nodes(program: torch.export.ExportedProgram) -> dict[Node, str]:
    """Placeholders of parameters, buffers and lifted constants, with the name of each."""
    signature = program.graph_signature
    names = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    return {x: names[x.name] for x in program.graph_module.graph.nodes if x.op == "placeholder" and x.name in names}


def _groups(graph: Graph, model: nn.Module, state: Iterable[Node]) -> list[_Group]:
    """Consecutive operations of one unit form a layer; operations between units belong to the unit before them."""
    units = unit_paths(model)
    nodes: list[list[Node]] = []
    owners: list[str] = []
    home: dict[Node, int] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        if node.target is operator.getitem:  # stays with the operation whose tuple it opens
            index = home[node.args[0]]
        else:
            owner = units.get(_module_path(node))
            if not nodes or (owner is not None and owners[-1] not in (owner, "")):
                nodes.append([])
                owners.append(owner or "")
            elif owner is not None:
                owners[-1] = owner  # operations before the first unit belong to it
            index = len(nodes) - 1
        nodes[index].append(node)
        home[node] = index
    if not nodes:
        raise ModelError(f"{type(model).__name__} performs no operation on its inputs; there is nothing to cut")
    order = {node: i for i, node in enumerate(graph.nodes)}
    names = _distinct([owner or type(model).__name__ for owner in owners])
    return [
        _Group(name, owner, tuple(sorted(group, key=order.__getitem__)))
        for name, owner, group in zip(names, owners, nodes, strict=True)
    ]


def _module_path(node: Node) -> str:
    """The path of the innermost module that the operation was traced in."""
    stack = node.meta.get("nn_module_stack")
    return str(list(stack.values())[-1][0]) if stack else ""


def _distinct(names: Sequence[str]) -> list[str]:
    """A unit that is used several times gives layers name, name#2, name#3."""
    seen: dict[str, int] = {}
    distinct = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        distinct.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return distinct


def _merge_uncuttable(groups: list[_Group], spans: Iterable[tuple[Node, Node]]) -> list[_Group]:
    """Join the layers over which a storage is mutated that other layers read."""
    layer = {node: i for i, group in enumerate(groups) for node in group.nodes}
    joined = set[int]()  # cuts, by the layer before them, that must not be made
    for first, last in spans:
        joined.update(range(layer.get(first, 0), layer.get(last, len(groups) - 1)))
    merged: list[_Group] = []
    for i, group in enumerate(groups):
        if i - 1 in joined:
            before = merged.pop()
            group = _Group(f"{before.name}..{group.name}", before.owner, before.nodes + group.nodes)
        merged.append(group)
    return merged


def _boundaries(graph: Graph, groups: Sequence[_Group], state: Iterable[Node]) -> list[tuple[Node, ...]]:
    """For each of the L+1 boundaries the values alive there, in the order they are made."""
    num_layers, held = len(groups), set(state)
    made = {node: i + 1 for i, group in enumerate(groups) for node in group.nodes}
    read = {node: i for i, group in enumerate(groups) for node in group.nodes}
    alive: list[list[Node]] = [[] for _ in range(num_layers + 1)]
    for node in graph.nodes:
        if node in held or node.op in ("output", "get_attr"):
            continue
        readers = [read.get(user, num_layers) for user in node.users]
        first = made.get(node, 0)
        last = max([0 if node.op == "placeholder" else -1, *readers])
        for boundary in range(first, last + 1):
            alive[boundary].append(node)
    outputs = {x for x in _output_leaves(graph) if isinstance(x, Node)}
    if outputs & held:
        names = ", ".join(sorted(x.name for x in outputs & held))
        raise ModelError(f"the model returns its own parameters or buffers ({names}); expected computed tensors only")
    return [tuple(nodes) for nodes in alive]


def _output_leaves(graph: Graph) -> list[Any]:
    output = next(iter(reversed(graph.nodes)))
    return list(output.args[0])


def _kind(model: nn.Module, path: str) -> str:
    return type(model.get_submodule(path)).__name__
