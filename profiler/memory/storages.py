"""The storages behind tensors: what takes memory, once however many tensors share it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def storage_key(tensor: Tensor) -> int:
    """What names a tensor's storage as long as it lives; tensors without memory, which have no address,
    have one too."""
    return int(tensor.untyped_storage()._cdata)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind some tensors."""
    return sum({storage_key(x): x.untyped_storage().nbytes() for x in tensors}.values())


def optimizer_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the distinct storages of an optimizer's state."""
    return storage_bytes(x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor))
