"""What stages hold for a moment while their layers run, above what stays.

What the profile's layers find of the backward of later ones (`Leftover`) is not there where those are on later stages:
what comes from there lies in receive buffers, and what was sent is not freed yet. Nor is it freed in the backward of the
stage's own layers, as it is in the profile: the engine holds the outputs until the backward is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from gplan.core import LayerCost
from gplan.graph.boundary import PassThrough
from gplan.graph.down_sets import Bools, DownSets, Ints, Made, Output, Waiting

Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


@dataclass(frozen=True, kw_only=True)
class Workspaces:
    """Of every stage, a pair of positions of `downsets`, for one micro-batch."""

    layer_costs: Sequence[LayerCost]
    loss: LayerCost | None
    downsets: DownSets
    pass_through: PassThrough
    held_outputs: Sequence[Output]  # that the engine holds through a backward, as part of the stash
    saved_later: Sequence[Output]  # that only the readers keep: the reader here is the first one
    unsaved: Sequence[Output]  # that no layer keeps: part of the forward workspaces up to the last reader
    waiting: Sequence[Waiting]  # gradients of shared weights, each until the first user's is added to it
    kept_output_bytes: int  # of the model's outputs, that the loss keeps
    keeps_sent: bool  # as of `TransferMemory`

    def of_layers(
        self,
        direction: Direction,
        first: Ints,
        end: Ints,
        *,
        kept: Ints,
        outputs: Sequence[Output] = (),
        own_of_last: Ints | None = None,
    ) -> Ints:
        """[E]: the most while a layer runs, above what all of them leave behind, kept[L]; without the loss.

        In a forward without what was made before the stage and no layer keeps: it lies in receive buffers. In a backward
        with the gradients that only pass, which it holds all through; `outputs` are the part of kept[L] that is
        there while any of the layers runs, if it is sent. `own_of_last` are the workspaces of each layer as the last one.
        """
        own = self._bytes(direction)
        if direction == "forward":
            return self.downsets.running_peaks(
                first, end, kept=kept, own=own, own_of_last=own_of_last, outputs=outputs, transient=self.unsaved
            )
        peaks = self.downsets.running_peaks(
            first,
            end,
            kept=kept,
            own=own,
            own_of_last=own_of_last,
            leftovers=self._leftovers,
            outputs=outputs,
            waiting=self.waiting,
        )
        return peaks + self.pass_through.gradient_bytes(first, end)

    def above_stash(self, direction: Direction, first: Ints, end: Ints, *, unsaved_sent: Ints | int = 0) -> Ints:
        """[E]: the most while a layer or the loss runs, above the stash of all layers and, in a forward, `unsaved_sent`.

        That is the part of the outputs that lies in the forward workspaces and that the engine holds after it. While a
        layer runs, forward or backward, the stash of the layers after it is not there (yet, or any more).
        """
        outputs = self.held_outputs if direction == "backward" else ()
        peaks = self.of_layers(direction, first, end, kept=self._stashes, outputs=outputs) - unsaved_sent
        if self.loss:
            at_loss = np.maximum(peaks - self.loss.stash_bytes, _workspace(self.loss, direction))
            peaks = np.where(self._has_loss(end), at_loss, peaks)
        above: Ints = np.maximum(peaks, 0)
        return above

    def of_first_half(self, first: Ints, end: Ints) -> Ints:
        """[E]: the most in the first half of a split backward, above the stash of all layers.

        It frees nothing before all layers are through: what later layers and the loss made is there.
        """
        grown = np.array([x.grown_bytes for x in self.layer_costs], dtype=np.int64)
        own = np.array([x.first_half_workspace_bytes for x in self.layer_costs], dtype=np.int64)
        peaks = self.downsets.running_peaks(first, end, kept=-grown, own=own)
        if self.loss:
            at_loss = np.maximum(peaks + self.loss.grown_bytes, self.loss.first_half_workspace_bytes)
            peaks = np.where(self._has_loss(end), at_loss, peaks)
        return peaks

    def above_between(self, first: Ints, end: Ints) -> Ints:
        """[E]: the most in the second half of a split backward, above what is there between the halves.

        It goes back through the layers as a whole backward does, and frees what each left.
        """
        kept = np.array([x.between_bytes for x in self.layer_costs], dtype=np.int64)
        own = np.array([x.second_half_workspace_bytes for x in self.layer_costs], dtype=np.int64)
        return self.downsets.running_peaks(first, end, kept=kept, own=own, waiting=self.waiting)

    def above_recomputed_stash(self, first: Ints, end: Ints, again: Ints) -> Ints:
        """[E]: the most above `again` in a whole backward that recomputes.

        The backward of the loss comes before the layers run again. It leaves the gradient of the model's outputs, which
        counts when the last layer's backward runs. Outputs that only later stages keep are not made again.
        """
        of_last = None
        if any(x.gathering_bytes for x in self.layer_costs):
            of_last = np.array([x.last_backward_workspace_bytes for x in self.layer_costs], dtype=np.int64)
        forward, backward = (
            self.of_layers("forward", first, end, kept=self._stashes, outputs=self.saved_later),
            self.of_layers("backward", first, end, kept=self._stashes, outputs=self.saved_later, own_of_last=of_last),
        )
        peaks = np.maximum(forward, backward)
        if self.loss:
            at_loss = self.kept_output_bytes + self.loss.stash_bytes + self.loss.backward_workspace_bytes
            peaks = np.where(self._has_loss(end), np.maximum(peaks, at_loss - again), peaks)
        return peaks

    def alone(self, first: Ints, end: Ints) -> Ints:
        """[E]: the most that a layer, or the loss, holds above the checkpoint in a forward that keeps only that.

        What the last layer of a stage makes and sends is in the checkpoint.
        """
        own = self._stashes + self._bytes("forward")
        peaks = self.downsets.running_peaks(
            first,
            end,
            kept=np.zeros_like(own),
            own=own,
            own_of_last=own - self.checkpointed,
            transient=self.unsaved,
        )
        loss_bytes = self.loss.forward_workspace_bytes if self.loss else 0
        return np.where(self._has_loss(end), np.maximum(peaks, loss_bytes), peaks)

    def largest(self, direction: Direction, first: Ints, end: Ints) -> Ints:
        """[E]: the most that a layer, or the loss, holds, whatever is kept beside it."""
        peaks = self.of_layers(direction, first, end, kept=np.zeros_like(self._stashes))
        loss_bytes = _workspace(self.loss, direction) if self.loss else 0
        return np.maximum(peaks, np.where(self._has_loss(end), loss_bytes, 0))

    def beside_backward(self, first: Ints, end: Ints) -> Ints:
        """[E]: the gradients of shared weights that wait, at the most, and those that only pass, in a backward."""
        nothing = np.zeros_like(self._stashes)
        waiting = self.downsets.running_peaks(first, end, kept=nothing, own=nothing, waiting=self.waiting)
        return waiting + self.pass_through.gradient_bytes(first, end)

    @cached_property
    def checkpointed(self) -> Ints:
        """[L]: the part of each layer's stash and workspace that is output and held by the engine; 0 for the last layer."""
        found = np.zeros(len(self.layer_costs), dtype=np.int64)
        for (made, _), num_bytes in (*self.held_outputs, *(self.unsaved if self.keeps_sent else ())):
            if made is not None and made < len(found) - 1:
                found[made] += num_bytes
        return found

    @cached_property
    def _stashes(self) -> Ints:
        return np.array([x.stash_bytes for x in self.layer_costs], dtype=np.int64)

    def _bytes(self, direction: Direction) -> Ints:
        return np.array([_workspace(x, direction) for x in self.layer_costs], dtype=np.int64)

    @cached_property
    def _leftovers(self) -> list[Made]:
        return [(v, v + x.num_later, x.num_bytes) for v, cost in enumerate(self.layer_costs) for x in cost.leftovers]

    def _has_loss(self, end: Ints) -> Bools:
        has_loss: Bools = end == self.downsets.size - 1
        return has_loss


def _workspace(cost: LayerCost, direction: Direction) -> int:
    return cost.forward_workspace_bytes if direction == "forward" else cost.backward_workspace_bytes
