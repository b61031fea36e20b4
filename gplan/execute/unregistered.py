"""Tensors that modules hold without having registered them: `self.scale = torch.randn(4)`.

A capture holds on to them as constants. A model that was built without its weights may have drawn others there than the
plain build would: fewer random numbers came before. The values of a real build are then written into them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gplan.execute.captured import has_no_memory

_OWN = frozenset(vars(nn.Module()))  # what every module has: its parameters, buffers, hooks


def copy_unregistered(model: nn.Module, *, into: nn.Module) -> None:
    """Give the unregistered tensors of one build of a model, in place, the values that they have in another."""
    for real, tensor in unregistered_pairs(model, into):
        if not torch.equal(real, tensor):
            tensor.untyped_storage().copy_(real.untyped_storage())  # which can be shorter than an expanded tensor


def unregistered_pairs(one: nn.Module, other: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """The unregistered tensors of two builds, where both have them alike and in memory."""
    modules = dict(other.named_modules())
    for path, module in one.named_modules():
        if path in modules:
            found, others = _unregistered(module), _unregistered(modules[path])
            pairs = ((found[place], others[place]) for place in found.keys() & others.keys())
            yield from ((x, y) for x, y in pairs if _layout(x) == _layout(y))


def _unregistered(module: nn.Module) -> dict[str, Tensor]:
    """The tensors among a module's attributes, also in lists and dicts, by their places."""
    attributes = {name: value for name, value in vars(module).items() if name not in _OWN}
    leaves, _ = pytree.tree_flatten_with_path(attributes)
    found = {pytree.keystr(path): x for path, x in leaves if isinstance(x, Tensor)}
    return {place: x for place, x in found.items() if x.layout == torch.strided and not has_no_memory(x)}


def _layout(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.untyped_storage().nbytes()
