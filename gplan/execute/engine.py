"""THE adapter to torch.distributed.pipelining: one stage on one rank, driven by gplan's own schedule.

Everything private that gplan uses of torch is here, each with a contract test: `_PipelineScheduleRuntime` with
`_prepare_schedule_with_comms`, `_Action`, `_ComputationType`, and of a stage `bwd_cache`, `args_recv_info`,
`grad_recv_info`. The runtime keeps every sent tensor until the step ends and allocates receive buffers for all
micro-batches; the memory model counts both.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

from gplan.execute.captured import Captured
from gplan.execute.recorder import Recorder
from gplan.execute.stage import StageModule
from gplan.execute.whereabouts import Awaited
from gplan.nouns import Action, ActionKind, Schedule
from profiler.capture.chain import Tensors

AtEnd = Callable[[Tensors, int], Tensor]
"""(outputs of the last stage, micro-batch) -> scalar; those of all micro-batches add up to the step's loss."""

_Wait = tuple[Awaited, int, int]
"""What a stage waits for, the neighbour that it comes from, the micro-batch (-1: of any)."""

_KINDS = {ActionKind.FORWARD: _ComputationType.FORWARD, ActionKind.BACKWARD: _ComputationType.FULL_BACKWARD}
_TORCH_LOG = "torch.distributed.pipelining.schedules"


@dataclass(frozen=True, slots=True, kw_only=True)
class PassWork:
    """What an engine does in one pass: a schedule's actions on some micro-batches."""

    captured: Captured
    schedule: Schedule  # of forwards alone in evaluation
    inputs: Tensors  # of all its micro-batches; used by the first stage
    at_end: AtEnd  # used by the last stage
    is_last: bool = True  # of the step: replicas add up their gradients in its last backward

    @property
    def trains(self) -> bool:
        """Whether there is a backward."""
        return any(x.kind is not ActionKind.FORWARD for x in self.schedule.orders[0])


class TorchEngine:
    """The stage of this rank; `group` holds one rank per stage."""

    def __init__(
        self, module: nn.Module, stage: StageModule, *, num_stages: int, device: torch.device, group: dist.ProcessGroup
    ) -> None:
        """`module` is the stage itself, or what wraps it for replicas."""
        self.recorder = Recorder()
        self._module, self._stage = module, stage
        self._num_stages, self._device, self._group = num_stages, device, group
        self._runtimes: dict[tuple[Captured, bool, int], _Runtime] = {}

    def run(self, work: PassWork) -> list[Tensor]:
        """One pass; the losses of its micro-batches on the last rank, none on the others."""
        key = work.captured, work.trains, work.schedule.num_microbatches
        if key not in self._runtimes:
            self._runtimes[key] = self._runtime(work)
        runtime = self._runtimes[key]
        runtime.stage.syncs, runtime.at_end = work.is_last, work.at_end
        return runtime.run(work)

    def forget(self, old: Collection[Captured]) -> None:
        """Let go of what was made for captures that are not used any more."""
        self._runtimes = {key: x for key, x in self._runtimes.items() if key[0] not in old}

    def buffers(self, _stage: int) -> list[Tensor]:
        """The receive buffers that the runtimes of this rank's stage hold on to."""
        return [x for runtime in self._runtimes.values() for x in runtime.stage.receive_buffers()]

    def _runtime(self, work: PassWork) -> _Runtime:
        index = self._stage.index
        stage = _TimedStage(
            self._module,
            index,
            self._num_stages,
            self._device,
            input_args=tuple(spec.on_meta() for spec in work.captured.boundary(index)),
            output_args=tuple(spec.on_meta() for spec in work.captured.boundary(index + 1)),
            group=self._group,
        )
        stage.recorder, stage.module, stage.waits = self.recorder, self._stage, _waits(work.schedule, index)
        return _Runtime(stage, work.schedule)


