"""What a stage holds for each micro-batch, from what its layers keep and what crosses its two cuts: written once.

The terms may be numbers, or arrays with an entry for each candidate stage: the parts are sums of them. So the evaluator
and the bounds that add up layers and cuts share the formulas.

What it holds of what it sends and receives depends on the engine that trains (`TransferMemory`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from gplan.schedules.transfers import RECEIVES_AHEAD

Term = TypeVar("Term")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferMemory:
    """What an engine holds of what stages send and receive. All have a buffer for each receive from when it is posted."""

    receives_ahead: int = 0  # passes before the one that needs it that a receive is posted
    keeps_sent: bool = False  # outputs until their backward, and gradients for a while after they were sent
    frees_outputs: bool = False  # whether an output that only later stages keep is freed once it is sent


GPLAN = TransferMemory(receives_ahead=RECEIVES_AHEAD, keeps_sent=True)
"""gplan's own engines (`gplan/schedules/transfers.py`)."""

MEGATRON = TransferMemory(frees_outputs=True)
"""Megatron-LM's: an activation is received when its forward is next, a gradient when its backward is, what is sent is waited
for, and the elements of an output are freed then (`deallocate_output_tensor` in pipeline_parallel/schedules.py)."""

NANOTRON = TransferMemory()
"""nanotron's: the same, but an output is kept until its backward (`PipelineTrainBatchState` in pipeline_parallel/state.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchTerms(Generic[Term]):
    """Bytes of one micro-batch on a stage. What does not apply is 0, which is also the default."""

    layers_stash: Term | int = 0  # that the layers keep for their backward
    layers_pending: Term | int = 0  # that layers and loss keep between the halves of a split backward
    loss_stash: Term | int = 0  # that the loss keeps, on the last stage
    received_activation: Term | int = 0  # over the cut before, from another device
    sent_gradient: Term | int = 0  # back over the cut before, without what is sent out of a receive buffer
    received_gradient: Term | int = 0  # back over the cut after, from another device
    output: Term | int = 0  # what crosses the cut after; after the last stage, the model's outputs that are kept
    output_before_loss: Term | int = 0  # the same, but 0 on the last stage: the loss's backward comes first there
    output_unsaved: Term | int = 0  # the part of the output that no layer keeps, without what only passes
    output_saved_later: Term | int = 0  # the part of the layers' stash that is output and that only later stages keep
    pass_through: Term | int = 0  # the part of the output that was received: it lies in the receive buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchBytes(Generic[Term]):
    """The parts of `StageBytes` that a stage holds for each micro-batch."""

    stash: Term  # from the forward to the backward, without recompute
    checkpoint: Term  # the same with recompute
    recomputed_stash: Term  # stash of a recomputed forward
    pending: Term  # between the halves of a split backward
    sent: Term  # a gradient that was sent back
    received_activation: Term
    received_gradient: Term


def microbatch_bytes(terms: MicrobatchTerms[Term], transfers: TransferMemory = GPLAN) -> MicrobatchBytes[Any]:
    """What a stage holds for one micro-batch."""
    x: MicrobatchTerms[Any] = terms
    if not transfers.keeps_sent:
        again = x.layers_stash - x.output_saved_later
        return MicrobatchBytes(
            stash=(again if transfers.frees_outputs else x.layers_stash) + x.loss_stash,
            checkpoint=x.loss_stash,
            recomputed_stash=again,
            pending=x.layers_pending,
            sent=0 * x.sent_gradient,
            received_activation=x.received_activation - x.pass_through,
            received_gradient=x.received_gradient,
        )
    return MicrobatchBytes(
        stash=x.layers_stash + x.output_unsaved + x.loss_stash,
        checkpoint=x.output - x.pass_through + x.loss_stash,
        recomputed_stash=x.layers_stash - x.output_saved_later + x.output_before_loss - x.pass_through,
        pending=x.layers_pending,
        sent=x.sent_gradient,
        received_activation=x.received_activation,
        received_gradient=x.received_gradient,
    )
