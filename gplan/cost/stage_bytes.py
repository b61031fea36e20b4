"""What a stage holds for each micro-batch, from what its layers keep and what crosses its two cuts: written once.

The terms may be numbers, arrays with an entry for each candidate stage, or expressions of a linear program: the parts
are sums of them. So the evaluator, the bounds that add up layers and cuts, and the mixed-integer program share the
formulas.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Term = TypeVar("Term")


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchTerms(Generic[Term]):
    """Bytes of one micro-batch on a stage. What does not apply is 0, which is also the default."""

    layers_stash: Term | int = 0  # that the layers keep for their backward
    layers_pending: Term | int = 0  # that layers and loss keep between the halves of a split backward
    loss_stash: Term | int = 0  # that the loss keeps, on the last stage
    received_activation: Term | int = 0  # over the cut before, from another device
    sent_gradient: Term | int = 0  # back over the cut before, to another device
    sent_activation: Term | int = 0  # over the cut after, to another device
    received_gradient: Term | int = 0  # back over the cut after, from another device
    output: Term | int = 0  # what crosses the cut after; after the last stage, the model's outputs that are kept
    output_before_loss: Term | int = 0  # the same, but 0 on the last stage: the loss's backward comes first there
    output_unsaved: Term | int = 0  # the part of the output that no layer keeps
    pass_through: Term | int = 0  # the part of the output that was received: it lies in the receive buffers
    passing_unsaved: Term | int = 0  # the part of that which no layer keeps
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


def microbatch_bytes(terms: MicrobatchTerms[Term]) -> MicrobatchBytes[Any]:
    """What a stage holds for one micro-batch."""
    x: MicrobatchTerms[Any] = terms
    return MicrobatchBytes(
        stash=x.layers_stash + x.output_unsaved - x.passing_unsaved + x.loss_stash,
        checkpoint=x.output - x.pass_through + x.loss_stash,
        recomputed_stash=x.layers_stash + x.output_before_loss - x.pass_through,
        pending=x.layers_pending + x.sent_gradient,
        sent=x.sent_activation - x.passing_sent + x.sent_gradient,
        received=x.received_activation + x.received_gradient,
    )
