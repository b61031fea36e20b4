"""A chain of layers: the result of capture, and the input of measuring and running.

A boundary lies between two layers: the tuple of all tensors made before it and read after it. Consecutive layers form a
stage, a module from boundary tensors to boundary tensors with the model's own Parameter objects and their names. Layers
of a model with branches can be reordered.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from gplan.core.precision import AS_MADE, Precision
from gplan_profiler.capture.module_attributes import AssignedAttribute
from gplan_profiler.capture.moving_averages import RunningNorm
from gplan_profiler.capture.value_forms import checked_leaves

Tensors: TypeAlias = tuple[Tensor, ...]

AtLayer: TypeAlias = Callable[[int], None]
"""Called with the index of each layer, in the chain's order, before a stage runs it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Shape, dtype and requires_grad of one tensor of a boundary, and the strides that it has within a stage.

    Specs with other strides are equal: what is received from another device is contiguous.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    strides: tuple[int, ...] = field(default=(), compare=False)  # (): contiguous

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """The spec of a tensor."""
        strides = () if tensor.layout != torch.strided or tensor.is_contiguous() else tensor.stride()
        return cls(
            shape=tuple(tensor.shape), dtype=tensor.dtype, requires_grad=tensor.requires_grad, strides=tuple(strides)
        )

    @classmethod
    def of_all(cls, tensors: Tensors) -> tuple[TensorSpec, ...]:
        """The specs of some tensors."""
        return tuple(cls.of(tensor) for tensor in tensors)

    def laid_out(self, tensor: Tensor) -> Tensor:
        """The tensor, or a copy of it, with the strides of this spec, as kernels are chosen by them."""
        if TensorSpec.of(tensor).strides == self.strides or tuple(tensor.shape) != self.shape:
            return tensor
        if not self.strides:
            return tensor.detach().contiguous().requires_grad_(tensor.requires_grad)
        once = tensor.detach()[tuple(slice(0, 1) if x == 0 else slice(None) for x in self.strides)]  # before an expand
        pairs = sorted((stride, size) for stride, size in zip(self.strides, once.shape, strict=True) if size > 1)
        if any(stride * size > following for (stride, size), (following, _) in pairwise(pairs)):
            return tensor  # windows that overlap, as by `unfold`
        made = once.new_empty_strided(once.shape, self.strides).copy_(once).expand(self.shape)
        return made.requires_grad_(tensor.requires_grad)

    @property
    def num_bytes(self) -> int:
        """The bytes of its elements."""
        return prod(self.shape) * self.dtype.itemsize

    def on_meta(self) -> Tensor:
        """A tensor without storage that has this spec."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta", requires_grad=self.requires_grad)


@dataclass(frozen=True, slots=True)
class Route:
    """The layer that makes a tensor and those that read it."""

    producer: int | None  # None: an input of the model
    consumers: tuple[int, ...]  # increasing; L, the number of layers, stands for the model's output


def autocast(precision: Precision, device_type: str = "cpu") -> AbstractContextManager[Any]:
    """torch.autocast, if the precision has it."""
    if not precision.autocast:
        return nullcontext()
    return torch.autocast(device_type, dtype=getattr(torch, precision.compute or "bfloat16"))


class Chain(ABC):
    """A captured model at one micro-batch size."""

    def __init__(self, model: nn.Module, names: Sequence[str], kinds: Sequence[str]) -> None:
        self.model = model
        self.names = tuple(names)
        self.kinds = tuple(kinds)
        self.traced = ""  # the way that was taken, if it is not the first
        self.divided: tuple[str, ...] = ()  # of the author's layers; see gplan_profiler/capture/division.py
        self.precision = AS_MADE  # whose autocast each stage runs under
        self.notes: tuple[str, ...] = ()  # on how the model was captured, for readers of a profile
        self.assigned: tuple[AssignedAttribute, ...] = ()  # that the forward sets on modules, which stages do not
        self.lacks_tensors = False  # whether tensors of the model's output are left out, as their size depends on data

    def __len__(self) -> int:
        return len(self.names)

    def stage(self, first: int, end: int, *, at_layer: AtLayer | None = None, sends: bool = True) -> nn.Module:
        """Layers [first, end) as one module, from the tensors of boundary `first` to those of boundary `end`.

        What it gives is contiguous, as what is sent must be; unless it `sends`, it has the strides that it has within a stage.
        """
        module = self._stage(first, end, at_layer, sends)
        if self.precision.autocast:
            kind, precision = type(module), self.precision

            def forward(*tensors: Tensor) -> Any:
                device_type = "cuda" if any(x.is_cuda for x in tensors) else "cpu"
                with autocast(precision, device_type):
                    return kind.forward(module, *tensors)

            module.forward = forward  # a forward has its casts of weights to itself, as in a block of a plain loop
        return module

    @abstractmethod
    def _stage(self, first: int, end: int, at_layer: AtLayer | None, sends: bool) -> nn.Module:
        """As `stage`, without autocast."""

    @abstractmethod
    def draws(self, layer: int) -> bool:
        """Whether a layer may draw random numbers."""

    def is_routed(self, layer: int) -> bool:
        """Whether the work of a layer depends on values, as that of experts on the tokens routed to each."""
        return False

    @abstractmethod
    def specs(self, boundary: int) -> tuple[TensorSpec, ...]:
        """The specs of a boundary's tensors, as captured."""

    @abstractmethod
    def routes(self, boundary: int) -> tuple[Route, ...]:
        """The route of each tensor of a boundary; an input that nothing reads has no consumers."""

    @property
    def pinned(self) -> tuple[tuple[int, int], ...]:
        """Pairs of layers (before, after) with a fixed order: both use a buffer and one writes into it."""
        return ()

    @property
    @abstractmethod
    def written(self) -> tuple[Tensor, ...]:
        """Buffers and constants that a forward writes into; of some norms not their moving averages, which `norms` has."""

    @abstractmethod
    def reordered(self, order: Sequence[int]) -> Chain:
        """The same captured model with layer `order[i]` at position i, and the same digest.

        Gradients equal those of the plain model, except that dropout draws other numbers in another order. Raises
        ModelError unless `order` is a permutation in which every layer runs after its producers.
        """

    @abstractmethod
    def structure(self, layer: int) -> Hashable:
        """Equal for layers that compute the same on tensors of the same specs."""

    @abstractmethod
    def state(self, layer: int) -> dict[str, Tensor]:
        """The parameters and buffers that a layer uses, by their names in the model."""

    @abstractmethod
    def norms(self, first: int, end: int) -> tuple[RunningNorm, ...]:
        """The moving averages that layers [first, end) write in a forward of one micro-batch."""

    @abstractmethod
    def model_output(self, tensors: Tensors) -> Any:
        """The tensors of the last boundary in the structure of the model's output."""

    def digest(self) -> str:
        """A hash of the layers and of the names and shapes of all parameters."""
        parameters = [(name, tuple(p.shape), str(p.dtype)) for name, p in self.model.named_parameters()]
        return hashlib.sha256(repr((self.names, self.kinds, parameters)).encode()).hexdigest()[:16]


