"""The torch engine: the only adapter to torch.distributed.pipelining; runs the stages of one rank in gplan's own
schedule.

Every private name of torch that gplan uses is here, each with a contract test: `_PipelineScheduleRuntime` with
`_prepare_schedule_with_comms`, its lowered orders and its handling of losses, `_Action`, `_ComputationType`,
`record_function` as it names actions and the check for a profiler, and of a stage its backward methods, `fwd_cache`,
`bwd_cache`, `args_recv_info`, `grad_recv_info`, `_retrieve_recv_grads`, `stage_backward`, `perform_reduce_grad`.

torch keeps all it sends until the step ends and allocates receive buffers for all micro-batches; the memory model counts
both. Between two stages of one rank the tensor itself is passed on and freed after use.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining._backward import stage_backward
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

from gplan.core import Action, ActionKind, Schedule
from gplan.cost.microbatch_bytes import transfer_memory
from gplan.runtime.capture_cache import CapturedModel
from gplan.runtime.recorder import ActionRecorder
from gplan.runtime.stage_module import StageModule
from gplan_profiler.backward.split_backward import SecondHalf, first_half
from gplan_profiler.capture.chain import Tensors

LossFn = Callable[[Tensors, int], Tensor]
"""(outputs of the last stage, micro-batch) -> loss of the micro-batch, a scalar."""

_KINDS = {
    ActionKind.FORWARD: _ComputationType.FORWARD,
    ActionKind.BACKWARD: _ComputationType.FULL_BACKWARD,
    ActionKind.INPUT_GRADIENT: _ComputationType.BACKWARD_INPUT,
    ActionKind.WEIGHT_GRADIENT: _ComputationType.BACKWARD_WEIGHT,
}
_RECEIVES = (_ComputationType.RECV_F, _ComputationType.RECV_B)
_AWAITED = {
    _ComputationType.FORWARD: _ComputationType.RECV_F,
    _ComputationType.FULL_BACKWARD: _ComputationType.RECV_B,
    _ComputationType.BACKWARD_INPUT: _ComputationType.RECV_B,
}
_MOST_BUFFERS = transfer_memory(torch.__version__).most_buffers
_ACTIONS_AHEAD = 12 if _MOST_BUFFERS is None else _MOST_BUFFERS - 1
"""How many forwards or backwards before its use a receive is posted, as a sender waits until it is. Where a receive
allocates its buffer, the number of buffers decides."""
_OF_SHARDS = (_ComputationType.UNSHARD, _ComputationType.RESHARD, _ComputationType.REDUCE_GRAD)
_FORWARDS = (_ComputationType.FORWARD, _ComputationType.SEND_F, _ComputationType.RECV_F)
_TORCH_LOG = "torch.distributed.pipelining.schedules"
_NAMING = "record_function"  # in that module


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
        return _has_backward(self.schedule)


_TOP_BYTE, _OTHER_BYTE = 0xFF, 0xF5  # of every element
_TOP = -1 if sys.byteorder == "little" else 0


class MissingGradients:
    """Which tensors of one boundary may have no gradient; sender and receiver derive the same set.

    Where a loss does not use all outputs of a stage, the plain model has no gradient, and its optimizer leaves those
    parameters alone. Sending zeros instead would let weight decay and momentum move them, and give NaN where a
    derivative is infinite. Every boundary tensor has its message, so a missing gradient is sent as a marker: elements
    whose top byte is 0xFF and whose other bytes are 0xF5, in every floating-point format a NaN with a payload that
    arithmetic does not produce. Reading a marker synchronizes with a GPU. So after the first pass only tensors whose
    gradient was missing in it are checked; if another tensor's gradient is missing later, zeros are sent.
    """

    def __init__(self) -> None:
        self._found: set[int] = set()  # by their places in the boundary
        self._is_first_pass = True

    def end_pass(self) -> None:
        """End a pass; after the first, the set is fixed."""
        self._is_first_pass = False

    def encode(self, place: int, empty: Tensor) -> Tensor:
        """Fill `empty` for a missing gradient: with the marker, or with zeros if the receiver does not check for it."""
        if not empty.numel() or not self._may_be_absent(place):
            return empty.zero_()
        self._found.add(place)
        mark = torch.full((empty.numel(), empty.itemsize), _OTHER_BYTE, dtype=torch.uint8, device=empty.device)
        mark[:, _TOP].fill_(_TOP_BYTE)
        return mark.view(empty.dtype).view(empty.shape)

    def decode(self, place: int, gradient: Tensor | None) -> Tensor | None:
        """Return the received gradient, or None for a marker."""
        if gradient is None or not self._may_be_absent(place):
            return gradient
        first = gradient.reshape(-1)[:1].view(torch.uint8).tolist()  # a tensor without elements holds no marker
        if not first or first.pop(_TOP) != _TOP_BYTE or any(byte != _OTHER_BYTE for byte in first):
            return gradient
        self._found.add(place)
        return None

    def _may_be_absent(self, place: int) -> bool:
        return self._is_first_pass or place in self._found


class TorchEngine:
    """Runs the stages of this rank; `group` has one rank per device."""

    def __init__(self, stages: Sequence[StageModule], *, device: torch.device, group: dist.ProcessGroup) -> None:
        """`stages` are in rising order."""
        self.recorder = ActionRecorder()
        self._stages, self._device, self._group = stages, device, group
        self._runtimes: dict[tuple[CapturedModel, bool, int], _Runtime] = {}

    def run(self, work: EnginePass) -> list[Tensor]:
        """Run one pass; return its micro-batches' losses on the rank of the last stage, else an empty list."""
        key = work.captured, work.trains, work.schedule.num_microbatches
        if key not in self._runtimes:
            rank = _RankContext(recorder=self.recorder, stages=frozenset(stage.index for stage in self._stages))
            timed = [_TimedStage(x, work, rank, device=self._device, group=self._group) for x in self._stages]
            self._runtimes[key] = _Runtime(timed, work.schedule, rank)
        return self._runtimes[key].run(work)

    def forget(self, old: Collection[CapturedModel]) -> None:
        """Drop the runtimes of captures that are no longer used."""
        self._runtimes = {key: x for key, x in self._runtimes.items() if key[0] not in old}

    def reduce_gradients(self) -> None:
        """Reduce-scatter the gradients of sharded stages over the replicas, after a step's last pass. Collective."""
        for stage in self._stages:
            if stage.shards is not None:
                stage.shards.fill_gradients()
                self._timed(stage.index)[0].perform_reduce_grad(1)  # and frees the parameters

    def buffers(self, stage: int) -> list[Tensor]:
        """Return the receive buffers of a stage: of activations and of gradients."""
        return [x for timed in self._timed(stage) for x in timed.receive_buffers()]

    def _timed(self, stage: int) -> list[_TimedStage]:
        """A stage in each of the runtimes."""
        return [x for runtime in self._runtimes.values() for x in runtime.timed if x.stage_index == stage]


