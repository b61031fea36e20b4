"""Gradients across ranks: averaged over replicas, summed over the copies of tied weights, and their common norm.

Replicas: gradients are averaged after the step's last pass, whatever the schedule, precision and form of gradient. Small
ones are copied into one bucket at a time; large ones are reduced in place. Sharded replicas are in `sharded_replicas`.

Tied weights: each rank that uses one has a copy, copies start with the values of the first stage's, and each gets the
sum of the gradients of one step.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.utils import get_total_norm

from gplan.core.errors import UsageError
from gplan.core.profile import BUCKET_BYTES, LARGE_GRADIENT_BYTES
from gplan.runtime.process_group import RankLayout
from gplan.runtime.sharded_tensors import is_divided, local_tensor
from gplan_profiler.torch_compat import OpOverload, foreach_copy_


class _GradientForm(IntEnum):
    """Form of a gradient; the sum over ranks has the largest form of any rank."""

    ABSENT = 0
    SPARSE = 1
    DENSE = 2


def sum_gradients(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, *, divisor: int = 1) -> None:
    """Replace the gradients of `parameters` by their sum over the ranks of `group`, over `divisor`. Collective.

    A missing gradient counts as zero. If no rank has a gradient, the parameter stays without one. If all that exist
    are sparse, as for nn.Embedding(sparse=True), the sum is sparse; else it is dense.
    """
    if not parameters:
        return
    own = [
        _GradientForm.ABSENT if x.grad is None else _GradientForm.SPARSE if x.grad.is_sparse else _GradientForm.DENSE
        for x in parameters
    ]
    largest = torch.tensor(own, dtype=torch.int32, device=parameters[0].device)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    forms: list[int] = largest.tolist()
    by_form = {form: [x for x, found in zip(parameters, forms, strict=True) if found == form] for form in _GradientForm}
    for message in _messages(map(_dense_gradient, by_form[_GradientForm.DENSE])):
        _sum_dense(message, group, divisor)
    for parameter in by_form[_GradientForm.SPARSE]:
        _sum_sparse(parameter, group, divisor)


def add_gradients(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Add two gradients of a parameter; `one` may be changed, and `other` if only it is dense."""
    if one is None or other is None:
        return other if one is None else one
    return other.add_(one) if one.is_sparse and not other.is_sparse else one.add_(other)


