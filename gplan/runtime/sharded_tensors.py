"""Tensors of which each replica may hold a part (DTensor), treated alike with those that are whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this replica's part of a tensor, with the same memory; a tensor that is whole as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        part: Tensor = tensor.to_local()
        return part


def full_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor with all parts. Collective over the replicas if it is divided."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        full: Tensor = tensor.full_tensor()
        return full


def divided_like(full: Tensor, like: Tensor) -> Tensor:
    """Return a full tensor as `like` is divided, or, if the shapes differ, whole on each of the same replicas."""
    if not isinstance(like, DTensor) or isinstance(full, DTensor):
        return full
    placements = like.placements if full.shape == like.shape else [Replicate()]
    return distribute_tensor(full.to(like.device), like.device_mesh, placements, src_data_rank=None)


def with_part(part: Tensor, like: Tensor) -> Tensor:
    """Return the tensor, divided as `like`, of which this replica has `part`."""
    if not isinstance(like, DTensor):
        return part
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def local_gradients(parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    """Return parameters with gradients as plain tensors: this replica's parts, with the same memory."""
    for parameter in parameters:
        if parameter.grad is not None:
            part = local_tensor(parameter).detach()
            part.grad = local_tensor(parameter.grad)
            yield part


def is_divided(tensors: Iterable[Tensor]) -> bool:
    """Whether a replica holds only a part of some tensor."""
    return any(isinstance(x, DTensor) for x in tensors)
