"""The norm of gradients that lie on several ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gplan.errors import UsageError


def gradient_norm(
    parameters: Sequence[nn.Parameter], norm_type: float, *, device: torch.device, group: dist.ProcessGroup | None
) -> Tensor:
    """The norm of the gradients of these parameters and of those that the other ranks of a group give, on all of them.

    Raises UsageError for a norm that is neither positive nor infinite.
    """
    if not norm_type > 0:
        raise UsageError(f"norm_type is {norm_type}; expected a positive number, or float('inf')")
    gradients = [x.grad for x in parameters if x.grad is not None]
    norm = nn.utils.get_total_norm(gradients, norm_type).to(device)
    return norm if group is None else _over_ranks(norm, norm_type, group)


def _over_ranks(norm: Tensor, norm_type: float, group: dist.ProcessGroup) -> Tensor:
    """Ranks may have gradients of other dtypes, or none: float64 travels. A maximum forgets what is not a number."""
    if norm_type != math.inf:
        power = norm.double() ** norm_type
        dist.all_reduce(power, group=group)
        return (power ** (1.0 / norm_type)).to(norm.dtype)
    found = torch.stack([norm.nan_to_num(nan=0.0, posinf=math.inf).double(), norm.isnan().double()])
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    largest = torch.where(found[1] > 0, math.nan, found[0])
    return largest.to(norm.dtype)