@contextmanager
def set_aside(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Set the gradients of these parameters to None inside the block, and add the earlier ones at its end."""
    before = [(x, x.grad) for x in parameters]
    for parameter, _ in before:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = add_gradients(parameter.grad, gradient)


def take_hooks(parameter: nn.Parameter) -> tuple[dict[int, Any], dict[int, Any]]:
    """Take a parameter's gradient hooks off; return those on gradients, and those after they are accumulated."""
    hooks, sum_hooks = parameter._backward_hooks or {}, parameter._post_accumulate_grad_hooks or {}
    taken = dict(hooks), dict(sum_hooks)
    hooks.clear()  # autograd and the hooks' handles keep this very dict
    sum_hooks.clear()
    return taken


@contextmanager
def hooked_once(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Run the gradient hooks of parameters at the end of the block, for its whole gradient, as a plain backward does.

    Inside, these parameters have neither hooks nor gradients; earlier gradients are added after the hooks have run.
    """
    hooked = [x for x in parameters if x._backward_hooks or x._post_accumulate_grad_hooks]
    earlier, taken = [x.grad for x in hooked], [take_hooks(x) for x in hooked]
    found: Sequence[Tensor | None] = ()
    for x in hooked:
        x.grad = None
    try:
        yield
        found = [x.grad for x in hooked]
    finally:
        for x, before, (hooks, sum_hooks) in zip(hooked, earlier, taken, strict=True):
            x.grad = before
            if x._backward_hooks is not None:
                x._backward_hooks.update(hooks)
            if x._post_accumulate_grad_hooks is not None:
                x._post_accumulate_grad_hooks.update(sum_hooks)
    for x, gradient, before, (hooks, sum_hooks) in zip(hooked, found, earlier, taken, strict=True):
        if gradient is None:
            continue
        with torch.no_grad():
            for hook in hooks.values():
                changed = hook(gradient)
                gradient = gradient if changed is None else changed
            # a hook may keep what it was given, or what it returned
            x.grad = add_gradients(gradient.clone() if hooks else gradient, before)
            for hook in sum_hooks.values():
                hook(x)


def _dense_gradient(parameter: nn.Parameter) -> Tensor:
    """Make the gradient dense, zeros if there is none; return this replica's part."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
    elif parameter.grad.is_sparse:
        parameter.grad = parameter.grad.to_dense()
    return local_tensor(parameter.grad)


def _messages(gradients: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Group gradients into messages, the same on all ranks: large ones alone, by rows; small ones of one dtype together."""
    bucket, num_bytes = list[Tensor](), 0
    for gradient in gradients:
        if gradient.nbytes >= LARGE_GRADIENT_BYTES:
            yield from ([rows] for rows in gradient.chunk(-(-gradient.nbytes // BUCKET_BYTES)))
            continue
        if bucket and (gradient.dtype != bucket[0].dtype or num_bytes + gradient.nbytes > BUCKET_BYTES):
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(gradient)
        num_bytes += gradient.nbytes
    if bucket:
        yield bucket


def _sum_dense(gradients: list[Tensor], group: dist.ProcessGroup, divisor: int) -> None:
    """Reduce gradients in one message: a contiguous one in place, else a copy that is freed at once."""
    if len(gradients) == 1 and gradients[0].is_contiguous():
        dist.all_reduce(gradients[0].div_(divisor), group=group)
        return
    message = gradients[0].new_empty(sum(x.numel() for x in gradients))
    parts = torch.split(message, [x.numel() for x in gradients])
    copies = [part.view_as(x) for part, x in zip(parts, gradients, strict=True)]
    foreach_copy_(copies, gradients)
    dist.all_reduce(message.div_(divisor), group=group)
    foreach_copy_(gradients, copies)
    message.untyped_storage().resize_(0)  # gloo's thread may hold it until after the update


def _sum_sparse(parameter: nn.Parameter, group: dist.ProcessGroup, divisor: int) -> None:
    own = None if parameter.grad is None else parameter.grad.coalesce()
    parts: list[tuple[Tensor, Tensor] | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, None if own is None else (own.indices().cpu(), own.values().cpu()), group=group)
    there = [part for part in parts if part is not None]
    indices, values = torch.cat([x for x, _ in there], dim=1), torch.cat([x for _, x in there]).div_(divisor)
    found = torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=True)
    parameter.grad = found.coalesce().to(parameter.device)


def copied_weights(
    shared: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, Tensor],
    ranks: RankLayout | None,
    *,
    trained: Collection[str],
    divided: Collection[str],
) -> dict[str, Tensor | None]:
    """The trained weights of which several ranks have copies: equal keys on all ranks, None where this rank has no copy.

    `shared`: the stages of every tied name; `divided`: the names of weights of which each replica has a part. Of these the ranks of
    one replica have copies, if they are tied.
    """
    if ranks is None:
        return {}
    tied = {name for name, stages in shared.items() if len(ranks.devices_of(stages)) > 1}
    found: dict[str, Tensor | None] = {}
    for name in sorted(trained if ranks.num_replicas > 1 else tied.intersection(trained)):
        if name not in divided:
            found[name] = tensors.get(name)
        elif name in tied:
            for replica in range(ranks.num_replicas):
                found[f"{name} in replica {replica}"] = tensors.get(name) if replica == ranks.replica else None
    return found


class TiedGradients:
    """The parameters of this process that other ranks use too, with the groups of those ranks."""

    def __init__(
        self,
        shared: Mapping[str, tuple[int, ...]],
        tensors: Mapping[str, Tensor],
        ranks: RankLayout | None,
        *,
        trained: Collection[str],
    ) -> None:
        """`shared`: the stages of every tied name; `tensors`: those of this process. Collective."""
        self._tied: list[tuple[nn.Parameter, dist.ProcessGroup]] = []
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
                self._tied.append((tensor, groups[devices]))

    def accumulated(self) -> AbstractContextManager[None]:
        """Set earlier gradients aside in the block, so `sum_gradients` sums one step only."""
        return set_aside([parameter for parameter, _ in self._tied])

    def sum_gradients(self) -> None:
        """Sum the gradients over the ranks that use a parameter."""
        for group in dict.fromkeys(group for _, group in self._tied):  # in the same order on all ranks
            sum_gradients([parameter for parameter, of in self._tied if of is group], group)


def broadcast_tensor(rank: int, tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Copy the values of one rank's tensor to the other ranks of a group."""
    part = local_tensor(tensor).detach()
    values = part.contiguous().reshape(-1)
    dist.broadcast(values.view(torch.uint8), src=rank, group=group)  # bytes, which every backend can send
    part.copy_(values.view_as(part))


def broadcast_first_replica(tensors: Iterable[Tensor], ranks: RankLayout) -> None:
    """Copy the first replica's tensors to all replicas."""
    if ranks.replicas is not None:
        for tensor in tensors:
            broadcast_tensor(
                ranks.device, tensor, ranks.replicas
            )  # the first replica's ranks are numbered as its devices


def has_sparse_gradients(segments: Iterable[nn.Module]) -> bool:
    """Whether some operation gives a parameter a sparse gradient, as nn.Embedding(sparse=True) does."""
    modules = [module for segment in segments for module in segment.modules()]
    if any(getattr(x, "sparse", False) is True for x in modules):
        return True
    for node in (node for x in modules if isinstance(x, GraphModule) for node in x.graph.nodes):
        if isinstance(node.target, OpOverload):
            arguments = zip(node.target._schema.arguments, node.args, strict=False)
            if node.kwargs.get("sparse") is True or any(x.name == "sparse" and y is True for x, y in arguments):
                return True
    return False


def average_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Average the gradients of some parameters over the ranks of `group`; those equal on all ranks do not change.

    Gradients that are divided over the ranks are averages already.
    """
    whole = [x for x in parameters if x.requires_grad and not is_divided([x])]
    sum_gradients(whole, group, divisor=dist.get_world_size(group))


def gradient_norm(
    gradients: Iterable[Tensor],
    norm_type: float,
    *,
    device: torch.device,
    ranks: RankLayout | None,
) -> Tensor:
    """Return the norm of the gradients that all ranks of the pipeline give, on every rank.

    Raises UsageError for a norm type that is neither positive nor infinite.
    """
    if not norm_type > 0:
        raise UsageError(f"norm_type is {norm_type}; expected a positive number, or float('inf')")
    whole, parts = list[Tensor](), list[Tensor]()
    for gradient in gradients:
        (parts if is_divided([gradient]) else whole).append(local_tensor(gradient))
    if parts and ranks is not None and ranks.replicas is not None:
        whole.append(_reduced_norm(get_total_norm(parts, norm_type).to(device), norm_type, ranks.replicas))
    norm = get_total_norm(whole, norm_type).to(device)
    return norm if ranks is None else _reduced_norm(norm, norm_type, ranks.pipeline)


def _reduced_norm(norm: Tensor, norm_type: float, group: dist.ProcessGroup) -> Tensor:
    """Reduce in float64, as ranks may have gradients of different dtypes. A maximum would drop NaN."""
    if norm_type != math.inf:
        power = norm.double() ** norm_type
        dist.all_reduce(power, group=group)
        return (power ** (1.0 / norm_type)).to(norm.dtype)
    found = torch.stack([norm.nan_to_num(nan=0.0, posinf=math.inf).double(), norm.isnan().double()])
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    largest = torch.where(found[1] > 0, math.nan, found[0])
    return largest.to(norm.dtype)
