"""What the stages of one process compute and keep in a pass; the engines differ in how tensors get to other devices.

    forward    inputs --stage--> outputs, kept with the inputs until the backward; the loss in place of the last outputs
    backward   gradients of the outputs --autograd--> gradients of the inputs; whole, or in two halves

What is received has a buffer from when its receive is posted to the end of the micro-batch's backward; what was sent stays
as long as `gplan/schedules/transfers.py` says. The memory model counts both. Between two stages of one process's device
the tensor itself is passed on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

import torch
from torch import Tensor

from gplan.core import Action, ActionKind, Schedule
from gplan.runtime.capture_cache import CapturedModel
from gplan.runtime.recorder import ActionRecorder
from gplan.runtime.stage_module import StageModule
from gplan_profiler.backward.split_backward import SecondHalf, first_half
from gplan_profiler.capture.chain import Tensors, TensorSpec

LossFn = Callable[[Tensors, int], Tensor]
"""(outputs of the last stage, micro-batch) -> loss of the micro-batch, a scalar."""

Gradients = tuple[Tensor | None, ...]
_Key = tuple[int, int]  # stage, micro-batch


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePass:
    """What an engine does in one pass: the actions of a schedule on some micro-batches."""

    captured: CapturedModel
    schedule: Schedule  # forwards only in evaluation
    inputs: Tensors  # of all micro-batches; used by the first stage
    loss_fn: LossFn  # used by the last stage
    loss_weight: float = 1.0  # initial gradient of each micro-batch's loss

    @property
    def trains(self) -> bool:
        """Whether the pass has backwards."""
        return any(x.kind is not ActionKind.FORWARD for x in self.schedule.orders[0])


class PassState(ABC):
    """The tensors of one pass on some stages."""

    def __init__(self, work: EnginePass, device: torch.device) -> None:
        self.work, self._device = work, device
        devices, self._last = work.schedule.devices, work.schedule.num_stages - 1
        self._is_sent = [devices[stage] != devices[stage + 1] for stage in range(self._last)]  # after each stage
        self._activation_buffers: dict[_Key, Tensors] = {}  # until the forward
        self._gradient_buffers: dict[_Key, Tensors] = {}  # until the backward, of a split one that of the weights
        self._activations: dict[_Key, tuple[Tensors, Tensors]] = {}  # inputs and outputs, kept until the backward
        self._input_gradients: dict[_Key, Gradients] = {}  # until the previous stage takes them, or they are sent
        self._halves: dict[_Key, tuple[SecondHalf, Tensors, Gradients]] = {}  # with what was received
        self._losses: dict[int, Tensor] = {}
        self._chunks: list[Tensors] = []

    def begin(self, work: EnginePass) -> None:
        """Start a pass."""
        self.forget()
        self.work = work
        self._chunks = list(zip(*(x.chunk(work.schedule.num_microbatches) for x in work.inputs), strict=True))

    def end(self) -> list[Tensor]:
        """Return the losses by micro-batch, if the last stage is one of these, and drop all other tensors."""
        losses = [self._losses[m].detach() for m in sorted(self._losses)]
        self.forget()
        return losses

    def forget(self) -> None:
        """Drop all tensors."""
        for kept in (
            self._activation_buffers,
            self._gradient_buffers,
            self._activations,
            self._input_gradients,
            self._halves,
            self._losses,
            self._chunks,
        ):
            kept.clear()

    def allocate(self, made: Action) -> Tensors:
        """Return new buffers for what another device's action sends to one of the stages."""
        stage, is_forward = made.receiver, made.kind is ActionKind.FORWARD
        specs = self.boundary(made.stage + 1 if is_forward else made.stage)
        buffers = tuple(
            torch.empty(x.shape, dtype=x.dtype, device=self._device) for x in specs if is_forward or x.requires_grad
        )
        kept = self._activation_buffers if is_forward else self._gradient_buffers
        kept[stage, made.microbatch] = buffers
        return buffers

    def take_sent(self, made: Action) -> Gradients:
        """Return the output of an action to send it: outputs, or gradients, which are no longer kept then."""
        key = made.stage, made.microbatch
        if made.kind is not ActionKind.FORWARD:
            return self._input_gradients.pop(key)
        outputs = self._activations[key][1] if self.work.trains else self._activations.pop(key)[1]
        return tuple(x.detach() for x in outputs)

    def boundary(self, stage: int) -> tuple[TensorSpec, ...]:
        """Return the tensors that enter a stage."""
        return self.work.captured.boundary(stage)

    def receive(self, action: Action) -> Gradients:
        """Return what an action takes from its neighbour: inputs of a forward, as leaves of a new graph; output gradients of
        a backward."""
        kind, stage, microbatch = _kind_of_work(action), action.stage, action.microbatch
        if kind is ActionKind.FORWARD:
            if stage == 0:
                return self._chunks[microbatch]
            if not self._is_sent[stage - 1]:
                key = stage - 1, microbatch
                made = (self._activations[key] if self.work.trains else self._activations.pop(key))[1]
                return tuple(x.detach().requires_grad_(x.requires_grad) for x in made)
            buffers = self._activation_buffers.pop((stage, microbatch))
            has_graph = self.work.trains and torch.is_grad_enabled()
            return tuple(
                x.detach().requires_grad_(spec.requires_grad and has_graph)
                for x, spec in zip(buffers, self.boundary(stage), strict=True)
            )
        if kind not in (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT) or stage == self._last:
            return ()
        if not self._is_sent[stage]:
            return self._input_gradients.pop((stage + 1, microbatch))
        gradients = iter(self._gradient_buffers.pop((stage, microbatch)))
        by_place = tuple(next(gradients) if x.requires_grad else None for x in self.boundary(stage + 1))
        return self.received_gradients(stage, microbatch, by_place)

    def execute(self, action: Action, module: StageModule, received: Gradients) -> None:
        """Run one action on what it received."""
        kind, stage, microbatch = _kind_of_work(action), action.stage, action.microbatch
        if kind is ActionKind.FORWARD:
            outputs = module(*received)
            if stage == self._last:
                self._losses[microbatch], outputs = self.work.loss_fn(outputs, microbatch), ()
            if self.work.trains:
                self._activations[stage, microbatch] = (cast(Tensors, received), outputs)
            elif stage < self._last:
                self._activations[stage, microbatch] = ((), outputs)
        elif kind is ActionKind.BACKWARD:
            leaves, outputs, gradients = self._take(stage, microbatch, received)
            roots = [(x, y) for x, y in zip(outputs, gradients, strict=True) if x.requires_grad and y is not None]
            if roots:
                torch.autograd.backward([x for x, _ in roots], [y for _, y in roots])
            if stage > 0:
                found = tuple(x.grad for x in leaves)
                for leaf in leaves:
                    leaf.grad = None
                self._pass_back(stage, microbatch, found)
        elif kind is ActionKind.INPUT_GRADIENT:
            leaves, outputs, gradients = self._take(stage, microbatch, received)
            found, half = first_half(outputs, gradients, leaves)
            self._halves[stage, microbatch] = half, leaves, received
            self._pass_back(stage, microbatch, found)
        elif kind is ActionKind.WEIGHT_GRADIENT:
            held = self._halves.pop((stage, microbatch))  # all of it until the end
            held[0].run()

    def _take(self, stage: int, microbatch: int, received: Gradients) -> tuple[Tensors, Tensors, Gradients]:
        """Return the inputs, outputs and output gradients of a stage; inputs and outputs are no longer kept."""
        leaves, outputs = self._activations.pop((stage, microbatch))
        if stage < self._last:
            return leaves, outputs, received
        loss = self._losses[microbatch]
        self._losses[microbatch] = loss.detach()
        return leaves, (loss,), (torch.full_like(loss, self.work.loss_weight),)

    def _pass_back(self, stage: int, microbatch: int, gradients: Gradients) -> None:
        """Keep the gradients of a stage's inputs for the previous stage."""
        if self._is_sent[stage - 1]:
            gradients = self.as_sent(stage, tuple(None if x is None else x.contiguous() for x in gradients))
        self._input_gradients[stage, microbatch] = gradients

    @abstractmethod
    def received_gradients(self, stage: int, microbatch: int, buffers: Gradients) -> Gradients:
        """Return the received gradients of a stage's outputs, with None for a missing one."""

    @abstractmethod
    def as_sent(self, stage: int, gradients: Gradients) -> Gradients:
        """Return the gradients of a stage's inputs as they are sent; some may be missing."""


