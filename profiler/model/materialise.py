"""One layer's weights made real for as long as it is measured, and the tensors that go into it.

A layer of a model that has no weights in memory (see profiler/model/lazy.py) gets real ones inside `materialised`, with
the values that the author's modules would give them, and is fake again afterwards: only the weights of what is measured
take memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from profiler.capture.chain import Tensors, TensorSpec
from profiler.model.initial import fill, on_meta


@contextmanager
def materialised(layers: nn.Module, *, model: nn.Module, seed: int, device: str = "cpu") -> Iterator[nn.Module]:
    """Within it every fake or meta parameter and buffer of `layers` is real, with memory on `device`.

    `layers` are one or several layers of a chain, whose state has the names it has in `model`; the module that a name
    belongs to there says which values it starts with. Shapes, strides, dtypes and ties are kept; what is real stays
    untouched. The random state is left as it was. Yields `layers`.
    """
    with _seeded(seed, device):
        real = _real_state(layers, model, device)
    swapped: list[tuple[dict[str, Tensor | None], str, Tensor]] = []
    try:
        for held, name, tensor in _entries(layers):
            if id(tensor) in real:
                swapped.append((held, name, tensor))
                held[name] = real[id(tensor)]
        real.clear()
        yield layers
    finally:
        for held, name, tensor in swapped:
            held[name] = tensor


def real_like(values: Iterable[TensorSpec | Tensor], *, seed: int, device: str = "cpu") -> Tensors:
    """Real tensors of the shapes, dtypes and need of a gradient of `values`.

    Floats are normal, integers 0 or 1 (fit for any table of two rows), booleans either; the random state is left as it
    was.
    """
    with _seeded(seed, device):
        return tuple(_drawn(value, device) for value in values)


def _drawn(value: TensorSpec | Tensor, device: str) -> Tensor:
    if not (value.dtype.is_floating_point or value.dtype.is_complex):
        return torch.randint(0, 2, value.shape, device=device).to(value.dtype)
    drawn_dtype = torch.float32 if value.dtype.itemsize == 1 else value.dtype  # nothing is drawn in 8 bits
    drawn = torch.randn(value.shape, dtype=drawn_dtype, device=device).to(value.dtype)
    return drawn.requires_grad_(value.requires_grad)


def _real_state(layers: nn.Module, model: nn.Module, device: str) -> dict[int, Tensor]:
    """For the id of every tensor without memory one with memory and values; a tied one comes once."""
    owners: dict[str, dict[str, Tensor]] = {}
    real: dict[int, Tensor] = {}
    for path, module in layers.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and _has_no_memory(tensor) and id(tensor) not in real:
                real[id(tensor)] = _zeros_like(tensor, device)
                owners.setdefault(path, {})[name] = real[id(tensor)]
    modules = dict(model.named_modules(remove_duplicate=False))
    for path, tensors in owners.items():
        fill(modules.get(path), tensors)
    return real


def _entries(layers: nn.Module) -> list[tuple[dict[str, Tensor | None], str, Tensor]]:
    """Where each parameter and buffer is held: the dict, the name in it, the tensor."""
    held = [x for module in layers.modules() for x in (module._parameters, module._buffers)]
    return [(x, name, tensor) for x in held for name, tensor in x.items() if tensor is not None]  # type: ignore[misc]


def _has_no_memory(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor) or tensor.is_meta


def _zeros_like(tensor: Tensor, device: str) -> Tensor:
    zeros = torch.zeros_like(on_meta(tensor), device=device)
    return nn.Parameter(zeros, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else zeros


@contextmanager
def _seeded(seed: int, device: str) -> Iterator[None]:
    """Within it torch draws from `seed`; afterwards it draws what it would have drawn."""
    devices = [torch.device(device)] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
