"""Pipelines side by side: the gradients of a stage are averaged over the ranks that hold it.

Where backwards are whole, each stage is wrapped in DistributedDataParallel: torch's pipelining stage reduces in the
last backward of a step, as DistributedDataParallel would, and of two stages on one rank the later one comes first
everywhere. The second half of a split backward comes in several calls of autograd, which DistributedDataParallel does
not know, and sparse gradients are those of an nn.Embedding to it, not of a stage; there the gradients of a stage are
averaged when the step's last pass is over.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.nn.parallel import DistributedDataParallel

from gplan.core.errors import UsageError
from gplan.runtime.process_group import RankLayout
from gplan.runtime.stage_module import StageModule

# Gradients added up over the ranks of a group, whatever form they have on each.
#
# What no rank has a gradient of is left without one, as the plain model would leave it. Gradients that are sparse
# wherever they are, as those of nn.Embedding(sparse=True), stay so: indices and values of all ranks together. Where one
# rank's is dense the sum is, as where autograd adds up both.


_BUCKET_BYTES = 25 * 2**20  # that travel together, as DistributedDataParallel's


class _GradientForm(IntEnum):
    """Of a gradient; of the forms that ranks have, the largest is that of the sum."""

    ABSENT = 0
    SPARSE = 1
    DENSE = 2


def sum_gradients(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, *, divisor: int = 1) -> None:
    """Let the ranks of `group`, which call this with the same parameters,
    have the sum of their gradients over `divisor`.

    What some rank has no gradient of counts as zero there.
    """
    if not parameters:
        return
    forms = _forms(parameters, group)
    by_form = {form: [x for x, found in zip(parameters, forms, strict=True) if found == form] for form in _GradientForm}
    for bucket in _buckets(by_form[_GradientForm.DENSE]):
        _add_up_dense(bucket, group, divisor)
    for parameter in by_form[_GradientForm.SPARSE]:
        _add_up_sparse(parameter, group, divisor)


def add_gradients(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Two gradients of a parameter as one; `one` may be changed, and `other` where it alone is dense."""
    if one is None or other is None:
        return other if one is None else one
    return other.add_(one) if one.is_sparse and not other.is_sparse else one.add_(other)


