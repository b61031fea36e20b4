"""The virtual engine: one process computes every action of the schedule, in dependency order, and times each.

The K devices exist only on the clock: the measured durations are laid out by the simulator's rules, with the plan's
link between devices. Gradients and action times are real. Like the torch engine, each stage keeps receive buffers for
all micro-batches, and what crosses a cut is copied into them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gplan.execute.engine import MicrobatchLoss
from gplan.execute.recorder import Recorder
from gplan.execute.stage import StageModule
from gplan.nouns import Action, ActionKind, Schedule
from gplan.simulator import dependency_order
from profiler.capture.chain import Tensors, TensorSpec
from profiler.memory.bytes import now_ns


class VirtualEngine:
    """All stages of a plan in this process."""

    def __init__(
        self,
        modules: Sequence[StageModule],
        *,
        schedule: Schedule,
        boundaries: Sequence[Sequence[TensorSpec]],  # K+1: before each stage and after the last
        loss: MicrobatchLoss,
    ) -> None:
        self.recorder = Recorder()
        self.action_starts_ns: list[tuple[int, int]] = []  # (time_ns, stage) of the step under way
        self._modules = modules
        self._schedule = schedule
        self._loss = loss
        microbatches = range(schedule.num_microbatches)
        self._activations = [_buffers(specs, len(microbatches)) for specs in boundaries[1:-1]]
        self._gradients = [_buffers([x for x in b if x.requires_grad], len(microbatches)) for b in boundaries[1:-1]]
        self._passed: dict[tuple[int, int], tuple[Tensors, Tensors]] = {}
        self._sent: list[Tensor] = []  # until the step ends, as the torch engine keeps what it sent

    def step(self, inputs: Tensors) -> float:
        """All forwards and backwards of one mini-batch; the loss."""
        self.action_starts_ns.clear()
        chunks = list(zip(*(x.chunk(self._schedule.num_microbatches) for x in inputs), strict=True))
        losses: dict[int, Tensor] = {}
        for action in dependency_order(self._schedule):
            self.action_starts_ns.append((now_ns(), action.stage))
            with self.recorder.note(action):
                if action.kind is ActionKind.FORWARD:
                    self._forward(action, chunks, losses)
                else:
                    self._backward(action, losses)
        self._sent.clear()
        return sum(float(loss) for loss in losses.values())

    def buffers(self, stage: int) -> list[Tensor]:
        """The receive buffers of one stage."""
        activations = self._activations[stage - 1] if stage > 0 else []
        gradients = self._gradients[stage] if stage < len(self._modules) - 1 else []
        return [x for chunk in (*activations, *gradients) for x in chunk]

    def _forward(self, action: Action, chunks: Sequence[Tensors], losses: dict[int, Tensor]) -> None:
        stage, microbatch = action.stage, action.microbatch
        module = self._modules[stage]
        module.microbatch = microbatch
        leaves = chunks[microbatch] if stage == 0 else self._received(stage, microbatch)
        outputs = module(*leaves)
        if stage == len(self._modules) - 1:
            losses[microbatch] = self._loss(outputs, microbatch)
        self._passed[stage, microbatch] = (leaves, outputs)

    def _received(self, stage: int, microbatch: int) -> Tensors:
        sent = self._passed[stage - 1, microbatch][1]
        buffers = self._activations[stage - 1][microbatch]
        self._sent.extend(x.detach() for x in sent)
        leaves = []
        for buffer, tensor in zip(buffers, sent, strict=True):
            buffer.copy_(tensor.detach())
            leaves.append(buffer.detach().requires_grad_(tensor.requires_grad))
        return tuple(leaves)

    def _backward(self, action: Action, losses: dict[int, Tensor]) -> None:
        stage, microbatch = action.stage, action.microbatch
        _, outputs = self._passed[stage, microbatch]
        if stage == len(self._modules) - 1:
            losses[microbatch].backward()  # type: ignore[no-untyped-call]
            losses[microbatch] = losses[microbatch].detach()
        else:
            self._backward_from_next(stage, microbatch, outputs)
        leaves, _ = self._passed[stage, microbatch]
        self._passed[stage, microbatch] = (leaves, ())

    def _backward_from_next(self, stage: int, microbatch: int, outputs: Tensors) -> None:
        leaves, _ = self._passed.pop((stage + 1, microbatch))
        wanted = [(x, leaf.grad) for x, leaf in zip(outputs, leaves, strict=True) if x.requires_grad]
        pairs = []
        for buffer, (output, gradient) in zip(self._gradients[stage][microbatch], wanted, strict=True):
            if gradient is not None:
                buffer.copy_(gradient)
                self._sent.append(gradient)
                pairs.append((output, buffer))
        if pairs:
            torch.autograd.backward([x for x, _ in pairs], [y for _, y in pairs])


def _buffers(specs: Sequence[TensorSpec], num_microbatches: int) -> list[Tensors]:
    return [tuple(torch.empty(x.shape, dtype=x.dtype) for x in specs) for _ in range(num_microbatches)]
