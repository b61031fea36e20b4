"""The virtual engine: one process runs every action of the schedule in dependency order and times each.

The K devices exist only on the clock: measured durations are laid out by the simulator's rules with the plan's
links. Gradients and action times are real. Receive buffers and what was sent come and go as in the torch engine. What
crosses to another device is copied into the buffers outside the measured actions: that time is the link's.
Between stages of one device the tensor itself is passed on. Each device has its own gradient of a tied weight, as every
rank has, and updates the weight itself, which is one tensor.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from gplan.core import Action, ActionKind, Schedule
from gplan.runtime.device_steps import Await, Free, Receive, Send, Step, device_steps
from gplan.runtime.gradient_sync import add_gradients, set_aside
from gplan.runtime.pass_state import Engine, EnginePass, Gradients, PassState
from gplan.runtime.stage_module import StageModule
from gplan.simulation.simulator import dependency_order
from gplan_profiler.capture.chain import Tensors
from gplan_profiler.memory.allocations import now_ns


class VirtualEngine(Engine["_CopiedPass"]):
    """Runs all stages of a plan in this process."""

    def __init__(self, stages: Sequence[StageModule], *, device: torch.device) -> None:
        super().__init__(stages, device=device)
        self.action_starts_ns: list[tuple[int, int]] = []  # (time_ns, device) of the current step
        self._tied = DeviceGradients()

    def run(self, work: EnginePass) -> list[Tensor]:
        """Run one pass; return the losses of its micro-batches."""
        state = self._begun(work, lambda: _CopiedPass(work, self._device))
        users: dict[nn.Parameter, set[int]] = {}
        for stage in self._stages.values() if work.trains else ():
            for parameter in stage.parameters():
                users.setdefault(parameter, set()).add(work.schedule.devices[stage.index])
        tied = [x for x, found in users.items() if len(found) > 1 and x.requires_grad]
        with self._tied.apart(tied):
            for device, step in state.steps:
                self.action_starts_ns.append((now_ns(), device))
                if isinstance(step, Action):
                    self._tied.enter(device)
                    self._run_action(step, state)
                else:
                    state.transfer(step)
        return state.end()


class DeviceGradients:
    """A gradient of its own for each device that uses a tied weight; their sum is the weight's gradient after the pass.

    The devices' own gradients are kept until the next pass, as each rank keeps its own until its update.
    """

    def __init__(self) -> None:
        self._parameters: Sequence[nn.Parameter] = ()
        self._by_device: dict[int, list[Tensor | None]] = {}
        self._device: int | None = None

    @contextmanager
    def apart(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Inside, `enter` changes devices; at the end gradients are summed, with those of earlier passes."""
        self._parameters, self._by_device, self._device = parameters, {}, None
        with set_aside(parameters):
            try:
                yield
            finally:
                self._leave()
                for place, parameter in enumerate(parameters):
                    parameter.grad = reduce(add_gradients, (own[place] for own in self._by_device.values()), None)

    def enter(self, device: int) -> None:
        """The following backwards are this device's."""
        if self._parameters and device != self._device:
            self._leave()
            self._device = device
            self._set(self._by_device.get(device, [None] * len(self._parameters)))

    def _leave(self) -> None:
        if self._device is not None:
            self._by_device[self._device] = [x.grad for x in self._parameters]

    def _set(self, gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient


class TiedUpdates:
    """Every device updates its tied weights, as separate processes do, though all share one tensor.

    The update by a device is taken back where another one follows: that starts from the same values, state and gradient.
    So each takes its time, and the weights change as by one update.
    """

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
            now = self._optimizer.state.get(parameter, {})
            for name in set(now) - set(state):
                del now[name]
            for name, x in state.items():
                made = now.get(name)
                is_alike = isinstance(x, Tensor) and isinstance(made, Tensor) and made.shape == x.shape
                now[name] = made.copy_(x) if is_alike else x.clone() if isinstance(x, Tensor) else x

    def _kept(self, parameter: nn.Parameter, gradient: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Copies of the value, the gradient, and the optimizer's state."""
        state = {
            name: self._copy(parameter, f"state {name}", x) if isinstance(x, Tensor) else copy.deepcopy(x)
            for name, x in self._optimizer.state.get(parameter, {}).items()
        }
        value = self._copy(parameter, "value", parameter.detach())
        return value, self._copy(parameter, "gradient", gradient), state

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


class _CopiedPass(PassState):
    """A pass whose tensors are copied from device to device, outside the recorded actions."""

    def __init__(self, work: EnginePass, device: torch.device) -> None:
        super().__init__(work, device)
        self.steps = _in_one_order(work.schedule)
        self._buffers: dict[Action, Tensors] = {}  # of posted receives, until something is copied into them
        self._sent: dict[Action, Gradients] = {}
        self._is_there: set[Action] = set()
        self._missing: dict[tuple[int, int], tuple[bool, ...]] = {}  # by stage and micro-batch that receive gradients

    def forget(self) -> None:
        super().forget()
        for kept in (self._buffers, self._sent, self._is_there, self._missing):
            kept.clear()

    def transfer(self, step: Send | Receive | Await | Free) -> None:
        """Do one step between two actions."""
        made = step.made
        if isinstance(step, Send):
            is_forward, output = made.kind is ActionKind.FORWARD, self.take_sent(made)
            if not is_forward:
                self._missing[made.receiver, made.microbatch] = tuple(x is None for x in output)
            specs = self.boundary(made.stage + 1 if is_forward else made.stage)
            self._sent[made] = tuple(  # for a missing gradient the torch engine sends a marker of its size
                torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
                if x is None and spec.requires_grad
                else x
                for x, spec in zip(output, specs, strict=True)
            )
        elif isinstance(step, Receive):
            self._buffers[made] = self.allocate(made)
        elif isinstance(step, Free):
            if made in self._is_there:  # without backwards the torch engine may wait for that
                del self._sent[made]
        else:
            assert made in self._is_there, "what is needed was sent"
        if made in self._sent and made in self._buffers:
            for buffer, tensor in zip(
                self._buffers.pop(made), [x for x in self._sent[made] if x is not None], strict=True
            ):
                buffer.copy_(tensor)
            self._is_there.add(made)

    def received_gradients(self, stage: int, microbatch: int, buffers: Gradients) -> Gradients:
        missing = self._missing.pop((stage, microbatch))
        return tuple(None if is_missing else x for x, is_missing in zip(buffers, missing, strict=True))

    def as_sent(self, stage: int, gradients: Gradients) -> Gradients:
        return gradients


def _in_one_order(schedule: Schedule) -> list[tuple[int, Step]]:
    """The steps of all devices in an order in which one process can run them, each with its device."""
    left = [iter(steps) for steps in device_steps(schedule)]
    waiting: list[Step | None] = [next(steps, None) for steps in left]
    found = list[tuple[int, Step]]()
    for action in dependency_order(schedule):
        device, is_done = schedule.devices[action.stage], False
        while (step := waiting[device]) is not None and not (is_done and not isinstance(step, Send)):
            found.append((device, step))
            is_done |= step == action
            waiting[device] = next(left[device], None)
    return found