PassT = TypeVar("PassT", bound=PassState)


class Engine(Generic[PassT]):
    """What both engines have: the state of each kind of pass, and how an action is run and recorded."""

    def __init__(self, stages: Sequence[StageModule], *, device: torch.device) -> None:
        self.recorder = ActionRecorder()
        self._stages, self._device = {x.index: x for x in stages}, device
        self._passes: dict[tuple[CapturedModel, bool, int], PassT] = {}

    def _begun(self, work: EnginePass, make: Callable[[], PassT]) -> PassT:
        """Begin a pass, whose state is made once for each capture and number of micro-batches."""
        key = work.captured, work.trains, work.schedule.num_microbatches
        if key not in self._passes:
            self._passes[key] = make()
        self._passes[key].begin(work)
        return self._passes[key]

    def _run_action(self, action: Action, state: PassT) -> None:
        module = self._stages[action.stage]
        module.enter_action(action.microbatch)
        received = state.receive(action)
        with self.recorder.note(action):
            state.execute(action, module, received)

    def forget(self, old: Collection[CapturedModel]) -> None:
        """Drop the passes of captures that are no longer used."""
        self._passes = {key: x for key, x in self._passes.items() if key[0] not in old}


def _kind_of_work(action: Action) -> ActionKind | None:
    """What an action does; None: nothing.

    On the first stage the first half of a split backward does nothing; the second is the whole.
    """
    if action.stage > 0:
        return action.kind
    halves = {ActionKind.INPUT_GRADIENT: None, ActionKind.WEIGHT_GRADIENT: ActionKind.BACKWARD}
    return halves.get(action.kind, action.kind)
