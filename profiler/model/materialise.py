"""Give a layer of a model without weights real weights while it is measured, and create inputs for it.

The weights get values from the module's own reset method. Without one, a norm's weight is 1, a bias is 0, and all else
is normal: finite, never uninitialised memory, and never so small that arithmetic slows down (denormals).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.utils.stateless import _reparametrize_module

from profiler.capture.chain import Tensors, TensorSpec

_RESETS = ("reset_running_stats", "reset_parameters", "_reset_parameters")
_DEVIATION = 0.02  # of weights without a reset method; common for transformers


@torch.no_grad()
def fill(owner: nn.Module | None, tensors: Mapping[str, Tensor]) -> None:
    """Initialise `tensors`, which are zero: parameters and buffers of `owner`, by name."""
    if owner is not None:
        reset_into(owner, tensors)
    for name, tensor in tensors.items():
        is_float = tensor.is_floating_point() or tensor.is_complex()
        is_8_bit = is_float and tensor.itemsize == 1  # nothing is drawn or checked in 8 bits
        if tensor._version and (not is_float or is_8_bit or bool(torch.isfinite(tensor).all())):
            continue
        if "bias" in name or not is_float:
            tensor.zero_()
        elif tensor.dim() == 1 and name == "weight":
            tensor.fill_(1.0)
        elif is_8_bit:
            tensor.copy_(torch.randn(tensor.shape, device=tensor.device) * _DEVIATION)
        else:
            tensor.normal_(0.0, _DEVIATION)


def reset_into(owner: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Run the module's reset methods so that they write into `tensors`, by name, and into nothing else.

    The methods run on a copy whose other tensors are on the meta device. Errors are ignored.
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
        except Exception:  # it may need arguments or values
            continue


def _hollow(module: nn.Module) -> nn.Module:
    """A copy of a module and its children with tensors on the meta device."""
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


def parameter_as(tensor: Tensor, like: nn.Parameter) -> nn.Parameter:
    """A parameter of a tensor, with the attributes and hooks of another parameter."""
    made = with_attributes(nn.Parameter(tensor, requires_grad=like.requires_grad), like)
    if like.grad_dtype != like.dtype:
        made.grad_dtype = like.grad_dtype
    return made


@contextmanager
def materialised(layers: nn.Module, *, model: nn.Module, seed: int, device: str = "cpu") -> Iterator[nn.Module]:
    """Inside, every fake or meta parameter and buffer of `layers` is real, with memory on `device`; yields `layers`.

    The state of `layers`, a stage of a chain, has the names that it has in `model`, whose modules initialise it. Shapes,
    strides, dtypes and ties are kept, as are real tensors and the random state.
    """
    with _seeded(seed, device):
        real = _real_state(layers, model, device)
    tensors = (*layers.named_parameters(remove_duplicate=False), *layers.named_buffers(remove_duplicate=False))
    swapped = {name: real[id(tensor)] for name, tensor in tensors if id(tensor) in real}
    real.clear()
    with _reparametrize_module(layers, swapped):
        yield layers


def real_like(values: Iterable[TensorSpec | Tensor], *, seed: int, device: str = "cpu") -> Tensors:
    """Random tensors with the shapes, dtypes and requires_grad of `values`; the random state is left unchanged.

    Floats are normal; integers are 0 or 1, valid indices of any table with two rows.
    """
    with _seeded(seed, device):
        return tuple(_drawn(value, device) for value in values)


def _drawn(value: TensorSpec | Tensor, device: str) -> Tensor:
    if not (value.dtype.is_floating_point or value.dtype.is_complex):
        return torch.randint(0, 2, value.shape, device=device).to(value.dtype)
    drawn_dtype = torch.float32 if value.dtype.itemsize == 1 else value.dtype  # nothing is drawn in 8 bits
    drawn = torch.randn(value.shape, dtype=drawn_dtype, device=device).to(value.dtype)
    return drawn.requires_grad_(value.requires_grad)


def is_meta_or_fake(tensor: Tensor | None) -> bool:
    """Whether a tensor has no memory: a fake tensor or one on the meta device."""
    return isinstance(tensor, FakeTensor) or (tensor is not None and tensor.is_meta)


def _real_state(layers: nn.Module, model: nn.Module, device: str) -> dict[int, Tensor]:
    """A real tensor for the id of every tensor without memory; tied ones once."""
    owners: dict[str, dict[str, Tensor]] = {}
    real: dict[int, Tensor] = {}
    for path, module in layers.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and is_meta_or_fake(tensor) and id(tensor) not in real:
                real[id(tensor)] = _zeros_like(tensor, device)
                owners.setdefault(path, {})[name] = real[id(tensor)]
    modules = dict(model.named_modules(remove_duplicate=False))
    for path, tensors in owners.items():
        fill(modules.get(path), tensors)
    return real


def _zeros_like(tensor: Tensor, device: str) -> Tensor:
    zeros = torch.zeros_like(on_meta(tensor), device=device)
    if not isinstance(tensor, nn.Parameter):
        return zeros
    made = nn.Parameter(zeros, requires_grad=tensor.requires_grad)
    made.grad_dtype = tensor.grad_dtype
    return with_attributes(made, tensor)


def with_attributes(made: nn.Parameter, like: Tensor) -> nn.Parameter:
    """Give a parameter what the author put on another one: attributes, by which optimizers choose, and gradient hooks."""
    vars(made).update(attributes(like))
    for hook in (like._backward_hooks or {}).values():
        made.register_hook(hook)  # type: ignore[no-untyped-call]
    for hook in (like._post_accumulate_grad_hooks or {}).values():
        made.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return made


def attributes(parameter: Tensor) -> dict[str, Any]:
    """The attributes that an author gave a parameter, without those that torch sets."""
    return {name: x for name, x in vars(parameter).items() if name not in _attributes_of_torch()}


@cache
def _attributes_of_torch() -> frozenset[str]:
    return frozenset({"_fsdp_orig_uid", *vars(nn.Parameter(FakeTensorMode().from_tensor(torch.empty(1))))})


def attributes_key(parameter: Tensor) -> str:
    """The attributes of a parameter as text, equal for parameters that the author marked alike."""
    return str(
        [
            (x, y if isinstance(y, bool | int | float | str | None) else type(y))
            for x, y in sorted(attributes(parameter).items())
        ]
    )


@contextmanager
def _seeded(seed: int, device: str) -> Iterator[None]:
    """Inside, torch draws from `seed`; the random state is restored at the end."""
    devices = [torch.device(device)] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