def _forms(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> list[int]:
    own = [
        _GradientForm.ABSENT if x.grad is None else _GradientForm.SPARSE if x.grad.is_sparse else _GradientForm.DENSE
        for x in parameters
    ]
    forms = torch.tensor(own, dtype=torch.int32, device=parameters[0].device)
    dist.all_reduce(forms, dist.ReduceOp.MAX, group=group)
    found: list[int] = forms.tolist()
    return found


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


def _add_up_dense(bucket: Sequence[nn.Parameter], group: dist.ProcessGroup, divisor: int) -> None:
    """One message; a gradient that has it to itself is changed in place."""
    rows = [_row(x) for x in bucket]
    message = rows[0] if len(rows) == 1 else torch.cat(rows)
    dist.all_reduce(message.div_(divisor), group=group)
    for parameter, total in zip(bucket, torch.split(message, [x.numel() for x in bucket]), strict=True):
        if parameter.grad is None or parameter.grad.is_sparse:
            parameter.grad = total.view_as(parameter).clone()
        else:
            parameter.grad.copy_(total.view_as(parameter.grad))


def _row(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        return parameter.new_zeros(parameter.numel())
    return (parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad).reshape(-1)


def _add_up_sparse(parameter: nn.Parameter, group: dist.ProcessGroup, divisor: int) -> None:
    own = None if parameter.grad is None else parameter.grad.coalesce()
    parts: list[tuple[Tensor, Tensor] | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, None if own is None else (own.indices().cpu(), own.values().cpu()), group=group)
    there = [part for part in parts if part is not None]
    indices, values = torch.cat([x for x, _ in there], dim=1), torch.cat([x for _, x in there]).div_(divisor)
    found = torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=True)
    parameter.grad = found.coalesce().to(parameter.device)


# Parameters that stages of several ranks hold: each rank has a copy, and every copy gets the sum of the gradients.
#
# Copies begin alike, with the values of the first stage's, even where the processes built their models from other seeds.
# Only what a step adds is summed, so gradients can be accumulated over several steps. For all stages of one process a
# tied parameter is one object, and autograd adds up by itself.


class TiedGradients:
    """The parameters of this process that other ranks hold too, with those."""

    def __init__(
        self,
        shared: Mapping[str, tuple[int, ...]],
        tensors: Mapping[str, Tensor],
        ranks: RankLayout | None,
        *,
        trained: Collection[str],
    ) -> None:
        """`shared`: the stages of every tied name; `tensors`: what this process holds. All ranks must call this."""
        self._held: list[tuple[nn.Parameter, dist.ProcessGroup]] = []
        groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for name, stages in shared.items() if ranks is not None else ():
            assert ranks is not None
            devices = ranks.devices_of(stages)
            if len(devices) == 1:
                continue
            if devices not in groups:
                groups[devices] = ranks.new_group(devices)
            tensor = tensors.get(name)
            if tensor is None:
                continue
            broadcast_tensor(ranks.rank_of(devices[0]), tensor, groups[devices])
            if name in trained and isinstance(tensor, nn.Parameter):
                self._held.append((tensor, groups[devices]))

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Gradients of before are kept aside; what comes inside the block is summed by `add_up`,
        then these are added."""
        before = [parameter.grad for parameter, _ in self._held]
        for parameter, _ in self._held:
            parameter.grad = None
        try:
            yield
        finally:
            for (parameter, _), gradient in zip(self._held, before, strict=True):
                parameter.grad = add_gradients(parameter.grad, gradient)

    def sum_gradients(self) -> None:
        """Sum the gradients over the ranks that hold a parameter; one that none of them has stays away."""
        for group in dict.fromkeys(group for _, group in self._held):  # in an order that all ranks have
            sum_gradients([parameter for parameter, of in self._held if of is group], group)


def broadcast_tensor(rank: int, tensor: Tensor, group: dist.ProcessGroup) -> None:
    """The values of one rank's tensor to the others of a group."""
    values = tensor.detach().contiguous().reshape(-1)
    dist.broadcast(values.view(torch.uint8), src=rank, group=group)  # which every backend can send
    with torch.no_grad():
        tensor.copy_(values.view_as(tensor))


def wrap_for_replicas(stage: StageModule, group: dist.ProcessGroup) -> nn.Module:
    """The stage, its gradients averaged over the ranks of `group`; a stage that trains nothing is left as it is.

    Its values are the same on all of them already.
    """
    if not any(x.requires_grad for x in stage.parameters()):
        return stage
    return DistributedDataParallel(
        _ReplicatedStage(stage), process_group=group, find_unused_parameters=True, init_sync=False
    )


def broadcast_first_replica(tensors: Iterable[Tensor], ranks: RankLayout) -> None:
    """Give all replicas the tensors of the first one, where their processes drew or wrote others."""
    if ranks.replicas is not None:
        for tensor in tensors:
            broadcast_tensor(
                ranks.device, tensor, ranks.replicas
            )  # the first replica's ranks are numbered as its devices


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
    sum_gradients(list(parameters), group, divisor=dist.get_world_size(group))


def _is_sparse(node: Node) -> bool:
    """An operation that is asked for sparse gradients, by the name of its argument."""
    if not isinstance(node.target, OpOverload):
        return False
    arguments = zip(node.target._schema.arguments, node.args, strict=False)
    return node.kwargs.get("sparse") is True or any(x.name == "sparse" and value is True for x, value in arguments)


def reduction_root(module: nn.Module) -> Tensor | None:
    """What a backward that is to reduce must also start from, or None for a module that is not one of `replicated`.

    DistributedDataParallel reduces when a backward comes to a parameter. Where what a loss uses leads to none of the
    stage's, the gradients of earlier micro-batches would stay one's own, and the other replicas would wait.
    """
    stage = module.module if isinstance(module, DistributedDataParallel) else None
    return stage.reached.sum() * 0.0 if isinstance(stage, _ReplicatedStage) else None


class _ReplicatedStage(nn.Module):
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


# The norm of gradients that lie on several ranks.


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
