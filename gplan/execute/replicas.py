"""Pipelines side by side: the gradients of a stage are averaged over the ranks that hold it.

Where backwards are whole, each stage is wrapped in DistributedDataParallel: torch's pipelining stage reduces in the
last backward of a step, as DistributedDataParallel would, and of two stages on one rank the later one comes first
everywhere. The second half of a split backward comes in several calls of autograd, which DistributedDataParallel does
not know, and sparse gradients are those of an nn.Embedding to it, not of a stage; there the gradients of a stage are
averaged when the step's last pass is over.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.nn.parallel import DistributedDataParallel

from gplan.execute.ranks import Ranks
from gplan.execute.stage import StageModule
from gplan.execute.sums import add_up
from gplan.execute.tied import copy_from


def replicated(stage: StageModule, group: dist.ProcessGroup) -> nn.Module:
    """The stage, its gradients averaged over the ranks of `group`; a stage that trains nothing is left as it is.

    Its values are the same on all of them already.
    """
    if not any(x.requires_grad for x in stage.parameters()):
        return stage
    return DistributedDataParallel(_WithMarks(stage), process_group=group, find_unused_parameters=True, init_sync=False)


def follow_first_replica(tensors: Iterable[Tensor], ranks: Ranks) -> None:
    """Give all replicas the tensors of the first one, where their processes drew or wrote others."""
    if ranks.replicas is not None:
        for tensor in tensors:
            copy_from(ranks.device, tensor, ranks.replicas)  # the first replica's ranks are numbered as its devices


def has_sparse_gradients(pieces: Iterable[nn.Module]) -> bool:
    """Whether some operation gives a parameter a sparse gradient, as nn.Embedding(sparse=True) does."""
    modules = [module for piece in pieces for module in piece.modules()]
    nodes = [node for x in modules if isinstance(x, GraphModule) for node in x.graph.nodes]
    return any(getattr(x, "sparse", False) is True for x in modules) or any(map(_is_sparse, nodes))


def average_gradients(stages: Iterable[nn.Module], group: dist.ProcessGroup) -> None:
    """Let the ranks of `group`, each of which calls this with the same stages, have the mean of their gradients.

    What was the same everywhere before the step, as gradients of earlier steps are, stays.
    """
    parameters = dict.fromkeys(x for stage in stages for x in stage.parameters() if x.requires_grad)
    add_up(list(parameters), group, divisor=dist.get_world_size(group))


def _is_sparse(node: Node) -> bool:
    """An operation that is asked for sparse gradients, by the name of its argument."""
    if not isinstance(node.target, OpOverload):
        return False
    arguments = zip(node.target._schema.arguments, node.args, strict=False)
    return node.kwargs.get("sparse") is True or any(x.name == "sparse" and value is True for x, value in arguments)


def root_of_reduction(module: nn.Module) -> Tensor | None:
    """What a backward that is to reduce must also start from, or None for a module that is not one of `replicated`.

    DistributedDataParallel reduces when a backward comes to a parameter. Where what a loss uses leads to none of the
    stage's, the gradients of earlier micro-batches would stay one's own, and the other replicas would wait.
    """
    stage = module.module if isinstance(module, DistributedDataParallel) else None
    return stage.reached.sum() * 0.0 if isinstance(stage, _WithMarks) else None


class _WithMarks(nn.Module):
    """A stage, a parameter that nothing uses, and one that every backward that reduces comes to.

    A loss need not use all that a stage computes, so unused parameters must be looked for; torch warns where it then
    finds none.
    """

    def __init__(self, stage: StageModule) -> None:
        super().__init__()
        self.stage = stage
        device = next(stage.parameters()).device
        self.unused, self.reached = (nn.Parameter(torch.zeros(1, device=device)) for _ in range(2))

    def forward(self, *tensors: Tensor) -> Any:
        return self.stage(*tensors)
