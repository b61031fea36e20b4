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
from profiler.chain import Chain, Tensors, flat_tensors, untouched


class SequentialChain(Chain):
    """Layers that are the children of a sequence."""

    def __init__(self, model: nn.Sequential, inputs: object) -> None:
        children = dict(model.named_children())
        super().__init__(model, list(children), [type(child).__name__ for child in children.values()])
        self._children = tuple(children.items())
        self._structures = self._trace(inputs)

    def stage(self, first: int, end: int) -> nn.Module:
        """Layers [first, end) as a module whose parameters keep their names in the sequence."""
        return _Slice(dict(self._children[first:end]), self._structures[first], is_first=first == 0)

    def model_output(self, tensors: Tensors) -> Any:
        """The output of the last child."""
        return pytree.tree_unflatten(list(tensors), self._structures[-1])

    def _trace(self, inputs: object) -> list[pytree.TreeSpec]:
        """The structure of what passes at each boundary, found by running the sequence once."""
        value = inputs
        structures = [pytree.tree_structure(value)]
        with untouched(self.model), torch.no_grad():
            for name, child in self._children:
                value = child(value)
                flat_tensors(value, what=f"the output of {name}")
                structures.append(pytree.tree_structure(value))
        return structures


class _Slice(nn.Module):
    """Some consecutive children; the first of them may not write into the boundary, which is a leaf of the graph."""

    def __init__(self, children: dict[str, nn.Module], structure: pytree.TreeSpec, *, is_first: bool) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)
        self._structure = structure
        head = next(iter(children.values()))
        self._copies_input = not is_first and any(getattr(module, "inplace", False) for module in head.modules())

    def forward(self, *tensors: Tensor) -> Tensors:
        if self._copies_input:
            tensors = tuple(tensor.clone() for tensor in tensors)
        value: object = pytree.tree_unflatten(list(tensors), self._structure)
        for child in self.children():
            value = child(value)
        return tuple(tensor.contiguous() for tensor in pytree.tree_leaves(value))


def as_sequential(stages: Sequence[object]) -> nn.Sequential:
    """A list of stages as one model; raises ModelError for entries that are not modules."""
    for index, stage in enumerate(stages):
        if not isinstance(stage, nn.Module):
            raise ModelError(f"entry {index} of the list of stages is a {type(stage).__name__}; expected an nn.Module")
    if not stages:
        raise ModelError("the list of stages is empty; expected at least one nn.Module")
    return nn.Sequential(*(stage for stage in stages if isinstance(stage, nn.Module)))