@dataclass(slots=True)
class _RankContext:
    """What the stages of a rank share in the passes of one runtime."""

    recorder: ActionRecorder
    stages: Collection[int]  # on this rank
    loss_weight: float = 1.0

    def note_wait(self) -> None:
        """Record in the heartbeat that between its actions this rank can only wait for other stages."""
        self.recorder.heartbeat.enter_wait("neighbours")


class _TimedStage(PipelineStage):
    """Records every action, sets the module's micro-batch, sends contiguous gradients, and splits backwards.

    torch sends zeros for a missing gradient; here the previous stage gets None (see `MissingGradients`).
    """

    submod: StageModule

    def __init__(
        self,
        stage: StageModule,
        work: EnginePass,
        context: _RankContext,
        *,
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> None:
        input_args, output_args = (
            tuple(spec.on_meta() for spec in work.captured.boundary(x)) for x in (stage.index, stage.index + 1)
        )
        super().__init__(stage, stage.index, work.schedule.num_stages, device, input_args, output_args, group=group)
        self.context = context
        self.missing_of_inputs, self.missing_of_outputs = MissingGradients(), MissingGradients()

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        action = self._begin_action(ActionKind.FORWARD, fwd_chunk_id)
        with self.context.recorder.note(action):
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self.context.note_wait()
        if self.stage_index - 1 in self.context.stages:  # the graph keeps what it needs
            for info in self.args_recv_info[fwd_chunk_id]:
                info.buffer = None
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if not self.has_backward:
            return
        action = self._begin_action(ActionKind.BACKWARD if full_backward else ActionKind.INPUT_GRADIENT, bwd_chunk_id)
        with self.context.recorder.note(action):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
            if not self.is_first:
                self.bwd_cache[bwd_chunk_id] = self._outgoing_gradients(bwd_chunk_id, self.bwd_cache[bwd_chunk_id])
        self.context.note_wait()
        if self.stage_index + 1 in self.context.stages:
            for info in self.grad_recv_info[bwd_chunk_id]:
                info.buffer = None

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        action = self._begin_action(ActionKind.WEIGHT_GRADIENT, bwd_chunk_id)
        with self.context.recorder.note(action):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self.context.note_wait()

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], Any]:
        if backward_type == "weight":
            half: SecondHalf = bwd_kwargs["param_groups"]
            half.run()
            return (), None
        outputs, gradients = bwd_kwargs["stage_output"], bwd_kwargs["output_grads"]
        outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        if gradients is None:  # the outputs are the loss
            gradients = [torch.full_like(x, self.context.loss_weight) for x in outputs]
        if backward_type == "input":
            bwd_kwargs["stage_output"] = ()  # else the caller keeps them until the second half
            return first_half(outputs, gradients, bwd_kwargs["input_values"])
        roots = [(x, y) for x, y in zip(outputs, gradients, strict=True) if y is not None]
        if not roots:
            return (None,) * len(bwd_kwargs["input_values"]), None
        bwd_kwargs["stage_output"], bwd_kwargs["output_grads"] = zip(*roots, strict=True)
        # Not by torch's method, which would keep the gathered parameters of each layer after its backward.
        return stage_backward(*(bwd_kwargs[x] for x in ("stage_output", "output_grads", "input_values"))), None

    def _outgoing_gradients(self, microbatch: int, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Return the input gradients as they are sent; None for inputs that need none."""
        found: list[Tensor | None] = []
        for place, (gradient, info) in enumerate(zip(gradients, self.args_recv_info[microbatch], strict=True)):
            meta = info.tensor_meta
            if gradient is None and meta is not None and meta.requires_grad:
                gradient = self.missing_of_inputs.encode(place, meta.to_tensor(self.device))
            found.append(None if gradient is None else gradient.contiguous())
        return tuple(found)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor | None, ...]:
        received = super()._retrieve_recv_grads(bwd_chunk_id)
        return tuple(self.missing_of_outputs.decode(place, x) for place, x in enumerate(received))

    def receive_buffers(self) -> list[Tensor]:
        """Return the buffers of activations and of gradients."""
        received = [*self.args_recv_info.values(), *self.grad_recv_info.values()]
        return [info.buffer for infos in received for info in infos if info.buffer is not None]

    def _begin_action(self, kind: ActionKind, microbatch: int) -> Action:
        self.submod.enter_action(microbatch)
        return Action(self.stage_index, kind, microbatch)


class _Runtime(_PipelineScheduleRuntime):
    """torch's runtime with the actions of a gplan schedule.

    torch expects losses in the order of the micro-batches; here they are stored by number.
    """

    def __init__(self, stages: list[_TimedStage], schedule: Schedule, rank: _RankContext) -> None:
        super().__init__(stages, schedule.num_microbatches, loss_fn=_no_loss, scale_grads=False)  # type: ignore[no-untyped-call]
        self.context, self.timed = rank, stages
        self._losses: dict[int, Tensor] = {}
        self._at_end: LossFn = lambda _outputs, _microbatch: torch.zeros(())
        self._prepare_schedule_with_comms(_torch_orders(schedule))
        orders = self.pipeline_order_with_comms
        orders[self.rank] = [x for x in orders[self.rank] if x.computation_type not in _OF_SHARDS]
        if not _has_backward(schedule):
            orders[self.rank] = [x for x in orders[self.rank] if x.computation_type in _FORWARDS]
        if stages[0].device.type == "cpu":
            orders[self.rank] = advance_receives(orders[self.rank])

    def run(self, work: EnginePass) -> list[Tensor]:
        """Run all actions; return the losses by micro-batch if the last stage is on this rank."""
        self.context.loss_weight, self._at_end = work.loss_weight, work.loss_fn
        self._losses.clear()
        step = self.step if work.trains else self.eval
        self.context.note_wait()
        with _quiet_torch(), warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="FSDP2-wrapped module .* returned a view"
            )  # no layer writes to one
            step(*(work.inputs if 0 in self.context.stages else ()), return_outputs=False)
        for stage in self.timed:
            stage.missing_of_inputs.end_pass()
            stage.missing_of_outputs.end_pass()
        return [self._losses[m].detach() for m in sorted(self._losses)]

    def _assert_unsharded(self, stage: Any) -> None:
        """Sharded parameters are gathered by `ShardedStage`, not by the schedule."""

    def _maybe_compute_loss(
        self, stage: _TimedStage, output: Any, _target_mbs: Any, mb_index: int, _loss_kwargs: Any = None
    ) -> None:
        if stage.is_last:
            outputs = output if isinstance(output, tuple) else (output,)
            with self.context.recorder.note(Action(stage.stage_index, ActionKind.FORWARD, mb_index)):
                self._losses[mb_index] = self._at_end(outputs, mb_index)
            # torch would keep the outputs until the backward and then detach them from a graph whose second half may still
            # be to come.
            stage.fwd_cache[mb_index] = (), stage.fwd_cache[mb_index][1]

    def _maybe_get_loss(self, stage: _TimedStage, mb_index: int) -> Tensor | None:
        """Return the loss to differentiate; the stored one is detached from the graph."""
        if not stage.is_last:
            return None
        loss = self._losses[mb_index]
        self._losses[mb_index] = loss.detach()
        return loss


def advance_receives(order: Sequence[_Action]) -> list[_Action]:
    """Post each receive some forwards or backwards before the one that needs it, so that early data need not wait.

    Receives keep their order, which is the order in which every sender sends.
    """
    receives = [x for x in order if x.computation_type in _RECEIVES]
    place = {(x.computation_type, x.stage_index, x.microbatch_index): i for i, x in enumerate(receives, start=1)}
    computing = [x for x in order if x.computation_type in _AWAITED]
    awaited = ((_AWAITED[x.computation_type], x.stage_index, x.microbatch_index) for x in computing)
    needed = list(accumulate((place.get(need, 0) for need in awaited), max))
    found, num_begun, num_done = list[_Action](), 0, 0
    for action in order:
        if action.computation_type in _RECEIVES:
            continue
        if action.computation_type in _AWAITED:
            until = needed[min(num_done + _ACTIONS_AHEAD, len(needed) - 1)]
            found += receives[num_begun:until]
            num_begun, num_done = until, num_done + 1
        found.append(action)
    return found + receives[num_begun:]


def _no_loss(*_: Any) -> Tensor:
    """Makes torch expect backwards; never called."""
    raise AssertionError("the loss is computed by the runtime itself")


@contextmanager
def _quiet_torch() -> Iterator[None]:
    """Silence torch's log of its whole schedule after a failed action, and skip its naming of actions.

    The naming takes as long as all of gplan's work per action; it stays while a profiler runs. torch's function is
    replaced in its module, for the whole process, while a pass runs.
    """
    log, of_module = logging.getLogger(_TORCH_LOG), vars(schedules)
    was_disabled, naming = log.disabled, of_module[_NAMING]
    log.disabled = True
    if not torch.autograd.profiler._is_profiler_enabled:
        of_module[_NAMING] = nullcontext
    try:
        yield
    finally:
        log.disabled, of_module[_NAMING] = was_disabled, naming


def _torch_orders(schedule: Schedule) -> dict[int, list[_Action | None]]:
    """Return the orders as torch's runtime takes them; it requires backwards in an evaluation too."""
    orders: dict[int, list[_Action | None]] = {
        rank: [_Action(x.stage, _KINDS[x.kind], x.microbatch) for x in order]
        for rank, order in enumerate(schedule.orders)
    }
    if not _has_backward(schedule):
        for rank, order in enumerate(schedule.orders):
            orders[rank] += [_Action(x.stage, _ComputationType.FULL_BACKWARD, x.microbatch) for x in reversed(order)]
    return orders


def _has_backward(schedule: Schedule) -> bool:
    return any(x.kind is not ActionKind.FORWARD for x in schedule.orders[0])
