"""Split a stage's backward in two halves: input gradients, which the previous stage waits for, then weight gradients.

After Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 2. The first half runs the graph from the outputs to
the inputs and captures the gradients at its border: the nodes with a path to weights. The second half continues from
there. Weights without a path to such a node (no input requires a gradient, or an output does not depend on the inputs)
are left to the second half entirely.

    outputs -> mul -> addmm -> relu -> addmm -> inputs        first half: along this line
                        |                |
                        w2               w1                   second half: from each addmm to its weight

The functions for this in torch.distributed.pipelining silently compute wrong gradients for weights that no input
reaches, weights whose gradients are one tensor, and weights used in several places, and fail if an output is a view.
These accumulate like any other backward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from gplan_profiler.torch_compat import PythonFunction

_Gradients = tuple[Tensor | None, ...]

_Parents = Mapping[Node, Sequence[Node]]
"""The nodes of a graph from the outputs on, each with the nodes that pass gradients to it."""

_Root = tuple[GradientEdge, Tensor]
"""An output and its gradient."""

_LEAF = "torch::autograd::AccumulateGrad"
_WRITTEN_IN_PYTHON: type = PythonFunction


@dataclass(slots=True)
class _Part:
    """Weights with connected paths, and the nodes from which their second half starts."""

    weights: list[Tensor] = field(default_factory=list)
    starts: set[Node] = field(default_factory=set)
    border: dict[Node, _Gradients] = field(default_factory=dict)  # captured gradients at starts
    roots: list[_Root] = field(default_factory=list)  # starts that are outputs without a path to an input
    owners: list[object] = field(default_factory=list)  # keep starts alive that are written in Python

    @property
    def is_joined(self) -> bool:
        """Whether its paths may pass through border nodes again."""
        return len(self.border) > 1

    def run(self) -> None:
        """Accumulate the weights' gradients."""
        caught = [(GradientEdge(x, i), y) for x, row in self.border.items() for i, y in enumerate(row) if y is not None]
        started = [*caught, *self.roots]
        # Gradients captured at a node include those that came through another one, which must not be added twice.
        border = self.border.items() if self.is_joined else ()
        handles = [x.register_prehook(lambda _found, row=row: row) for x, row in border]
        try:
            if started:
                edges, gradients = zip(*started, strict=True)
                torch.autograd.backward(edges, gradients, retain_graph=self.is_joined, inputs=self.weights)
        finally:
            for handle in handles:
                handle.remove()


class SecondHalf:
    """The rest of a backward after the input gradients; it can be run once."""

    def __init__(self, parts: Collection[_Part]) -> None:
        # Joined parts run first, because they pass through nodes of others, whose saved tensors are freed by their runs.
        self._parts = sorted(parts, key=lambda part: not part.is_joined)[::-1]

    def run(self) -> None:
        """Accumulate the gradients of the weights."""
        for _ in self.run_parts():
            pass

    def run_parts(self) -> Iterator[None]:
        """The same, with a pause after each part, when what it held is freed."""
        while self._parts:
            self._parts.pop().run()
            yield


def first_half(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> tuple[_Gradients, SecondHalf]:
    """The gradients of the inputs (None for those without one), and the second half, given the outputs' gradients.

    The caller should release the outputs; the second half keeps the parts of the graph that it needs.
    """
    pairs = zip(outputs, gradients, strict=True)
    roots = [(get_gradient_edge(x), y) for x, y in pairs if x.requires_grad and y is not None]
    leaves = [get_gradient_edge(x).node for x in inputs if x.requires_grad]
    parents = _parents([edge.node for edge, _ in roots])
    inner = _above([x for x in leaves if x in parents], parents, until=())  # nodes on a way to an input
    parts = _parts(parents, inner, {*leaves}, {edge.node for edge, _ in roots})
    caught: dict[Node, _Gradients] = {}
    handles = [x.register_prehook(partial(caught.__setitem__, x)) for part in parts for x in part.starts if x in inner]
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
    """These nodes and their ancestors, up to and including the first ones in `until`."""
    above, found = set(nodes), list(nodes)
    for node in found:  # which grows meanwhile
        if node not in until:
            new = set(parents[node]) - above
            above |= new
            found += new
    return above


def _parts(parents: _Parents, inner: set[Node], inputs: Collection[Node], outputs: Collection[Node]) -> list[_Part]:
    """All weights, grouped by common starts: the first inner nodes above them, and outputs."""
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
    """The object that keeps a node alive: itself, or for a node written in Python its nearest C++ ancestor."""
    while isinstance(node, _WRITTEN_IN_PYTHON):
        token = tokens.get(node)
        if token is not None:
            return token
        node = parents[node][0]
    return node