def routing_notes(chain: Chain, *, how: str) -> tuple[str, ...]:
    """A note on the layers whose time depends on routing, and how it was found; for a profile and every plan made from it."""
    routed = [name for layer, name in enumerate(chain.names) if chain.is_routed(layer)]
    if not routed:
        return ()
    names = (
        ", ".join(routed) if len(routed) <= 3 else f"{routed[0]}, {routed[1]} ... {routed[-1]} ({len(routed)} layers)"
    )
    return (
        f"the time of {names} depends on routing, that is on what a batch selects, such as the experts of its tokens: {how}",
    )


def detached(tensors: Tensors) -> Tensors:
    """The same tensors as leaves of a new graph, with the same requires_grad."""
    return tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors)


def wants_gradient(tensors: Tensors) -> bool:
    """Whether any of the tensors requires a gradient."""
    return any(tensor.requires_grad for tensor in tensors)


def roots_with_gradients(outputs: Tensors, leaves: Tensors) -> tuple[list[Tensor], list[Tensor]]:
    """The start of a backward: the outputs whose leaves have received a gradient, and these gradients."""
    pairs = [(x, y.grad) for x, y in zip(outputs, leaves, strict=True) if y.grad is not None]
    return [x for x, _ in pairs], [y for _, y in pairs]


