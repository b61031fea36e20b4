"""Parameters that stages of several ranks hold: each rank has a copy, and every copy gets the sum of the gradients.

Copies begin alike, with the values of the first stage's, even where the processes built their models from other seeds.
Only what a step adds is summed, so gradients can be accumulated over several steps. For all stages of one process a
tied parameter is one object, and autograd adds up by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gplan.execute import sums
from gplan.execute.ranks import Ranks
from gplan.execute.sums import sum_of


class TiedGradients:
    """The parameters of this process that other ranks hold too, with those."""

    def __init__(
        self,
        shared: Mapping[str, tuple[int, ...]],
        tensors: Mapping[str, Tensor],
        ranks: Ranks | None,
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
                groups[devices] = ranks.group_of_devices(devices)
            tensor = tensors.get(name)
            if tensor is None:
                continue
            copy_from(ranks.rank_of(devices[0]), tensor, groups[devices])
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
                parameter.grad = sum_of(parameter.grad, gradient)

    def add_up(self) -> None:
        """Sum the gradients over the ranks that hold a parameter; one that none of them has stays away."""
        for group in dict.fromkeys(group for _, group in self._held):  # in an order that all ranks have
            sums.add_up([parameter for parameter, of in self._held if of is group], group)


def copy_from(rank: int, tensor: Tensor, group: dist.ProcessGroup) -> None:
    """The values of one rank's tensor to the others of a group."""
    values = tensor.detach().contiguous().reshape(-1)
    dist.broadcast(values.view(torch.uint8), src=rank, group=group)  # which every backend can send
    with torch.no_grad():
        tensor.copy_(values.view_as(tensor))
