"""Capture without tracing: an nn.Sequential, or a list of stages, cut between its children.

Works for whatever the children do inside, data-dependent control flow included. What passes between two children may be
a tensor, a tuple, a list or a dict of tensors.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils import _pytree as pytree

from gplan.errors import ModelError
from profiler.capture.chain import AtLayer, Chain, Route, Tensors, TensorSpec, call_arguments, detached, flat_tensors, untouched
from profiler.capture.likeness import module_key
from profiler.model.author import author_line, describe
from profiler.model.lazy import fake_mode_of


class SequentialChain(Chain):
    """Layers that are the children of a sequence; a child that stands in it twice is two layers."""

    def __init__(self, model: nn.Sequential, inputs: object) -> None:
        children = tuple((name, child) for name, child in model._modules.items() if child is not None)
        super().__init__(model, [name for name, _ in children], [type(child).__name__ for _, child in children])
        self._children = children
        self._structures, self._specs, self._writers = self._trace(inputs)

    def stage(self, first: int, end: int, *, at_layer: AtLayer | None = None) -> nn.Module:
        """Layers [first, end) as a module whose parameters keep their names in the sequence."""
        layers = _Slice(self._children[first:end], self._structures[first], copies_input=self._writers[first])
        layers.first, layers.at_layer = first, at_layer
        return layers

    def draws(self, layer: int) -> bool:
        """Every child may."""
        return True

    def specs(self, boundary: int) -> tuple[TensorSpec, ...]:
        """What passes between two children."""
        return self._specs[boundary]

    def routes(self, boundary: int) -> tuple[Route, ...]:
        """From one child to the next: what a child hands on of its input counts as made by it."""
        return (Route(boundary - 1 if boundary else None, (boundary,)),) * len(self._specs[boundary])

    def reordered(self, order: Sequence[int]) -> SequentialChain:
        """Only the order it has: every child reads what the one before it gives."""
        if list(order) != list(range(len(self))):
            raise ModelError(
                f"the layers of an nn.Sequential cannot run in the order {list(order)}; each child reads what the one "
                "before it gives: expected 0, 1, 2, ..."
            )
        return self

    def structure(self, layer: int) -> Hashable:
        """Alike children, given alike values."""
        return module_key(self._children[layer][1]), self._structures[layer], self._specs[layer], self._writers[layer]

    def state(self, layer: int) -> dict[str, Tensor]:
        """The child's own parameters and buffers."""
        name, child = self._children[layer]
        found = [*child.named_parameters(prefix=name), *child.named_buffers(prefix=name)]
        return dict(found)

    def model_output(self, tensors: Tensors) -> Any:
        """The output of the last child."""
        return pytree.tree_unflatten(list(tensors), self._structures[-1])

    def _trace(self, inputs: object) -> tuple[list[pytree.TreeSpec], list[tuple[TensorSpec, ...]], list[bool]]:
        """The structure and the specs of what passes at each boundary, and which children write into what they get.

        A model without weights is traced on fake tensors, children that are alike once for all of them.
        """
        value = _only_input(inputs)
        tensors = flat_tensors(value, what="the inputs")
        structures, specs, writers = [pytree.tree_structure(value)], [TensorSpec.of_all(tensors)], []
        mode = fake_mode_of(self.model)
        known: dict[Hashable, tuple[Tensors, pytree.TreeSpec, bool]] = {}
        with untouched(self.model), mode or nullcontext():
            if mode is not None:
                tensors = tuple(mode.from_tensor(x) for x in tensors)
            for name, child in self._children:
                key = (module_key(child), structures[-1], specs[-1]) if mode is not None else name
                traced = known.get(key) or _traced(name, child, tensors, structures[-1])
                if mode is not None:
                    known[key] = traced
                tensors, structure, writes = traced
                structures.append(structure)
                specs.append(TensorSpec.of_all(tensors))
                writers.append(writes)
        return structures, specs, writers


def _traced(
    name: str, child: nn.Module, tensors: Tensors, structure: pytree.TreeSpec
) -> tuple[Tensors, pytree.TreeSpec, bool]:
    """What a child gives: its tensors, their structure, and whether the child writes into what it is given."""
    given = tuple(x.clone() for x in detached(tensors))
    before = [x._version for x in given]
    try:
        value = child(pytree.tree_unflatten(list(given), structure))
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ModelError(
            f"{name} ({type(child).__name__}) decides by the values of its input{_at(error)}, which a model without weights "
            "does not have; write it without (torch.where, torch.cond), or measure on a host with more memory"
        ) from error
    except Exception as error:
        shapes = ", ".join(str(tuple(x.shape)) for x in tensors)
        raise ModelError(
            f"{name} ({type(child).__name__}) fails on inputs of shape {shapes}: {describe(error)}"
        ) from error
    outputs = flat_tensors(value, what=f"the output of {name} ({type(child).__name__})")
    return outputs, pytree.tree_structure(value), [x._version for x in given] != before


def _at(error: Exception) -> str:
    line = author_line(error)
    return f" ({line})" if line else ""


class _Slice(nn.Module):
    """Some consecutive children; the first of them may not write into the boundary, which others read too."""

    first = 0  # the number of the first child in the chain
    at_layer: AtLayer | None = None

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
        for layer, child in enumerate(self._modules.values(), self.first):
            assert child is not None
            if self.at_layer is not None:
                self.at_layer(layer)
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
