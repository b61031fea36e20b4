"""Capture without tracing: an nn.Sequential, or a list of stages, cut between its children.

Works for whatever the children do inside, data-dependent control flow included. What passes between two children may be
a tensor, a tuple, a list or a dict of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gplan.errors import ModelError
from profiler.chain import Chain, Tensors, call_arguments, flat_tensors, untouched


class SequentialChain(Chain):
    """Layers that are the children of a sequence; a child that stands in it twice is two layers."""

    def __init__(self, model: nn.Sequential, inputs: object) -> None:
        children = tuple((name, child) for name, child in model._modules.items() if child is not None)
        super().__init__(model, [name for name, _ in children], [type(child).__name__ for _, child in children])
        self._children = children
        self._structures, self._writers = self._trace(inputs)

    def stage(self, first: int, end: int) -> nn.Module:
        """Layers [first, end) as a module whose parameters keep their names in the sequence."""
        return _Slice(self._children[first:end], self._structures[first], copies_input=self._writers[first])

    def model_output(self, tensors: Tensors) -> Any:
        """The output of the last child."""
        return pytree.tree_unflatten(list(tensors), self._structures[-1])

    def _trace(self, inputs: object) -> tuple[list[pytree.TreeSpec], list[bool]]:
        """The structure of what passes at each boundary, and which children write into what they are given."""
        value = _only_input(inputs)
        structures, writers = [pytree.tree_structure(value)], []
        with untouched(self.model), torch.no_grad():
            for name, child in self._children:
                given = tuple(x.clone() for x in pytree.tree_leaves(value))
                before = [x._version for x in given]
                value = child(pytree.tree_unflatten(list(given), structures[-1]))
                writers.append([x._version for x in given] != before)
                flat_tensors(value, what=f"the output of {name}")
                structures.append(pytree.tree_structure(value))
        return structures, writers


class _Slice(nn.Module):
    """Some consecutive children; the first of them may not write into the boundary, which others read too."""

    def __init__(
        self, children: Sequence[tuple[str, nn.Module]], structure: pytree.TreeSpec, *, copies_input: bool
    ) -> None:
        super().__init__()
        for name, child in children:
            self.add_module(name, child)
        self._structure = structure
        self._copies_input = copies_input

    def forward(self, *tensors: Tensor) -> Tensors:
        if self._copies_input:
            tensors = tuple(tensor.clone() for tensor in tensors)
        value: object = pytree.tree_unflatten(list(tensors), self._structure)
        for child in self._modules.values():
            assert child is not None
            value = child(value)
        return tuple(tensor.contiguous() for tensor in pytree.tree_leaves(value))


def _only_input(inputs: object) -> object:
    """What the first child of a sequence is called with: nn.Sequential takes one argument."""
    args, kwargs = call_arguments(inputs)
    if kwargs or len(args) != 1:
        found = f"inputs by name ({', '.join(kwargs)})" if kwargs else f"{len(args)} inputs"
        raise ModelError(f"an nn.Sequential or a list of modules takes one input; the model file gives {found}")
    return args[0]


def as_sequential(stages: Sequence[object]) -> nn.Sequential:
    """A list of stages as one model; raises ModelError for entries that are not modules."""
    for index, stage in enumerate(stages):
        if not isinstance(stage, nn.Module):
            raise ModelError(f"entry {index} of the list of stages is a {type(stage).__name__}; expected an nn.Module")
    if not stages:
        raise ModelError("the list of stages is empty; expected at least one nn.Module")
    return nn.Sequential(*(stage for stage in stages if isinstance(stage, nn.Module)))
