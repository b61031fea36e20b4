"""THE adapter to torch.distributed.pipelining: one stage on one rank, driven by gplan's own schedule.

Everything private that gplan uses of torch is here, each with a contract test: `_PipelineScheduleRuntime` with
`_prepare_schedule_with_comms`, `_Action`, `_ComputationType`, and of a stage `bwd_cache`, `args_recv_info`,
`grad_recv_info`. The runtime keeps every sent tensor until the step ends and allocates receive buffers for all
micro-batches; the memory model counts both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

from gplan.execute.recorder import Recorder
from gplan.execute.stage import StageModule
from gplan.nouns import Action, ActionKind, Schedule
from profiler.capture.chain import Tensors, TensorSpec

MicrobatchLoss = Callable[[Tensors, int], Tensor]
"""(outputs of the last stage, micro-batch) -> scalar; the losses of the micro-batches add up to the step's loss."""

_KINDS = {ActionKind.FORWARD: _ComputationType.FORWARD, ActionKind.BACKWARD: _ComputationType.FULL_BACKWARD}


class TorchEngine:
    """The stage of this rank; the default process group holds one rank per stage."""

    def __init__(
        self,
        module: StageModule,
        *,
        index: int,
        schedule: Schedule,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        loss: MicrobatchLoss,
    ) -> None:
        self.recorder = Recorder()
        self._index = index
        self._is_first, self._is_last = index == 0, index == schedule.num_stages - 1
        self._stage = _TimedStage(
            module,
            index,
            schedule.num_stages,
            torch.device("cpu"),
            input_args=tuple(spec.on_meta() for spec in inputs),
            output_args=tuple(spec.on_meta() for spec in outputs),
        )
        self._stage.recorder = self.recorder
        self._loss = loss
        self._microbatches = torch.arange(schedule.num_microbatches)
        self._runtime = _PipelineScheduleRuntime(  # type: ignore[no-untyped-call]
            [self._stage], schedule.num_microbatches, loss_fn=self._timed_loss, scale_grads=False
        )
        self._runtime._prepare_schedule_with_comms(_torch_orders(schedule))

    def step(self, inputs: Tensors) -> float | None:
        """All forwards and backwards of one mini-batch; the loss on the last rank, None on the others.

        `inputs` are the mini-batch's tensors, used by the first rank only.
        """
        losses: list[Tensor] = []
        args = inputs if self._is_first else ()
        target = self._microbatches if self._is_last else None
        self._runtime.step(*args, target=target, losses=losses, return_outputs=False)
        return float(sum(float(loss.detach()) for loss in losses)) if self._is_last else None

    def buffers(self) -> list[Tensor]:
        """The receive buffers that the runtime holds on to."""
        received = [*self._stage.args_recv_info.values(), *self._stage.grad_recv_info.values()]
        return [info.buffer for infos in received for info in infos if info.buffer is not None]

    def _timed_loss(self, output: Any, microbatch: Tensor) -> Tensor:
        number = int(microbatch)
        outputs = output if isinstance(output, tuple) else (output,)
        with self.recorder.note(Action(self._index, ActionKind.FORWARD, number)):
            return self._loss(outputs, number)


class _TimedStage(PipelineStage):
    """Records every action, tells the module its micro-batch, and sends only contiguous gradients."""

    recorder: Recorder

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        module = self.submod
        assert isinstance(module, StageModule)
        module.microbatch = fwd_chunk_id
        with self.recorder.note(Action(self.stage_index, ActionKind.FORWARD, fwd_chunk_id)):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        with self.recorder.note(Action(self.stage_index, ActionKind.BACKWARD, bwd_chunk_id)):
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
            gradients = self.bwd_cache[bwd_chunk_id]
            self.bwd_cache[bwd_chunk_id] = tuple(x.contiguous() if x is not None else None for x in gradients)


def _torch_orders(schedule: Schedule) -> dict[int, list[_Action | None]]:
    return {
        rank: [_Action(x.stage, _KINDS[x.kind], x.microbatch) for x in order]
        for rank, order in enumerate(schedule.orders)
    }
