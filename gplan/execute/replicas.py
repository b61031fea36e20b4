"""Pipelines side by side: the gradients of a stage are averaged over the ranks that hold it.

Where backwards are whole, each stage is wrapped in DistributedDataParallel: torch's pipelining stage reduces in the last
backward of a step, as DistributedDataParallel would, and of two stages on one rank the later one comes first everywhere.
The second half of a split backward comes in several calls of autograd, which DistributedDataParallel does not know; there
the gradients of all stages of a rank are averaged when the step's last pass is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gplan.execute.stage import StageModule

_BUCKET_BYTES = 25 * 2**20  # that travel together, as DistributedDataParallel's


def replicated(stage: StageModule, group: dist.ProcessGroup) -> nn.Module:
    """The stage, its gradients averaged over the ranks of `group`; a stage that trains nothing is left as it is."""
    if not any(x.requires_grad for x in stage.parameters()):
        return stage
    return DistributedDataParallel(_WithUnused(stage), process_group=group, find_unused_parameters=True)


def average_gradients(stages: Iterable[nn.Module], group: dist.ProcessGroup) -> None:
    """Let the ranks of `group`, each of which calls this with the same stages, have the mean of their gradients.

    What some rank has no gradient of counts as zero there; what none has a gradient of is left without. What was the
    same everywhere before the step, as gradients of earlier steps are, stays.
    """
    parameters = dict.fromkeys(x for stage in stages for x in stage.parameters() if x.requires_grad)
    for bucket in _buckets(parameters):
        _average(bucket, group)


def _buckets(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Runs of parameters of one type, of up to the bytes of a bucket unless one alone has more."""
    bucket: list[nn.Parameter] = []
    num_bytes = 0
    for parameter in parameters:
        if bucket and (parameter.dtype != bucket[0].dtype or num_bytes + parameter.nbytes > _BUCKET_BYTES):
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(parameter)
        num_bytes += parameter.nbytes
    if bucket:
        yield bucket


def _average(bucket: list[nn.Parameter], group: dist.ProcessGroup) -> None:
    """One message: all gradients, and for each whether it is there."""
    gradients = [x.grad for x in bucket]
    rows = [_flat(parameter, gradient) for parameter, gradient in zip(bucket, gradients, strict=True)]
    is_there = rows[0].new_tensor([gradient is not None for gradient in gradients])
    message = torch.cat([*rows, is_there]).div_(dist.get_world_size(group))
    dist.all_reduce(message, group=group)
    *means, is_anywhere = torch.split(message, [*(x.numel() for x in bucket), len(bucket)])
    for parameter, gradient, mean, share in zip(bucket, gradients, means, is_anywhere, strict=True):
        if gradient is not None:
            gradient.copy_(mean.view_as(gradient))
        elif share > 0:
            parameter.grad = mean.view_as(parameter).clone()


def _flat(parameter: nn.Parameter, gradient: Tensor | None) -> Tensor:
    return parameter.new_zeros(parameter.numel()) if gradient is None else gradient.reshape(-1)


class _WithUnused(nn.Module):
    """A stage and a parameter that nothing uses.

    A loss need not use all that a stage computes, so unused parameters must be looked for; torch warns where it then
    finds none.
    """

    def __init__(self, stage: StageModule) -> None:
        super().__init__()
        self.stage = stage
        self.unused = nn.Parameter(torch.zeros(1, device=next(stage.parameters()).device))

    def forward(self, *tensors: Tensor) -> Any:
        return self.stage(*tensors)
