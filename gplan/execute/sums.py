"""Gradients added up over the ranks of a group, whatever form they have on each.

What no rank has a gradient of is left without one, as the plain model would leave it. Gradients that are sparse
wherever they are, as those of nn.Embedding(sparse=True), stay so: indices and values of all ranks together. Where one
rank's is dense the sum is, as where autograd adds up both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor, nn

_BUCKET_BYTES = 25 * 2**20  # that travel together, as DistributedDataParallel's


class _Form(IntEnum):
    """Of a gradient; of the forms that ranks have, the largest is that of the sum."""

    ABSENT = 0
    SPARSE = 1
    DENSE = 2


def add_up(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, *, divisor: int = 1) -> None:
    """Let the ranks of `group`, which call this with the same parameters,
    have the sum of their gradients over `divisor`.

    What some rank has no gradient of counts as zero there.
    """
    if not parameters:
        return
    forms = _forms(parameters, group)
    by_form = {form: [x for x, found in zip(parameters, forms, strict=True) if found == form] for form in _Form}
    for bucket in _buckets(by_form[_Form.DENSE]):
        _add_up_dense(bucket, group, divisor)
    for parameter in by_form[_Form.SPARSE]:
        _add_up_sparse(parameter, group, divisor)


def sum_of(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Two gradients of a parameter as one; `one` may be changed, and `other` where it alone is dense."""
    if one is None or other is None:
        return other if one is None else one
    return other.add_(one) if one.is_sparse and not other.is_sparse else one.add_(other)


def _forms(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> list[int]:
    own = [_Form.ABSENT if x.grad is None else _Form.SPARSE if x.grad.is_sparse else _Form.DENSE for x in parameters]
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
