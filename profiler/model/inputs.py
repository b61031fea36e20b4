"""Inputs for a model: described on the command line, resized to another micro-batch, or given the memory they lack."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gplan.core.errors import UsageError
from profiler.model.materialise import real_like


def parse_input_shapes(text: str) -> Any:
    """Random tensors from a description: `8,512:int64`, for several inputs `8,3,32,32;8,10`,
    or by name `ids=8,512:int64`.

    Raises UsageError for a shape or dtype that cannot be read.
    """
    parts = [part.rpartition("=") for part in text.split(";")]
    tensors = tuple(_described_tensor(shape) for _, _, shape in parts)
    names = [name.strip() for name, _, _ in parts]
    if any(names):
        if not all(names):
            raise UsageError(f"--input-shape {text!r} names some inputs and not others; name all of them or none")
        return dict(zip(names, tensors, strict=True))
    return tensors if len(tensors) > 1 else tensors[0]


def describe_inputs(inputs: Any) -> str:
    """The description of a tensor, a tuple or a dict of them, such as `parse_input_shapes` reads; "" for anything else.

    >>> describe_inputs({"ids": torch.zeros(4, 32, dtype=torch.int64), "mask": torch.zeros(4, 32)})
    'ids=4,32:int64;mask=4,32:float32'
    """
    if isinstance(inputs, Tensor) and inputs.dim():
        return f"{','.join(map(str, inputs.shape))}:{str(inputs.dtype).removeprefix('torch.')}"
    if isinstance(inputs, dict):
        texts = [f"{name}={describe_inputs(x)}" for name, x in inputs.items() if isinstance(x, Tensor) and x.dim()]
        return ";".join(texts) if len(texts) == len(inputs) else ""
    if isinstance(inputs, tuple | list) and len(inputs) > 1:
        texts = [describe_inputs(x) for x in inputs if isinstance(x, Tensor)]
        return ";".join(texts) if len(texts) == len(inputs) and all(texts) else ""
    return ""


def resized(inputs: Any, batch_size: int) -> Any:
    """The same inputs with another number of samples: rows repeated or left out."""

    def resize(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        return value[torch.arange(batch_size) % value.shape[0]]

    return pytree.tree_map(resize, inputs)


def with_memory(inputs: Any) -> Any:
    """Inputs that were built together with a model without weights may have none either."""

    def real(value: Any) -> Any:
        is_meta = isinstance(value, Tensor) and value.is_meta
        return real_like([value], seed=0)[0] if is_meta else value

    return pytree.tree_map(real, inputs)


def _described_tensor(text: str) -> Tensor:
    shape, _, kind = text.strip().partition(":")
    dtype = getattr(torch, kind or "float32", None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"--input-shape {text!r}: {kind!r} is not a torch dtype; expected int64, float32 or the like")
    try:
        sizes = tuple(int(size) for size in shape.split(","))
        if min(sizes) < 1:
            raise ValueError
    except ValueError as error:
        raise UsageError(f"--input-shape {text!r}: {shape!r} is not a shape; write it like 8,3,224,224") from error
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(sizes, dtype=dtype)
    return torch.randint(0, 2, sizes, dtype=dtype)
