"""A model as a chain of layers: what capture makes, what measuring and executing use.

Between two layers lies a boundary, a tuple of tensors: every value that is made before it and needed after it. Any run
of consecutive layers can be had as one module from boundary tensors to boundary tensors; it holds the very Parameter
objects of the model, under their own names. Where the model has branches its layers can be had in other orders too.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from profiler.capture.running_norms import RunningNorm
from profiler.capture.value_forms import checked_leaves

Tensors: TypeAlias = tuple[Tensor, ...]

AtLayer: TypeAlias = Callable[[int], None]
"""Called with the number of a layer, in the chain's order, whenever a stage comes to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Shape, dtype and gradient of one tensor of a boundary."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """The spec of a tensor."""
        return cls(shape=tuple(tensor.shape), dtype=tensor.dtype, requires_grad=tensor.requires_grad)

    @classmethod
    def of_all(cls, tensors: Tensors) -> tuple[TensorSpec, ...]:
        """The specs of some tensors."""
        return tuple(cls.of(tensor) for tensor in tensors)

    @property
    def num_bytes(self) -> int:
        """Of its elements."""
        return prod(self.shape) * self.dtype.itemsize

    def on_meta(self) -> Tensor:
        """A tensor without storage that has this spec."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta", requires_grad=self.requires_grad)


@dataclass(frozen=True, slots=True)
class Route:
    """The way of a tensor: the layer that makes it and those that read it."""

    producer: int | None  # None: it is an input of the model
    consumers: tuple[int, ...]  # rising; L, the number of layers, stands for the model's output


class Chain(ABC):
    """A captured model at one micro-batch size."""

    def __init__(self, model: nn.Module, names: Sequence[str], kinds: Sequence[str]) -> None:
        self.model = model
        self.names = tuple(names)
        self.kinds = tuple(kinds)

    def __len__(self) -> int:
        return len(self.names)

    @abstractmethod
    def stage(self, first: int, end: int, *, at_layer: AtLayer | None = None) -> nn.Module:
        """Layers [first, end) as one module: the tensors of boundary `first` to a tuple of those of boundary `end`."""

    @abstractmethod
    def draws(self, layer: int) -> bool:
        """Whether a layer may draw random numbers."""

    @abstractmethod
    def specs(self, boundary: int) -> tuple[TensorSpec, ...]:
        """What the tensors of a boundary are like, as the capture found them."""

    @abstractmethod
    def routes(self, boundary: int) -> tuple[Route, ...]:
        """Where each tensor of a boundary comes from and goes to; an input that nothing reads has no consumers."""

    @property
    def pinned(self) -> tuple[tuple[int, int], ...]:
        """Pairs of layers (before, after) that keep their order although nothing travels: one writes what both use."""
        return ()

    @abstractmethod
    def reordered(self, order: Sequence[int]) -> Chain:
        """The same captured model with layer `order[i]` at place i, and the same digest.

        A boundary is then what crosses the layers so far. The gradients are those of the plain model, but for random
        numbers: dropout in another order draws others. Raises ModelError for what is no order of the layers, and for
        one in which a layer would run before what it needs.
        """

    @abstractmethod
    def structure(self, layer: int) -> Hashable:
        """Equal for layers that compute the same on tensors of the same shapes, dtypes and need of a gradient."""

    @abstractmethod
    def state(self, layer: int) -> dict[str, Tensor]:
        """The parameters and buffers that a layer uses, by their names in the model."""

    @abstractmethod
    def norms(self, first: int, end: int) -> tuple[RunningNorm, ...]:
        """The moving averages that layers [first, end) write in a forward of one micro-batch."""

    @abstractmethod
    def model_output(self, tensors: Tensors) -> Any:
        """The tensors of the last boundary in the structure that the model returns."""

    def digest(self) -> str:
        """A fingerprint of the layers and of the names and shapes of all parameters."""
        parameters = [(name, tuple(p.shape), str(p.dtype)) for name, p in self.model.named_parameters()]
        return hashlib.sha256(repr((self.names, self.kinds, parameters)).encode()).hexdigest()[:16]

    def boundaries(self, inputs: Tensors) -> tuple[tuple[TensorSpec, ...], ...]:
        """The specs of all L+1 boundaries, found by running the layers once; the model is left as it was."""
        specs = [TensorSpec.of_all(inputs)]
        with model_state_restored(self.model):
            tensors = inputs
            for layer in range(len(self)):
                tensors = self.stage(layer, layer + 1)(*tensors)
                specs.append(TensorSpec.of_all(tensors))
                tensors = detached(tensors)
        return tuple(specs)


def detached(tensors: Tensors) -> Tensors:
    """The same tensors as leaves of a new graph; those that wanted a gradient still do."""
    return tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors)


def wants_gradient(tensors: Tensors) -> bool:
    """Whether a gradient goes back to any of them."""
    return any(tensor.requires_grad for tensor in tensors)


def roots_with_gradients(outputs: Tensors, leaves: Tensors) -> tuple[list[Tensor], list[Tensor]]:
    """Where a backward starts: the outputs that gradients came back for, to the leaves that stood for them,
    and these."""
    pairs = [(x, y.grad) for x, y in zip(outputs, leaves, strict=True) if y.grad is not None]
    return [x for x, _ in pairs], [y for _, y in pairs]


@contextmanager
def model_state_restored(model: nn.Module) -> Iterator[None]:
    """Afterwards the model's buffers, gradients and modes, and the random state, are what they were."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    devices = sorted({x.device.index for x in parameters if x.device.type == "cuda" and x.device.index is not None})
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        for module, training in modes:
            module.training = training
        for buffer, kept in buffers:
            buffer.data.copy_(kept)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def flat_tensors(value: object, *, what: str) -> Tensors:
    """The tensors in a value, in order; raises ModelError where it holds none,
    or anything but tensors and constants."""
    leaves, _ = checked_leaves(value, what=what)
    return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))


def call_arguments(inputs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs as a call's arguments: a tensor is one, a tuple or list are several, a dict is by name."""
    if isinstance(inputs, dict):
        return (), dict(inputs)
    if isinstance(inputs, list | tuple):
        return tuple(inputs), {}
    return (inputs,), {}