class _TimedStage(PipelineStage):
    """Records every action, tells the module its micro-batch, and sends only contiguous gradients."""

    recorder: Recorder
    module: StageModule
    waits: Mapping[Action | None, _Wait | None]
    syncs = True

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.module.microbatch = fwd_chunk_id
        action = Action(self.stage_index, ActionKind.FORWARD, fwd_chunk_id)
        with self.recorder.note(action):
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self.note_wait(action)
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if not self.has_backward:
            return
        self.module.microbatch, self.module.layer = bwd_chunk_id, None
        action = Action(self.stage_index, ActionKind.BACKWARD, bwd_chunk_id)
        with self.recorder.note(action):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward and self.syncs)
            gradients = self.bwd_cache[bwd_chunk_id]
            self.bwd_cache[bwd_chunk_id] = tuple(x.contiguous() if x is not None else None for x in gradients)
        self.note_wait(action)

    def note_wait(self, action: Action | None) -> None:
        """Note for whom this rank waits after an action, or, for None, before the first."""
        wait = self.waits[action]
        if wait is not None:
            self.recorder.whereabouts.enter_wait(wait[0], stage=wait[1], microbatch=wait[2])

    def receive_buffers(self) -> list[Tensor]:
        """Of activations and of gradients."""
        received = [*self.args_recv_info.values(), *self.grad_recv_info.values()]
        return [info.buffer for infos in received for info in infos if info.buffer is not None]


class _Runtime:
    """torch's runtime with the actions of one of gplan's schedules."""

    def __init__(self, stage: _TimedStage, schedule: Schedule) -> None:
        self.stage = stage
        self.at_end: AtEnd = lambda _outputs, _microbatch: torch.zeros(())
        self._microbatches = torch.arange(schedule.num_microbatches)
        self._runtime = _PipelineScheduleRuntime(  # type: ignore[no-untyped-call]
            [stage], schedule.num_microbatches, loss_fn=self._timed_end, scale_grads=False
        )
        self._runtime._prepare_schedule_with_comms(_torch_orders(schedule))

    def run(self, work: PassWork) -> list[Tensor]:
        """All actions; the losses on the last rank."""
        losses: list[Tensor] = []
        args = work.inputs if self.stage.is_first else ()
        target = self._microbatches if self.stage.is_last else None
        step = self._runtime.step if work.trains else self._runtime.eval
        self.stage.note_wait(None)
        with _quiet_log():
            step(*args, target=target, losses=losses, return_outputs=False)
        return losses

    def _timed_end(self, output: Any, microbatch: Tensor) -> Tensor:
        number = int(microbatch)
        outputs = output if isinstance(output, tuple) else (output,)
        with self.stage.recorder.note(Action(self.stage.stage_index, ActionKind.FORWARD, number)):
            return self.at_end(outputs, number)


def _waits(schedule: Schedule, stage: int) -> dict[Action | None, _Wait | None]:
    """For whom a stage waits after each of its actions, by what comes next."""
    order = schedule.orders[stage]
    found: dict[Action | None, _Wait | None] = {}
    for action, following in zip((None, *order), (*order, None), strict=True):
        found[action] = None
        if following is None:
            found[action] = ("receiver", stage - 1 if stage else stage + 1, -1)
        elif following.kind is ActionKind.FORWARD and stage > 0:
            found[action] = ("activations", stage - 1, following.microbatch)
        elif following.kind is not ActionKind.FORWARD and stage < schedule.num_stages - 1:
            found[action] = ("gradients", stage + 1, following.microbatch)
    return found


@contextmanager
def _quiet_log() -> Iterator[None]:
    """torch prints its whole schedule where an action fails; the error says enough."""
    log = logging.getLogger(_TORCH_LOG)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _torch_orders(schedule: Schedule) -> dict[int, list[_Action | None]]:
    """The orders as torch's runtime takes them; it wants to see backwards in an evaluation too, and passes them over."""
    orders: dict[int, list[_Action | None]] = {
        rank: [_Action(x.stage, _KINDS[x.kind], x.microbatch) for x in order]
        for rank, order in enumerate(schedule.orders)
    }
    if all(x.kind is ActionKind.FORWARD for x in schedule.orders[0]):
        for rank, order in enumerate(schedule.orders):
            orders[rank] += [_Action(x.stage, _ComputationType.FULL_BACKWARD, x.microbatch) for x in order]
    return orders
