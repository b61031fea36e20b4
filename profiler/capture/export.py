"""Capture by torch.export: any model that traces, cut between the layers its author wrote.

The model is exported at the micro-batch shape (strict=False, training mode), its in-place operations are made safe, and
every operation is given to a layer. A boundary is the set of values made before it and read after it, so skips and
masks travel from stage to stage. Parameters stay the model's own objects.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from gplan.errors import ModelError
from profiler.capture.chain import Chain, Tensors, TensorSpec
from profiler.capture.inplace import rewrite_in_place
from profiler.capture.layers import unit_paths
from profiler.capture.structure import gradient_flags, layer_form, value_specs
from profiler.capture.trace import Trace, module_path, trace


class ExportedChain(Chain):
    """Layers made of the operations of an exported program."""

    def __init__(self, model: nn.Module, inputs: object) -> None:
        traced = trace(model, inputs)
        uncuttable = rewrite_in_place(traced.graph, traced.held)
        groups = _merge_uncuttable(_groups(traced.graph, model), uncuttable)
        super().__init__(model, [group.name for group in groups], [_kind(model, group.owner) for group in groups])
        self.num_repetitions = traced.num_repetitions
        self._trace = traced
        self._groups = groups
        self._boundaries = _boundaries(traced, groups)
        self._outputs = traced.outputs

    def stage(self, first: int, end: int) -> nn.Module:
        """Layers [first, end) as a GraphModule that keeps the parameters' own names."""
        graph, copies, held = Graph(), dict[Node, Node](), self._trace.held
        for node in self._boundaries[first]:
            copies[node] = graph.placeholder(node.name)
        attributes: dict[str, Any] = {}

        def copy_of(node: Node) -> Node:
            if node not in copies:
                name = held[node].name if node in held else str(node.target)
                attributes[name] = held[node].tensor if node in held else self._trace.attribute(name)
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

    def specs(self, boundary: int) -> tuple[TensorSpec, ...]:
        """What the tensors of a boundary are like, by the trace."""
        return value_specs(self._boundaries[boundary], self._flags[boundary])

    def structure(self, layer: int) -> Hashable:
        """Equal for layers that run the same operations, wired alike, on values and weights of the same specs."""
        return self._forms[layer], self._flags[layer], self._flags[layer + 1]

    def state(self, layer: int) -> dict[str, Tensor]:
        """The parameters and buffers that a layer uses, by their names in the model."""
        held = self._trace.held
        used = dict.fromkeys(x for node in self._groups[layer].nodes for x in node.all_input_nodes)
        return {held[x].name: held[x].tensor for x in used if x in held and not held[x].is_constant}

    def model_output(self, tensors: Tensors) -> Any:
        """The outputs in the model's own structure, such as a transformers ModelOutput."""
        values = dict(zip(self._boundaries[-1], tensors, strict=True))
        leaves = [values.get(x, x) if isinstance(x, Node) else x for x in self._outputs]
        return pytree.tree_unflatten(leaves, self._trace.structure)

    @cached_property
    def _forms(self) -> tuple[Hashable, ...]:
        """The form of every layer; equal forms are one object, so that comparing them takes no time."""
        known: dict[Hashable, Hashable] = {}
        forms = []
        for layer, group in enumerate(self._groups):
            before, after = self._boundaries[layer], self._boundaries[layer + 1]
            form = layer_form(group.nodes, before, after, self._trace.held, self._trace.attribute)
            forms.append(known.setdefault(form, form))
        return tuple(forms)

    @cached_property
    def _flags(self) -> tuple[tuple[bool, ...], ...]:
        """For every boundary which of its tensors need a gradient."""
        known: dict[tuple[int, tuple[bool, ...]], tuple[bool, ...]] = {}
        flags = [tuple(bool(node.meta["val"].requires_grad) for node in self._boundaries[0])]
        for layer, group in enumerate(self._groups):
            key = id(self._forms[layer]), flags[-1]
            if key not in known:
                before, after = self._boundaries[layer], self._boundaries[layer + 1]
                held, attribute = self._trace.held, self._trace.attribute
                known[key] = gradient_flags(group.nodes, before, flags[-1], after, held, attribute)
            flags.append(known[key])
        return tuple(flags)


@dataclass(frozen=True, slots=True)
class _Group:
    name: str
    owner: str  # path of the author's module
    nodes: tuple[Node, ...]


def _groups(graph: Graph, model: nn.Module) -> list[_Group]:
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
            owner = units.get(module_path(node))
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


def _boundaries(traced: Trace, groups: Sequence[_Group]) -> list[tuple[Node, ...]]:
    """For each of the L+1 boundaries the values alive there, in the order they are made."""
    num_layers = len(groups)
    made = {node: i + 1 for i, group in enumerate(groups) for node in group.nodes}
    read = {node: i for i, group in enumerate(groups) for node in group.nodes}
    alive: list[list[Node]] = [[] for _ in range(num_layers + 1)]
    for node in traced.graph.nodes:
        if node in traced.held or node.op in ("output", "get_attr"):
            continue
        readers = [read.get(user, num_layers) for user in node.users]
        first = made.get(node, 0)
        last = max([0 if node.op == "placeholder" else -1, *readers])
        for boundary in range(first, last + 1):
            alive[boundary].append(node)
    return [tuple(nodes) for nodes in alive]


def _kind(model: nn.Module, path: str) -> str:
    return type(model.get_submodule(path)).__name__