def modules_that_train(model: nn.Module) -> dict[nn.Module, bool]:
    """Whether each module trains: all do but those that their author put in evaluation mode inside a training model."""
    return {x: x.training or not model.training for x in model.modules()}


@contextmanager
def model_state_restored(model: nn.Module) -> Iterator[None]:
    """Restore buffers, tensors in attributes, gradients and modes of the model, and the random state, at the end.

    Inside, the parameters begin without gradients.
    """
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(module, dict(module._buffers)) for module in model.modules() if module._buffers]
    held = [x for module in model.modules() for x in module.__dict__.values() if isinstance(x, Tensor)]
    tensors = {id(x): x for x in (*model.buffers(), *held) if not _is_expanded(x)}  # whose elements cannot be written
    values = [(x, x.detach().clone()) for x in tensors.values()]
    gradients = [(x, x.grad) for x in model.parameters()]
    places = {x.device for x in model.parameters() if x.device.type == "cuda"}
    devices = sorted(x.index for x in places if x.index is not None)
    try:
        with torch.random.fork_rng(devices=devices):
            for parameter, _ in gradients:
                parameter.grad = None
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, training in modes:
            module.training = training
        for module, own in buffers:
            module._buffers.update(own)
        for tensor, kept in values:
            if _same_form(tensor, kept) and not _is_expanded(tensor):
                tensor.data.copy_(kept)  # seen by all that share its memory
            else:
                tensor.data = kept


def _is_expanded(tensor: Tensor) -> bool:
    """Whether elements share memory along a dimension."""
    if tensor.layout != torch.strided or tensor.is_nested:
        return False
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _same_form(tensor: Tensor, other: Tensor) -> bool:
    """Whether a tensor has the values of another once they are copied into its `.data`."""
    if tensor.layout == torch.sparse_coo:  # whose `.data` has indices and values of its own
        return False
    return tensor.is_nested or (tensor.shape, tensor.dtype) == (other.shape, other.dtype)


def flat_tensors(value: object, *, what: str) -> Tensors:
    """The tensors in a value, in order; raises ModelError for a value without tensors or with other objects."""
    leaves, _ = checked_leaves(value, what=what)
    return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))


def call_arguments(inputs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs as (args, kwargs): a tensor is one argument, a tuple or list are several, a dict is by name."""
    if isinstance(inputs, dict):
        return (), dict(inputs)
    if isinstance(inputs, list | tuple):
        return tuple(inputs), {}
    return (inputs,), {}


@dataclass(slots=True)
class NotFinite:
    """The layer from which on no layer's outputs are finite, to the end of a run of layers.

    An infinity counts where gradients pass. Attention masks hold infinities too, and scores with such a mask are finite
    again after the next layer.
    """

    first: int | None = None  # the layer, by its number

    def after(self, layer: int, outputs: Iterable[tuple[Tensor, bool]]) -> None:
        """A layer has run; with each of its outputs stands whether it has a gradient."""
        floating = [(x, has_gradient) for x, has_gradient in outputs if x.is_floating_point()]
        is_finite = all(bool((x.isfinite() if has_gradient else ~x.isnan()).all()) for x, has_gradient in floating)
        if is_finite:
            self.first = None
        elif self.first is None:
            self.first = layer
