"""The virtual engine: one process runs every action of the schedule in dependency order and times each.

The K devices exist only on the clock: measured durations are laid out by the simulator's rules with the plan's
links. Gradients and action times are real. As in the torch engine, each stage keeps receive buffers for all
micro-batches. What crosses to another device is copied into them outside the measured actions: that time is the link's.
Between stages of one device the tensor itself is passed on. Each device has its own gradient of a tied weight, as every
rank has, and updates the weight itself, which is one tensor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gplan.core import Action, ActionKind
from gplan.runtime.capture_cache import CapturedModel
from gplan.runtime.gradient_sync import add_gradients
from gplan.runtime.recorder import ActionRecorder
from gplan.runtime.stage_module import StageModule
from gplan.runtime.torch_engine import EnginePass
from gplan.simulation.simulator import dependency_order
from gplan_profiler.backward.split_backward import SecondHalf, first_half
from gplan_profiler.capture.chain import Tensors, TensorSpec
from gplan_profiler.memory.allocations import now_ns

_Key = tuple[int, int]  # stage, micro-batch
_Gradients = tuple[Tensor | None, ...]


class VirtualEngine:
    """Runs all stages of a plan in this process."""

    def __init__(self, modules: Sequence[StageModule], *, device: torch.device) -> None:
        self.recorder = ActionRecorder()
        self.action_starts_ns: list[tuple[int, int]] = []  # (time_ns, device) of the current step
        self._modules, self._device = modules, device
        self._tied = DeviceGradients()
        self._flows: dict[tuple[CapturedModel, bool, int], _PassState] = {}

    def run(self, work: EnginePass) -> list[Tensor]:
        """Run one pass; return the losses of its micro-batches."""
        key = work.captured, work.trains, work.schedule.num_microbatches
        devices = work.schedule.devices

        def begin_on(stage: int) -> None:
            self.action_starts_ns.append((now_ns(), devices[stage]))

        if key not in self._flows:
            self._flows[key] = _PassState(work, self._device, begin_on)
        flow = self._flows[key]
        flow.begin(work)
        users: dict[nn.Parameter, set[int]] = {}
        for module in self._modules if work.trains else ():
            for parameter in module.parameters():
                users.setdefault(parameter, set()).add(devices[module.index])
        tied = [x for x, found in users.items() if len(found) > 1 and x.requires_grad]
        with self._tied.apart(tied):
            for action in dependency_order(work.schedule):
                begin_on(action.stage)
                self._tied.enter(devices[action.stage])
                module = self._modules[action.stage]
                module.enter_action(action.microbatch)
                received = flow.receive(action)
                with self.recorder.note(action):
                    flow.execute(action, module, received)
        return flow.end()

    def forget(self, old: Collection[CapturedModel]) -> None:
        """Drop the buffers of captures that are no longer used."""
        self._flows = {key: x for key, x in self._flows.items() if key[0] not in old}

    def buffers(self, stage: int) -> list[Tensor]:
        """Return the receive buffers of one stage."""
        return [x for flow in self._flows.values() for x in flow.buffers(stage)]


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
        before = [x.grad for x in parameters]
        self._parameters, self._by_device, self._device = parameters, {}, None
        self._set([None] * len(parameters))
        try:
            yield
        finally:
            self._leave()
            for place, (parameter, gradient) in enumerate(zip(parameters, before, strict=True)):
                for own in self._by_device.values():
                    gradient = add_gradients(gradient, own[place])
                parameter.grad = gradient

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


class _PassState:
    """The tensors that pass between stages in one pass, and their receive buffers."""

    def __init__(self, work: EnginePass, device: torch.device, begin_on: Callable[[int], None]) -> None:
        """`begin_on` is called with each stage before its buffers are allocated, so that they count for its device."""
        schedule = work.schedule
        self._last = schedule.num_stages - 1
        is_sent = [schedule.devices[stage] != schedule.devices[stage + 1] for stage in range(self._last)]
        into = [work.captured.boundary(stage + 1) if is_sent[stage] else () for stage in range(self._last)]
        self._is_sent = is_sent  # after each stage but the last

        def buffers(stage: int, specs: Sequence[TensorSpec]) -> list[Tensors]:
            begin_on(stage)
            return [
                tuple(torch.empty(x.shape, dtype=x.dtype, device=device) for x in specs)
                for _ in range(schedule.num_microbatches)
            ]

        self._activation_buffers = [buffers(stage, specs) for stage, specs in enumerate(into, start=1)]
        wanted = [[x for x in specs if x.requires_grad and work.trains] for specs in into]
        self._gradient_buffers = [buffers(stage, specs) for stage, specs in enumerate(wanted)]
        self._work, self._device = work, device
        self._activations: dict[_Key, tuple[Tensors, Tensors]] = {}  # inputs and outputs, kept until the backward
        self._input_gradients: dict[_Key, _Gradients] = {}  # until the previous stage takes them
        self._halves: dict[_Key, SecondHalf] = {}
        self._losses: dict[int, Tensor] = {}
        self._sent: list[Tensor] = []  # kept until the pass ends, as in the torch engine
        self._chunks: list[Tensors] = []
        self._handlers: dict[ActionKind, Callable[[StageModule, int, Any], None]] = {
            ActionKind.FORWARD: self._forward,
            ActionKind.BACKWARD: self._backward,
            ActionKind.INPUT_GRADIENT: self._first_half,
            ActionKind.WEIGHT_GRADIENT: self._second_half,
        }

    def begin(self, work: EnginePass) -> None:
        """Start a pass."""
        self._work = work
        self._forget()
        self._chunks = list(zip(*(x.chunk(work.schedule.num_microbatches) for x in work.inputs), strict=True))

    def end(self) -> list[Tensor]:
        """Return the losses by micro-batch and drop all other tensors."""
        losses = [self._losses[m].detach() for m in sorted(self._losses)]
        self._forget()
        return losses

    def buffers(self, stage: int) -> list[Tensor]:
        """Return the receive buffers of one stage."""
        activations = self._activation_buffers[stage - 1] if stage > 0 else []
        gradients = self._gradient_buffers[stage] if stage < self._last else []
        return [x for chunk in (*activations, *gradients) for x in chunk]

    def receive(self, action: Action) -> Tensors | _Gradients:
        """Copy and return what an action takes from its neighbour: inputs of a forward, output gradients of a backward."""
        kind, stage, microbatch = _kind_of_work(action), action.stage, action.microbatch
        if kind is ActionKind.FORWARD:
            return self._chunks[microbatch] if stage == 0 else self._activations_from_previous(stage, microbatch)
        takes = kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT) and stage < self._last
        return self._gradients_from_next(stage, microbatch) if takes else ()

    def execute(self, action: Action, module: StageModule, received: Tensors | _Gradients) -> None:
        """Run one action on what it received."""
        kind = _kind_of_work(action)
        if kind is not None:
            self._handlers[kind](module, action.microbatch, received)

    def _forward(self, module: StageModule, microbatch: int, leaves: Tensors) -> None:
        stage = module.index
        outputs = module(*leaves)
        if stage == self._last:
            self._losses[microbatch], outputs = self._work.loss_fn(outputs, microbatch), ()
        if self._work.trains:
            self._activations[stage, microbatch] = (leaves, outputs)
        elif stage < self._last:
            self._activations[stage, microbatch] = ((), outputs)

    def _backward(self, module: StageModule, microbatch: int, received: _Gradients) -> None:
        leaves, outputs, gradients = self._take(module.index, microbatch, received)
        roots = [(x, y) for x, y in zip(outputs, gradients, strict=True) if x.requires_grad and y is not None]
        if roots:
            torch.autograd.backward([x for x, _ in roots], [y for _, y in roots])
        if module.index > 0:
            self._store_input_gradients(module.index, microbatch, tuple(x.grad for x in leaves))
            for leaf in leaves:
                leaf.grad = None

    def _first_half(self, module: StageModule, microbatch: int, received: _Gradients) -> None:
        leaves, outputs, gradients = self._take(module.index, microbatch, received)
        found, self._halves[module.index, microbatch] = first_half(outputs, gradients, leaves)
        self._store_input_gradients(module.index, microbatch, found)

    def _second_half(self, module: StageModule, microbatch: int, _: _Gradients) -> None:
        self._halves.pop((module.index, microbatch)).run()

    def _activations_from_previous(self, stage: int, microbatch: int) -> Tensors:
        """Return the previous stage's outputs as leaves of a new graph."""
        made = self._activations[stage - 1, microbatch][1]
        if not self._is_sent[stage - 1]:
            return tuple(x.detach().requires_grad_(x.requires_grad) for x in made)
        self._sent.extend(x.detach() for x in made)
        leaves = []
        for buffer, tensor in zip(self._activation_buffers[stage - 1][microbatch], made, strict=True):
            buffer.copy_(tensor.detach())
            leaves.append(buffer.detach().requires_grad_(tensor.requires_grad))
        return tuple(leaves)

    def _take(self, stage: int, microbatch: int, received: _Gradients) -> tuple[Tensors, Tensors, _Gradients]:
        """Return the inputs, outputs and output gradients of a stage; inputs and outputs are no longer kept."""
        leaves, outputs = self._activations.pop((stage, microbatch))
        if stage < self._last:
            return leaves, outputs, received
        loss = self._losses[microbatch]
        self._losses[microbatch] = loss.detach()
        return leaves, (loss,), (torch.full_like(loss, self._work.loss_weight),)

    def _gradients_from_next(self, stage: int, microbatch: int) -> _Gradients:
        returned = self._input_gradients.pop((stage + 1, microbatch))
        if not self._is_sent[stage]:
            return returned
        buffers = iter(self._gradient_buffers[stage][microbatch])
        wanted = self._work.captured.boundary(stage + 1)
        found = [(next(buffers) if x.requires_grad else None, y) for x, y in zip(wanted, returned, strict=True)]
        return tuple(buffer.copy_(y) if buffer is not None and y is not None else None for buffer, y in found)

    def _store_input_gradients(self, stage: int, microbatch: int, gradients: _Gradients) -> None:
        if not self._is_sent[stage - 1]:
            self._input_gradients[stage, microbatch] = gradients
            return
        gradients = tuple(x if x is None else x.contiguous() for x in gradients)  # as the torch engine sends them
        self._input_gradients[stage, microbatch] = gradients
        for spec, gradient in zip(self._work.captured.boundary(stage), gradients, strict=True):
            if spec.requires_grad and gradient is None:  # the torch engine sends a marker of this size
                gradient = torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
            if gradient is not None:
                self._sent.append(gradient)

    def _forget(self) -> None:
        for kept in (
            self._activations,
            self._input_gradients,
            self._halves,
            self._losses,
            self._sent,
            self._chunks,
        ):
            kept.clear()


def _kind_of_work(action: Action) -> ActionKind | None:
    """What an action does; None: nothing.

    On the first stage, as in the torch engine, the first half of a split backward does nothing; the second is the whole.
    """
    if action.stage > 0:
        return action.kind
    halves = {ActionKind.INPUT_GRADIENT: None, ActionKind.WEIGHT_GRADIENT: ActionKind.BACKWARD}
    return halves.get(action.kind, action.kind)
