"""On the virtual engine every device updates its tied weights, as separate processes do, though all share one tensor.

The update by a device is taken back where another one follows: that starts from the same values, state and gradient. So
each takes its time, and the weights change as by one update.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class TiedUpdates:
    """Takes back updates of the parameters that several devices hold."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[Sequence[nn.Parameter]]) -> None:
        """`parameters`: those of each device."""
        self._optimizer = optimizer
        later: set[nn.Parameter] = set()
        self._taken_back: list[list[nn.Parameter]] = []
        for own in reversed(parameters):
            self._taken_back.insert(0, [x for x in own if x in later])
            later.update(own)
        self._room: dict[tuple[nn.Parameter, str], Tensor] = {}

    @contextmanager
    def of_device(self, device: int) -> Iterator[None]:
        """Around the update of a device: what a later one updates too is as before afterwards."""
        kept = [(x, x.grad, self._kept(x, x.grad)) for x in self._taken_back[device] if x.grad is not None]
        yield
        for parameter, gradient, (value, gradient_before, state) in kept:
            with torch.no_grad():
                parameter.copy_(value)
            parameter.grad = gradient.copy_(gradient_before)
            self._restore(parameter, state)

    def _kept(self, parameter: nn.Parameter, gradient: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Copies of the value, the gradient, and the optimizer's state."""
        state = {
            name: self._copy(parameter, f"state {name}", x) if isinstance(x, Tensor) else copy.deepcopy(x)
            for name, x in self._optimizer.state.get(parameter, {}).items()
        }
        value = self._copy(parameter, "value", parameter.detach())
        return value, self._copy(parameter, "gradient", gradient), state

    def _restore(self, parameter: nn.Parameter, before: dict[str, Any]) -> None:
        state = self._optimizer.state.get(parameter, {})
        for name in set(state) - set(before):
            del state[name]
        for name, x in before.items():
            now = state.get(name)
            if isinstance(x, Tensor):
                state[name] = now.copy_(x) if isinstance(now, Tensor) and now.shape == x.shape else x.clone()
            else:
                state[name] = x

    def _copy(self, parameter: nn.Parameter, name: str, tensor: Tensor) -> Tensor:
        """A copy in memory that torch's allocator does not count, as no device of a real run has it."""
        if tensor.layout != torch.strided:
            return tensor.clone()
        key = parameter, name
        room = self._room.get(key)
        if room is None or room.shape != tensor.shape or room.dtype != tensor.dtype:
            buffer = bytearray(max(tensor.itemsize, tensor.nbytes))
            self._room[key] = torch.frombuffer(buffer, dtype=tensor.dtype)[: tensor.numel()].view(tensor.shape)
        return self._room[key].copy_(tensor)
