"""From a profile to the cost and the memory of every candidate stage: layers [i, j) at a micro-batch size.

A stage costs `overhead_s` plus the sum of its layers, plus the loss where it holds the last layer. Optimizer time,
state and workspace are shared out by the bytes that are trained. The first backward of a step costs something else than
the others; each of the M gets its share of the difference. Where the devices are cores of one host, all of it takes
longer the more of them compute (`contention`). Between two profiled micro-batch sizes costs are interpolated, and a note
says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from gplan.interpolation import cost_at
from gplan.memory import StageBytes
from gplan.nouns import LayerCost, Profile, StageCost

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class ChainCosts:
    """Costs of every run of consecutive layers of a profile at one micro-batch size, M micro-batches a step."""

    profile: Profile
    microbatch_size: int
    num_microbatches: int
    num_stages: int = 1  # devices that compute side by side

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.profile.layers)

    @cached_property
    def layer_costs(self) -> tuple[LayerCost, ...]:
        """Each layer's costs at this micro-batch size."""
        return tuple(cost_at(layer.costs, self.microbatch_size) for layer in self.profile.layers)

    @cached_property
    def loss(self) -> LayerCost | None:
        """The loss's costs at this micro-batch size."""
        return cost_at(self.profile.loss, self.microbatch_size) if self.profile.loss else None

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of these costs must know."""
        sizes = self.profile.microbatch_sizes
        if self.microbatch_size in sizes:
            return ()
        return (f"costs at micro-batch size {self.microbatch_size} are interpolated between {sizes}",)

    @cached_property
    def forward_s(self) -> Floats:
        """[L+1, L+1]: seconds of the forward of layers [i, j) without overhead; the loss is in the last layer."""
        return _segment_sums(*self._seconds(lambda cost: cost.forward.median_s))

    @cached_property
    def backward_s(self) -> Floats:
        """[L+1, L+1]: mean seconds of a step's backwards of layers [i, j), without recompute and overhead."""
        return _segment_sums(*self._seconds(self._mean_backward_s))

    @cached_property
    def recompute_s(self) -> Floats:
        """[L+1, L+1]: seconds that recomputing layers [i, j) adds; the loss is not recomputed."""
        recompute_s, _ = self._seconds(lambda cost: (cost.recompute or cost.forward).median_s)
        return _segment_sums(recompute_s, 0.0)

    @cached_property
    def optimizer_s(self) -> Floats:
        """[L+1, L+1]: seconds of zero_grad and optimizer step for the weights of layers [i, j)."""
        return self.trained_share * self.optimizer_total_s

    @property
    def optimizer_total_s(self) -> float:
        """Seconds of zero_grad and the optimizer's step for the whole model."""
        step = self.profile.step
        return (step.zero_grad.median_s + step.optimizer.median_s) * self._in_company(step.contention)

    @cached_property
    def activation_bytes(self) -> Ints:
        """[L+1]: bytes that cross the cut before layer i on the way forward; 0 at both ends."""
        return self._at_cuts([x.output_bytes for x in self.layer_costs])

    @cached_property
    def gradient_bytes(self) -> Ints:
        """[L+1]: bytes that cross the cut before layer i on the way back; 0 at both ends."""
        return self._at_cuts([x.output_gradient_bytes for x in self.layer_costs])

    @cached_property
    def activation_s(self) -> Floats:
        """[L+1]: seconds to send the activations across the cut before layer i; 0 at both ends."""
        return self.profile.link.transfers_s(self.activation_bytes)

    @cached_property
    def gradient_s(self) -> Floats:
        """[L+1]: seconds to send the gradients back across the cut before layer i; 0 at both ends."""
        return self.profile.link.transfers_s(self.gradient_bytes)

    @cached_property
    def stage_bytes(self) -> StageBytes[Ints]:
        """The parts of the memory of layers [i, j), each [L+1, L+1]."""
        costs, size = self.layer_costs, self.num_layers + 1
        loss_stash = self.loss.stash_bytes if self.loss else 0
        stash = np.array([x.stash_bytes for x in costs])
        held = np.array([x.output_unsaved_bytes for x in costs])
        outputs = np.array([x.output_bytes for x in costs])
        outputs[-1] = held[-1]  # of the model's own outputs only those that the loss does not keep are held beside it
        ends = np.arange(size) - 1  # the last layer of [i, j) is j - 1
        weight, gradient = self._weights("weight_bytes"), self._weights("gradient_bytes")
        loss_column = np.zeros(size, dtype=np.int64)
        loss_column[-1] = loss_stash
        buffers = self.num_microbatches * (self.activation_bytes[:, None] + self.gradient_bytes[None, :])
        trained = self.trained_share
        return StageBytes(
            weight=weight,
            gradient=gradient,
            optimizer=np.rint(trained * self.profile.step.state_bytes).astype(np.int64),
            stash=_segment_sums_int(stash) + held[ends][None, :] + loss_column[None, :],
            checkpoint=np.broadcast_to(outputs[ends] + loss_column, (size, size)),
            sent=np.broadcast_to(self.activation_bytes[None, :] + self.gradient_bytes[:, None], (size, size)),
            forward_workspace=self._peak_above_stash("forward_workspace_bytes"),
            backward_workspace=self._peak_above_stash("backward_workspace_bytes"),
            recompute_workspace=self._peak_alone(),
            optimizer_workspace=np.rint(trained * self.profile.step.workspace_bytes).astype(np.int64),
            buffer=np.broadcast_to(buffers, (size, size)),
        )

    @cached_property
    def trained_share(self) -> Floats:
        """[L+1, L+1]: which share of the model's trained bytes layers [i, j) hold."""
        gradient = self._weights("gradient_bytes")
        total = gradient[0, self.num_layers]
        return gradient / total if total else np.zeros(gradient.shape)

    @cached_property
    def contention(self) -> Floats:
        """[L+1, L+1]: how much longer the micro-batches of layers [i, j) take beside the other stages than alone."""
        together = self.forward_s + self.backward_s
        alone = _segment_sums(
            *self._seconds(lambda cost: cost.forward.median_s + self._mean_backward_s(cost), company=0)
        )
        return np.divide(together, alone, out=np.ones_like(together), where=alone > 0)

    def stage_cost(self, first: int, end: int) -> StageCost:
        """Seconds and transfers of the stage that holds layers [first, end)."""
        return StageCost(
            forward_s=float(self.forward_s[first, end]) + self.profile.overhead_s,
            backward_s=float(self.backward_s[first, end]) + self.profile.overhead_s,
            recompute_s=float(self.recompute_s[first, end]),
            optimizer_s=float(self.optimizer_s[first, end]),
            activation_bytes=int(self.activation_bytes[end]),
            gradient_bytes=int(self.gradient_bytes[end]),
            activation_s=float(self.activation_s[end]),
            gradient_s=float(self.gradient_s[end]),
            contention=float(self.contention[first, end]),
            optimizer_contention=self._in_company(self.profile.step.contention),
        )

    def one_stage_bytes(self, first: int, end: int) -> StageBytes[int]:
        """The parts of the memory of the stage that holds layers [first, end)."""
        parts = self.stage_bytes
        return StageBytes(**{name: int(getattr(parts, name)[first, end]) for name in StageBytes.__slots__})

    def _seconds(self, seconds_of: Callable[[LayerCost], float], *, company: int | None = None) -> tuple[Floats, float]:
        """[L] of the layers, and of the loss, in the company of the other stages, or of `company` of them."""
        values = [seconds_of(x) * self._in_company(x.contention, company) for x in self.layer_costs]
        loss_s = seconds_of(self.loss) * self._in_company(self.loss.contention, company) if self.loss else 0.0
        return np.array(values), loss_s

    def _mean_backward_s(self, cost: LayerCost) -> float:
        first = cost.first_backward or cost.backward
        return cost.backward.median_s + (first.median_s - cost.backward.median_s) / self.num_microbatches

    def _in_company(self, contention: float, company: int | None = None) -> float:
        """The factor for this many stages, between none (1) and as many as were measured (`contention`)."""
        company = self.num_stages - 1 if company is None else company
        share = min(1.0, company / self.profile.num_neighbours) if self.profile.num_neighbours else 0.0
        return 1.0 + (contention - 1.0) * share

    def _at_cuts(self, after_layer: list[int]) -> Ints:
        return np.array([0, *after_layer[:-1], 0], dtype=np.int64)

    def _weights(self, field: str) -> Ints:
        """[L+1, L+1]: bytes of the weights of layers [i, j), a shared one once where any of its layers is held."""
        total = _segment_sums_int(np.array([getattr(layer, field) for layer in self.profile.layers]))
        for shared in self.profile.shared_weights:
            users = np.zeros(self.num_layers, dtype=np.int64)
            users[list(shared.layers)] = 1
            total = total + np.where(_segment_sums_int(users) > 0, getattr(shared, field), 0)
        return total

    def _peak_above_stash(self, field: str) -> Ints:
        """[L+1, L+1]: the most that layers [i, j) hold while one of them runs, above the stash of all of them.

        While a layer runs, forward or backward, the stash of the layers after it is not there (yet, or any more).
        """
        stash = np.cumsum([x.stash_bytes for x in self.layer_costs])
        own = np.array([getattr(x, field) for x in self.layer_costs])
        peaks, totals = _segment_maxima(stash + own), np.array([0, *stash])
        if self.loss:
            totals[-1] += self.loss.stash_bytes
            peaks[:-1, -1] = np.maximum(peaks[:-1, -1], totals[-1] + getattr(self.loss, field))
        above: Ints = np.maximum(peaks - totals[None, :], 0)
        return above

    def _peak_alone(self) -> Ints:
        """[L+1, L+1]: the most that any of layers [i, j), or the loss, holds in a forward that keeps nothing."""
        peaks = np.array([x.stash_bytes + x.forward_workspace_bytes for x in self.layer_costs])
        if self.loss:
            peaks[-1] = max(int(peaks[-1]), self.loss.forward_workspace_bytes)
        return _segment_maxima(peaks)


def _segment_sums(values: Floats, last_extra: float) -> Floats:
    """[L+1, L+1]: sum of values[i:j], plus `last_extra` where the last layer is in it; 0 where i >= j."""
    extended = values.copy()
    extended[-1] += last_extra
    sums = np.concatenate([[0.0], np.cumsum(extended)])
    segments: Floats = np.maximum(sums[None, :] - sums[:, None], 0.0)
    return segments


def _segment_sums_int(values: Ints) -> Ints:
    sums = np.concatenate([[0], np.cumsum(values)]).astype(np.int64)
    segments: Ints = np.maximum(sums[None, :] - sums[:, None], 0)
    return segments


def _segment_maxima(values: Ints) -> Ints:
    """[L+1, L+1]: largest of values[i:j]; 0 where i >= j."""
    size = len(values) + 1
    maxima = np.zeros((size, size), dtype=np.int64)
    for first in range(len(values)):
        maxima[first, first + 1 :] = np.maximum.accumulate(values[first:])
    return maxima
