"""The virtual engine: one process computes every action of the schedule, in dependency order, and times each.

The K devices exist only on the clock: the measured durations are laid out by the simulator's rules, with the plan's
link between devices. Gradients and action times are real. Like the torch engine, each stage keeps receive buffers for
all micro-batches, and what crosses a cut is copied into them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from gplan.execute.captured import Captured
from gplan.execute.engine import PassWork
from gplan.execute.recorder import Recorder
from gplan.execute.stage import StageModule
from gplan.nouns import Action, ActionKind
from gplan.simulator import dependency_order
from profiler.capture.chain import Tensors, TensorSpec
from profiler.memory.bytes import now_ns


class VirtualEngine:
    """All stages of a plan in this process."""

    def __init__(self, modules: Sequence[StageModule], *, device: torch.device) -> None:
        self.recorder = Recorder()
        self.action_starts_ns: list[tuple[int, int]] = []  # (time_ns, stage) of the step under way
        self._modules, self._device = modules, device
        self._flows: dict[tuple[Captured, bool, int], _Flow] = {}

    def run(self, work: PassWork) -> list[Tensor]:
        """One pass; the losses of its micro-batches."""
        key = work.captured, work.trains, work.schedule.num_microbatches
        if key not in self._flows:
            self._flows[key] = _Flow(work, len(self._modules), self._device)
        flow = self._flows[key]
        flow.begin(work)
        for action in dependency_order(work.schedule):
            self.action_starts_ns.append((now_ns(), action.stage))
            module = self._modules[action.stage]
            module.microbatch, module.layer = action.microbatch, None
            with self.recorder.note(action):
                if action.kind is ActionKind.FORWARD:
                    flow.forward(module, action.microbatch)
                else:
                    flow.backward(action)
        return flow.end()

    def forget(self, old: Collection[Captured]) -> None:
        """Let go of what was made for captures that are not used any more."""
        self._flows = {key: x for key, x in self._flows.items() if key[0] not in old}

    def buffers(self, stage: int) -> list[Tensor]:
        """The receive buffers of one stage."""
        return [x for flow in self._flows.values() for x in flow.buffers(stage)]


class _Flow:
    """What passes between the stages in one pass."""

    def __init__(self, work: PassWork, num_stages: int, device: torch.device) -> None:
        num_microbatches = work.schedule.num_microbatches
        boundaries = [work.captured.boundary(stage) for stage in range(1, num_stages)]
        wanted = [[x for x in specs if x.requires_grad and work.trains] for specs in boundaries]
        self._activations = [_buffers(specs, num_microbatches, device) for specs in boundaries]
        self._gradients = [_buffers(specs, num_microbatches, device) for specs in wanted]
        self._last = num_stages - 1
        self._work = work
        self._passed: dict[tuple[int, int], tuple[Tensors, Tensors]] = {}
        self._losses: dict[int, Tensor] = {}
        self._sent: list[Tensor] = []  # until the pass ends, as the torch engine keeps what it sent
        self._chunks: list[Tensors] = []

    def begin(self, work: PassWork) -> None:
        """Nothing has passed yet."""
        self._work = work
        self._passed.clear()
        self._chunks = list(zip(*(x.chunk(work.schedule.num_microbatches) for x in work.inputs), strict=True))

    def end(self) -> list[Tensor]:
        """The losses, by micro-batch; what passed is forgotten."""
        losses = [self._losses[m].detach() for m in sorted(self._losses)]
        self._losses.clear()
        self._sent.clear()
        self._passed.clear()
        self._chunks.clear()
        return losses

    def buffers(self, stage: int) -> list[Tensor]:
        """The receive buffers of one stage."""
        activations = self._activations[stage - 1] if stage > 0 else []
        gradients = self._gradients[stage] if stage < self._last else []
        return [x for chunk in (*activations, *gradients) for x in chunk]

    def forward(self, module: StageModule, microbatch: int) -> None:
        """A micro-batch through one stage."""
        stage = module.index
        leaves = self._chunks[microbatch] if stage == 0 else self._received(stage, microbatch)
        outputs = module(*leaves)
        if stage == self._last:
            self._losses[microbatch] = self._work.at_end(outputs, microbatch)
        if self._work.trains:
            self._passed[stage, microbatch] = (leaves, outputs)
        elif stage < self._last:
            self._passed[stage, microbatch] = ((), outputs)

    def backward(self, action: Action) -> None:
        """The gradients of one stage for a micro-batch."""
        stage, microbatch = action.stage, action.microbatch
        leaves, outputs = self._passed[stage, microbatch]
        if stage == self._last:
            self._losses[microbatch].backward()  # type: ignore[no-untyped-call]
            self._losses[microbatch] = self._losses[microbatch].detach()
        else:
            self._backward_from_next(stage, microbatch, outputs)
        self._passed[stage, microbatch] = (leaves, ())

    def _received(self, stage: int, microbatch: int) -> Tensors:
        sent = self._passed[stage - 1, microbatch][1]
        buffers = self._activations[stage - 1][microbatch]
        self._sent.extend(x.detach() for x in sent)
        leaves = []
        for buffer, tensor in zip(buffers, sent, strict=True):
            buffer.copy_(tensor.detach())
            leaves.append(buffer.detach().requires_grad_(tensor.requires_grad))
        return tuple(leaves)

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


def _buffers(specs: Sequence[TensorSpec], num_microbatches: int, device: torch.device) -> list[Tensors]:
    return [tuple(torch.empty(x.shape, dtype=x.dtype, device=device) for x in specs) for _ in range(num_microbatches)]
