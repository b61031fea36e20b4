"""Fake tensors in the place of real ones, so that layers run without computing and without being changed.

A fake tensor has a shape, a dtype and a storage with a lifetime, and no memory. Layers whose parameters are fake
already get new ones too: their gradients and buffers are then nobody else's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import functional_call
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.capture.chain import Tensors
from profiler.model.lazy import fake_mode_of


def mode_of(layers: Sequence[nn.Module]) -> FakeTensorMode:
    """The mode of the fake tensors that some layers hold, or a new one."""
    modes = (mode for layer in layers if (mode := fake_mode_of(layer)) is not None)
    return next(modes, None) or FakeTensorMode(allow_non_fake_inputs=True)


class StandInMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands on fake tensors for real ones, such as targets and constants: the modes around it see one storage."""

    supports_higher_order_operators = True

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.lift_fresh.default:  # a new constant, whose value may be asked for
            args, kwargs = pytree.tree_map(self._faked, (args, kwargs))
        return func(*args, **(kwargs or {}))

    def _faked(self, value: object) -> object:
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
            return value
        return self._mode.from_tensor(value, static_shapes=True)


class StandIns:
    """Fake stand-ins for tensors, the same one for the same tensor; those of parameters have gradients of zeros."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._found: dict[int, tuple[Tensor, Tensor]] = {}  # by identity; the tensor itself is kept alive beside it

    def of(self, tensor: Tensor) -> Tensor:
        """The stand-in of a tensor, a leaf of a new graph."""
        if id(tensor) not in self._found:
            fake = self._mode.from_tensor(tensor, static_shapes=True).detach().requires_grad_(tensor.requires_grad)
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                fake.grad = torch.zeros_like(fake)
            self._found[id(tensor)] = tensor, fake
        return self._found[id(tensor)][1]

    def call(self, layer: nn.Module) -> Callable[..., Tensors]:
        """The layer with stand-ins for its parameters and buffers."""
        held = [
            *layer.named_parameters(remove_duplicate=False),
            *layer.named_buffers(remove_duplicate=False),
        ]
        state = {name: self.of(tensor) for name, tensor in held}
        return lambda *tensors: functional_call(layer, state, tensors, tie_weights=False)
