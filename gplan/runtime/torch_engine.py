"""The torch engine: runs the stages of one rank in the order of a schedule, by sends, receives and autograd.

    rank 0   0F0 send  0F1 send       receive 0B0       receive 0B1
    rank 1   receive  1F0  receive  1B0 send  1F1  1B1 send

Only public functions of torch.distributed carry tensors, so the engine is the same on every version of torch. Sends and
receives are asynchronous. On a CPU receives are posted early, as gloo sends only to a posted one; on GPUs a pair of ranks
issues its transfers in the same order, as NCCL needs (`device_steps`).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from gplan.core import Action
from gplan.runtime.device_steps import Await, Free, Receive, Send, Step, device_steps
from gplan.runtime.pass_state import Engine, EnginePass, Gradients, PassState
from gplan.runtime.stage_module import StageModule
from gplan_profiler.torch_compat import is_profiler_running

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


class TorchEngine(Engine["_SentPass"]):
    """Runs the stages of this rank; `group` has one rank per device."""

    def __init__(self, stages: Sequence[StageModule], *, device: torch.device, group: dist.ProcessGroup) -> None:
        super().__init__(stages, device=device)
        self._group = group

    def run(self, work: EnginePass) -> list[Tensor]:
        """Run one pass; return its micro-batches' losses on the rank of the last stage, else an empty list."""
        state = self._begun(work, lambda: _SentPass(work, self._stages, self._device, self._group))
        is_named = is_profiler_running()  # naming steps takes as long as all other work per action
        self.recorder.heartbeat.enter_wait("neighbours")
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="FSDP2-wrapped module .* returned a view"
            )  # no layer writes to one
            for step in state.steps:
                if isinstance(step, Await):
                    state.wait_for(step.made)
                elif isinstance(step, Free):
                    state.free(step.made)
                else:
                    with record_function(f"PP:{step}") if is_named else _NOTHING:  # as torch's pipelining names them
                        if isinstance(step, Send):
                            state.send(step.made)
                        elif isinstance(step, Receive):
                            state.post_receive(step.made)
                        else:
                            self._run_action(step, state)
                            self.recorder.heartbeat.enter_wait("neighbours")  # until its next action it can only wait
        return state.end()


class _SentPass(PassState):
    """A pass whose tensors are sent from rank to rank. A missing gradient is sent as a marker (`MissingGradients`)."""

    def __init__(
        self, work: EnginePass, stages: Collection[int], device: torch.device, group: dist.ProcessGroup
    ) -> None:
        super().__init__(work, device)
        self._group, self._devices = group, work.schedule.devices
        every = device_steps(work.schedule, in_pairs=device.type != "cpu")
        self.steps: Sequence[Step] = every[self._devices[min(stages)]]
        self._of_inputs, self._of_outputs = ({x: MissingGradients() for x in stages} for _ in range(2))
        self._receiving: dict[Action, list[dist.Work]] = {}
        self._sending: dict[Action, list[tuple[dist.Work, Tensor]]] = {}

    def end(self) -> list[Tensor]:
        for made in list(self._sending):
            self.free(made)
        for missing in (*self._of_inputs.values(), *self._of_outputs.values()):
            missing.end_pass()
        return super().end()

    def forget(self) -> None:
        super().forget()
        self._receiving.clear()
        self._sending.clear()

    def send(self, made: Action) -> None:
        """Send the output of an action."""
        target, sending = self._devices[made.receiver], []
        for tensor in self.take_sent(made):
            if tensor is not None:
                work = dist.isend(tensor, group=self._group, group_dst=target)
                assert work is not None
                sending.append((work, tensor))
        self._sending[made] = sending

    def free(self, made: Action) -> None:
        """Wait until the output of an action was sent, and drop it."""
        for work, _ in self._sending.pop(made):
            work.wait()

    def post_receive(self, made: Action) -> None:
        """Begin to receive the output of another rank's action."""
        source = self._devices[made.stage]
        works = [dist.irecv(buffer, group=self._group, group_src=source) for buffer in self.allocate(made)]
        self._receiving[made] = [x for x in works if x is not None]

    def wait_for(self, made: Action) -> None:
        """Wait until the output of another rank's action is there."""
        for work in self._receiving.pop(made):
            work.wait()

    def received_gradients(self, stage: int, microbatch: int, buffers: Gradients) -> Gradients:
        missing = self._of_outputs[stage]
        return tuple(missing.decode(place, x) for place, x in enumerate(buffers))

    def as_sent(self, stage: int, gradients: Gradients) -> Gradients:
        missing = self._of_inputs[stage]
        return tuple(
            missing.encode(place, torch.empty(spec.shape, dtype=spec.dtype, device=self._device))
            if x is None and spec.requires_grad
            else x
            for place, (x, spec) in enumerate(zip(gradients, self.boundary(stage), strict=True))
        )


_NOTHING: AbstractContextManager[None] = nullcontext()
