"""Values for weights that have none yet: as their module would draw them, else plausible ones.

A module's own reset method knows best. Without one a norm's weight is one, a bias is zero, and all else is drawn from a
normal distribution: finite, never what memory happened to hold, and never so small that arithmetic slows down.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, nn

_RESETS = ("reset_running_stats", "reset_parameters", "_reset_parameters")
_DEVIATION = 0.02  # of weights whose module has no rule of its own; what transformers are commonly drawn from


@torch.no_grad()
def fill(owner: nn.Module | None, tensors: Mapping[str, Tensor]) -> None:
    """Give values to `tensors`, which are zero: parameters and buffers of `owner` by their names in it."""
    if owner is not None:
        reset_alone(owner, tensors)
    for name, tensor in tensors.items():
        if not tensor._version or not _is_finite(tensor):
            _fill_by_name(name, tensor)


def reset_alone(owner: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Let the module's own reset methods write into `tensors`, by their names in it; all else in it stays as it is.

    The methods run on a copy that has no other tensor with memory. One that fails leaves its work half done.
    """
    hollow = _hollow(owner)
    for name, tensor in tensors.items():
        if name in hollow._parameters:
            hollow._parameters[name] = tensor  # type: ignore[assignment]
        else:
            hollow._buffers[name] = tensor
    for reset in _RESETS:
        method = getattr(hollow, reset, None)
        if not callable(method):
            continue
        try:
            with torch.no_grad(), warnings.catch_warnings(action="ignore"):
                method()
        except Exception:  # it may want arguments, or values that are not there
            continue


def _hollow(module: nn.Module) -> nn.Module:
    """A copy, children included, whose tensors are on the meta device."""
    hollow = object.__new__(type(module))  # copy.copy fails on parametrized modules
    vars(hollow).update(vars(module))
    parameters = {
        name: None if x is None else nn.Parameter(on_meta(x), x.requires_grad) for name, x in module._parameters.items()
    }
    buffers = {name: None if x is None else on_meta(x) for name, x in module._buffers.items()}
    children = {name: None if x is None else _hollow(x) for name, x in module._modules.items()}
    vars(hollow).update(_parameters=parameters, _buffers=buffers, _modules=children)
    return hollow


def on_meta(tensor: Tensor) -> Tensor:
    """A tensor without memory of the same shape, strides and dtype."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _fill_by_name(name: str, tensor: Tensor) -> None:
    if "bias" in name or not (tensor.is_floating_point() or tensor.is_complex()):
        tensor.zero_()
    elif tensor.dim() == 1 and name == "weight":
        tensor.fill_(1.0)
    elif tensor.is_floating_point() and tensor.itemsize == 1:  # nothing is drawn in 8 bits
        tensor.copy_(torch.randn(tensor.shape, device=tensor.device) * _DEVIATION)
    else:
        tensor.normal_(0.0, _DEVIATION)


def _is_finite(tensor: Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.itemsize == 1:
        return True
    return bool(torch.isfinite(tensor).all())
