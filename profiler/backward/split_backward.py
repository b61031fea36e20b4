"""A stage's backward pass in two halves (Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 2): what the stage
before waits for, and then the gradients of the weights, for which nobody waits.

The first half runs the graph from the outputs to the inputs and catches the gradients at its border: the nodes from
which a way leads off to weights. The second half goes on from there. Weights whose way meets no such node (the inputs
want no gradient, or an output does not depend on them) wait with all of it for the second half.

    outputs -> mul -> addmm -> relu -> addmm -> inputs        first half: along this line
                        |                |
                        w2               w1                   second half: from each addmm to its weight

torch.distributed.pipelining has functions for this, which its stages call. Without an error they leave out or add up
wrongly the gradients of weights that no input meets, of weights whose gradients are one tensor, and of weights used at
several places; and they fail where an output is a view. These here accumulate as any other backward does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

_Gradients = tuple[Tensor | None, ...]

_Parents = Mapping[Node, Sequence[Node]]
"""The nodes of a graph, those near the outputs first, each with those that hand gradients on to it."""

_Root = tuple[GradientEdge, Tensor]
"""An output and its gradient."""

_LEAF = "torch::autograd::AccumulateGrad"
_WRITTEN_IN_PYTHON: type = torch._C._FunctionBase


@dataclass(slots=True)
class _Part:
    """Weights whose ways meet, and what starts towards them."""

    weights: list[Tensor] = field(default_factory=list)
    starts: set[Node] = field(default_factory=set)
    border: dict[Node, _Gradients] = field(default_factory=dict)  # those of the starts where gradients were caught
    roots: list[_Root] = field(default_factory=list)  # those of the starts that are outputs and that no input meets
    owners: list[object] = field(default_factory=list)  # what keeps starts alive that are written in Python

    @property
    def is_joined(self) -> bool:
        """Whether its way may lead through the border again, its own and that of other parts."""
        return len(self.border) > 1

    def run(self) -> None:
        """Add to the weights' gradients."""
        caught = [(GradientEdge(x, i), y) for x, row in self.border.items() for i, y in enumerate(row) if y is not None]
        started = [*caught, *self.roots]
        # What was caught at a node has in it what came through another: that must not come a second time.
        handles = [x.register_prehook(_giving(row)) for x, row in self.border.items()] if self.is_joined else []
        try:
            if started:
                edges, gradients = zip(*started, strict=True)
                torch.autograd.backward(edges, gradients, retain_graph=self.is_joined, inputs=self.weights)
        finally:
            for handle in handles:
                handle.remove()


class SecondHalf:
    """What is left of a backward pass once the gradients of the inputs are known; it can be run once."""

    def __init__(self, parts: Collection[_Part]) -> None:
        # A joined part goes through nodes of others and needs what they keep. Of the others each frees what it needed.
        self._parts = sorted(parts, key=lambda part: not part.is_joined)[::-1]

    def run(self) -> None:
        """Add to the gradients of the weights."""
        while self._parts:
            self._parts.pop().run()


def first_half(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> tuple[_Gradients, SecondHalf]:
    """The gradients of the inputs, None for those that want or get none, and what is to be done for the weights.

    `gradients` are those of the outputs. The outputs should be let go: what the second half needs of their graph, it
    holds.
    """
    pairs = zip(outputs, gradients, strict=True)
    roots = [(get_gradient_edge(x), y) for x, y in pairs if x.requires_grad and y is not None]
    leaves = [get_gradient_edge(x).node for x in inputs if x.requires_grad]
    parents = _parents([edge.node for edge, _ in roots])
    inner = _above([x for x in leaves if x in parents], parents, until=())  # nodes on a way to an input
    parts = _parts(parents, inner, {*leaves}, {edge.node for edge, _ in roots})
    caught: dict[Node, _Gradients] = {}
    handles = [x.register_prehook(_catching(x, caught)) for part in parts for x in part.starts if x in inner]
    try:
        found = _input_gradients([root for root in roots if root[0].node in inner], inputs)
    finally:
        for handle in handles:
            handle.remove()
    tokens = {edge.node: edge.ownership_token for edge, _ in roots}
    for part in parts:
        part.border = {x: caught[x] for x in part.starts if x in caught}
        part.roots = [(edge, y) for edge, y in roots if edge.node in part.starts and edge.node not in inner]
        part.owners = [_owner(x, parents, tokens) for x in part.starts]
    return found, SecondHalf(parts)


def _parents(roots: Sequence[Node]) -> dict[Node, list[Node]]:
    parents: dict[Node, list[Node]] = {node: [] for node in roots}
    found = list(parents)
    for node in found:  # which grows meanwhile
        for child, _ in node.next_functions:
            if child is None:
                continue
            if child not in parents:
                parents[child] = []
                found.append(child)
            parents[child].append(node)
    return parents


def _above(nodes: Sequence[Node], parents: _Parents, *, until: Collection[Node]) -> set[Node]:
    """These nodes and those from which one comes to them, up to the first ones of `until`."""
    above, found = set(nodes), list(nodes)
    for node in found:  # which grows meanwhile
        if node not in until:
            new = set(parents[node]) - above
            above |= new
            found += new
    return above


def _parts(parents: _Parents, inner: set[Node], inputs: Collection[Node], outputs: Collection[Node]) -> list[_Part]:
    """All weights, with what is met on the way up from them: inner nodes, where it ends, and outputs."""
    part_of: dict[Node, _Part] = {}
    for leaf in [x for x in parents if x.name() == _LEAF and x not in inputs]:
        way = _above([leaf], parents, until=inner)
        part = _Part(weights=[leaf.variable], starts={x for x in way if x in inner or x in outputs})  # type: ignore[attr-defined]
        for other in {id(x): x for x in map(part_of.get, part.starts) if x is not None}.values():
            part.weights += other.weights
            part.starts |= other.starts
        part_of.update(dict.fromkeys(part.starts, part))
    return list({id(x): x for x in part_of.values()}.values())


def _input_gradients(roots: Sequence[_Root], inputs: Sequence[Tensor]) -> _Gradients:
    wanted = [x for x in inputs if x.requires_grad]
    if not roots or not wanted:
        return (None,) * len(inputs)
    edges, gradients = zip(*roots, strict=True)
    found = iter(torch.autograd.grad(edges, wanted, gradients, retain_graph=True, allow_unused=True))
    return tuple(next(found) if x.requires_grad else None for x in inputs)


def _owner(node: Node, parents: _Parents, tokens: Mapping[Node, Node | None]) -> Node:
    """What must be held that a node stays: itself, but for one written in Python, which those before it hold."""
    while isinstance(node, _WRITTEN_IN_PYTHON):
        token = tokens.get(node)
        if token is not None:
            return token
        node = parents[node][0]
    return node


def _catching(node: Node, caught: dict[Node, _Gradients]) -> Callable[[_Gradients], None]:
    def hook(gradients: _Gradients) -> None:
        caught[node] = gradients

    return hook


def _giving(gradients: _Gradients) -> Callable[[_Gradients], _Gradients]:
    return lambda _found: gradients
