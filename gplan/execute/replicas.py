"""Pipelines side by side: each stage is wrapped in DistributedDataParallel over the ranks that hold it.

torch's pipelining stage reduces gradients in the last backward of a step, as DistributedDataParallel would.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gplan.execute.stage import StageModule


def replicated(stage: StageModule, group: dist.ProcessGroup) -> nn.Module:
    """The stage, its gradients averaged over the ranks of `group`; a stage that trains nothing is left as it is."""
    if not any(x.requires_grad for x in stage.parameters()):
        return stage
    return DistributedDataParallel(_WithUnused(stage), process_group=group, find_unused_parameters=True)


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
