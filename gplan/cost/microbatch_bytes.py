"""What a stage holds for each micro-batch, from what its layers keep and what crosses its two cuts: written once.

The terms may be numbers, or arrays with an entry for each candidate stage: the parts are sums of them. So the evaluator
and the bounds that add up layers and cuts share the formulas.

How long it holds what it sends and receives depends on the engine that trains (`TransferMemory`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Term = TypeVar("Term")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferMemory:
    """How long an engine holds what stages send and receive."""

    most_buffers: int | None = None  # receive buffers at a time, in micro-batches; None: all of the step
    keeps_sent: bool = True  # outputs and gradients that were sent, until the step ends
    frees_outputs: bool = False  # whether an output that only later stages keep is freed once it is sent

    def num_buffers(self, num_microbatches: int) -> int:
        """Micro-batches for which there are receive buffers."""
        return num_microbatches if self.most_buffers is None else min(num_microbatches, self.most_buffers)


PREALLOCATED = TransferMemory()
"""gplan's own (`runtime/pass_state.py`), on every version of torch: buffers for all micro-batches; what was sent is kept."""

MEGATRON = TransferMemory(most_buffers=1, keeps_sent=False, frees_outputs=True)
"""Megatron-LM's: an activation is received when its forward is next, a gradient when its backward is, and the elements
of an output are freed after it was sent (`deallocate_output_tensor` in pipeline_parallel/schedules.py)."""


JUST_IN_TIME = TransferMemory(most_buffers=1, keeps_sent=False)
"""nanotron's: the same, but an output is kept until its backward (`PipelineTrainBatchState` in pipeline_parallel/state.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchTerms(Generic[Term]):
    """Bytes of one micro-batch on a stage. What does not apply is 0, which is also the default."""

    layers_stash: Term | int = 0  # that the layers keep for their backward
    layers_pending: Term | int = 0  # that layers and loss keep between the halves of a split backward
    loss_stash: Term | int = 0  # that the loss keeps, on the last stage
    received_activation: Term | int = 0  # over the cut before, from another device
    sent_gradient: Term | int = 0  # back over the cut before, without what is sent out of a receive buffer
    sent_activation: Term | int = 0  # over the cut after, to another device
    received_gradient: Term | int = 0  # back over the cut after, from another device
    output: Term | int = 0  # what crosses the cut after; after the last stage, the model's outputs that are kept
    output_before_loss: Term | int = 0  # the same, but 0 on the last stage: the loss's backward comes first there
    output_unsaved: Term | int = 0  # the part of the output that no layer keeps, without what only passes
    output_saved_later: Term | int = 0  # the part of the layers' stash that is output and that only later stages keep
    pass_through: Term | int = 0  # the part of the output that was received: it lies in the receive buffers
    passing_sent: Term | int = 0  # `pass_through` where the next stage is on another device, else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchBytes(Generic[Term]):
    """The parts of `StageBytes` that a stage holds for each micro-batch."""

    stash: Term  # from the forward to the backward, without recompute
    checkpoint: Term  # the same with recompute
    recomputed_stash: Term  # stash of a recomputed forward
    pending: Term  # between the halves of a split backward
    sent: Term  # after the backward: what was sent on and back
    received: Term  # receive buffers


def microbatch_bytes(terms: MicrobatchTerms[Term], transfers: TransferMemory = PREALLOCATED) -> MicrobatchBytes[Any]:
    """What a stage holds for one micro-batch."""
    x: MicrobatchTerms[Any] = terms
    if not transfers.keeps_sent:
        frees = transfers.frees_outputs
        return MicrobatchBytes(
            stash=x.layers_stash
            - (x.output_saved_later if frees else 0)
            + x.received_activation
            - x.pass_through
            + x.loss_stash,
            checkpoint=x.received_activation - x.pass_through + x.loss_stash,
            recomputed_stash=x.layers_stash
            - x.output_saved_later
            + (0 if frees else x.received_activation)
            - x.pass_through,
            pending=x.layers_pending,
            sent=0 * x.sent_activation,
            received=x.received_gradient + (0 if frees else x.received_activation),
        )
    return MicrobatchBytes(
        stash=x.layers_stash + x.output_unsaved + x.loss_stash,
        checkpoint=x.output - x.pass_through + x.loss_stash,
        recomputed_stash=x.layers_stash - x.output_saved_later + x.output_before_loss - x.pass_through,
        pending=x.layers_pending + x.sent_gradient,
        sent=x.sent_activation - x.passing_sent + x.sent_gradient,
        received=x.received_activation + x.received_gradient,
    )
