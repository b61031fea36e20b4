"""What each layer adds to its stage, and the loss to the last one: the constants of the program."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from gplan.balancer.problem import Problem, recomputed_share
from gplan.costs import Costs
from gplan.downsets import Floats


@dataclass(frozen=True)
class Figures:
    """Seconds of one micro-batch on the profiled device, [L] each,
    without the stage's overhead and without the loss."""

    problem: Problem

    @cached_property
    def costs(self) -> Costs:
        """The costs with the layers in the profile's order."""
        return replace(self.problem.costs, given_downsets=None)

    @cached_property
    def forward_s(self) -> Floats:
        """[L]: of the forward."""
        return self._without_loss.forward_s(self._places, self._places + 1)

    @cached_property
    def backward_s(self) -> Floats:
        """[L]: of the backward, without recompute."""
        return self._without_loss.backward_s(self._places, self._places + 1)

    @cached_property
    def halves_s(self) -> tuple[Floats, Floats]:
        """[L] each: of the two halves of a backward; nothing where the profile does not know them."""
        costs = self._without_loss
        if not costs.has_halves:
            return np.zeros(costs.num_layers), np.zeros(costs.num_layers)
        return (
            costs.input_gradient_s(self._places, self._places + 1),
            costs.weight_gradient_s(self._places, self._places + 1),
        )

    @cached_property
    def recompute_s(self) -> Floats:
        """[L]: what recomputing adds."""
        return self._without_loss.recompute_s(self._places, self._places + 1)

    @cached_property
    def loss_s(self) -> tuple[float, float]:
        """Forward and backward of the loss."""
        if self.costs.loss is None:
            return 0.0, 0.0
        first, end = np.array([0]), np.array([self.costs.num_layers])
        whole, layers = self.costs, self._without_loss
        return (
            float(whole.forward_s(first, end)[0] - layers.forward_s(first, end)[0]),
            float(whole.backward_s(first, end)[0] - layers.backward_s(first, end)[0]),
        )

    @cached_property
    def loss_first_half_s(self) -> float:
        """The first half of the backward of the loss; the second takes no time."""
        if self.costs.loss is None or not self.costs.has_halves:
            return 0.0
        first, end = np.array([0]), np.array([self.costs.num_layers])
        return float(self.costs.input_gradient_s(first, end)[0] - self._without_loss.input_gradient_s(first, end)[0])

    @property
    def overhead_s(self) -> float:
        """What a stage and the engine add to each forward and to each backward;
        `max-device-load` leaves the engine out."""
        is_of_devices = self.problem.minimize == "max-device-load"
        return self.costs.profile.overhead_s if is_of_devices else self.costs.overhead_s

    def compute_s(self, k: int) -> Floats:
        """[L]: forward and backward as on stage k, the recompute averaged over the micro-batches."""
        share, halves_s = self.problem.split_shares[k], sum(self.halves_s)
        backward_s = (1 - share) * self.backward_s + share * halves_s
        return self.forward_s + backward_s + recomputed_share(self.problem) * self.recompute_s

    def loss_compute_s(self, k: int) -> float:
        """Forward and backward of the loss as on stage k."""
        share, (forward_s, backward_s) = self.problem.split_shares[k], self.loss_s
        return forward_s + (1 - share) * backward_s + share * self.loss_first_half_s

    @cached_property
    def least_load_s(self) -> float:
        """What the largest load is at least: the work shared out evenly, or the largest layer on the fastest device."""
        speeds, stages = self.problem.speeds, range(self.problem.num_stages)
        least_s = np.minimum.reduce([self.compute_s(k) for k in stages])
        loss_s = min(self.loss_compute_s(k) for k in stages)
        even_s = (float(least_s.sum()) + loss_s + 2 * self.overhead_s) / sum(speeds)
        return max(even_s, (float(least_s.max()) + 2 * self.overhead_s) / max(speeds))

    @cached_property
    def _places(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.arange(self.costs.num_layers)

    @cached_property
    def _without_loss(self) -> Costs:
        return replace(self.costs, profile=replace(self.costs.profile, loss=()))
