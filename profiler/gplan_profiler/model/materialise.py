"""Give a layer of a model without weights real weights while it is measured, and create inputs for it.

A norm's weight is 1, a bias is 0, and all else is normal: finite, never uninitialised memory, and never so small that
arithmetic slows down (denormals).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from gplan_profiler.capture.chain import Tensors, TensorSpec
from gplan_profiler.memory.allocations import gradient_bytes
from gplan_profiler.torch_compat import FakeTensor, FakeTensorMode, reparametrize_module

_DEVIATION = 0.02  # common for transformers


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
def materialised(layers: nn.Module, *, seed: int, device: str = "cpu") -> Iterator[nn.Module]:
    """Inside, every fake or meta parameter and buffer of `layers` is real, with memory on `device`; yields `layers`.

    Shapes, strides, dtypes and ties are kept, as are real tensors and the random state.
    """
    real: dict[int, Tensor] = {}
    tensors = (*layers.named_parameters(remove_duplicate=False), *layers.named_buffers(remove_duplicate=False))
    with _seeded(seed, device):
        for name, tensor in tensors:
            if is_meta_or_fake(tensor) and id(tensor) not in real:
                real[id(tensor)] = _filled(name.rpartition(".")[2], tensor, device)
    swapped = {name: real[id(tensor)] for name, tensor in tensors if id(tensor) in real}
    real.clear()
    with reparametrize_module(layers, swapped):
        yield layers


@torch.no_grad()
def _filled(name: str, like: Tensor, device: str) -> Tensor:
    """A real tensor in place of the fake parameter or buffer `name` of a module."""
    made = torch.zeros_like(on_meta(like), device=device)
    if "bias" not in name and (like.is_floating_point() or like.is_complex()):
        if like.dim() == 1 and name == "weight":
            made.fill_(1.0)
        elif like.itemsize == 1:  # nothing is drawn in 8 bits
            made.copy_(torch.randn(like.shape, device=device) * _DEVIATION)
        else:
            made.normal_(0.0, _DEVIATION)
    return parameter_as(made, like) if isinstance(like, nn.Parameter) else made


def real_like(values: Iterable[TensorSpec | Tensor], *, seed: int, device: str = "cpu") -> Tensors:
    """Random tensors with the shapes, strides, dtypes and requires_grad of `values`; the random state is left unchanged.

    Floats are normal; integers are 0 or 1, valid indices of any table with two rows.
    """
    with _seeded(seed, device):
        specs = [x if isinstance(x, TensorSpec) else TensorSpec.of(x) for x in values]
        return tuple(spec.laid_out(_drawn(spec, device)) for spec in specs)


def _drawn(value: TensorSpec, device: str) -> Tensor:
    if not (value.dtype.is_floating_point or value.dtype.is_complex):
        return torch.randint(0, 2, value.shape, device=device).to(value.dtype)
    drawn_dtype = torch.float32 if value.dtype.itemsize == 1 else value.dtype  # nothing is drawn in 8 bits
    drawn = torch.randn(value.shape, dtype=drawn_dtype, device=device).to(value.dtype)
    return drawn.requires_grad_(value.requires_grad)


def is_meta_or_fake(tensor: Tensor | None) -> bool:
    """Whether a tensor has no memory: a fake tensor or one on the meta device."""
    return isinstance(tensor, FakeTensor) or (tensor is not None and tensor.is_meta)


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


def alike(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The parameters by what an update of them takes: shape, dtypes, and the attributes that their author gave them."""
    found = dict[object, list[nn.Parameter]]()
    for x in parameters:
        marks = sorted(attributes(x).items())
        plain = str([(name, y if isinstance(y, bool | int | float | str | None) else type(y)) for name, y in marks])
        found.setdefault((x.shape, x.dtype, gradient_bytes(x), plain), []).append(x)
    return list(found.values())


@contextmanager
def _seeded(seed: int, device: str) -> Iterator[None]:
    """Inside, torch draws from `seed`; the random state is restored at the end."""
    devices = [torch.device(device)] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
