"""What each layer adds to its stage, and the loss to the last one: the constants of the program."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from gplan.core import Profile
from gplan.cost.stage_costs import Costs
from gplan.graph.down_sets import Floats
from gplan.partition.milp.assignment import Choices
from gplan.partition.milp.program import Expression, Program, weighted
from gplan.partition.problem import Problem, recomputed_share


class ParameterBytes:
    """Weights and gradients of every stage; a shared weight counts once where any of its users is (0 <= u <= 1)."""

    def __init__(self, program: Program, choices: Choices, profile: Profile) -> None:
        self._program, self._choices, self._profile = program, choices, profile
        self._shared: dict[int, list[Expression]] = {}
        self._tied: dict[int, list[Expression]] = {}

    def weight_bytes(self, k: int) -> Expression:
        """Bytes of parameters and buffers on stage k."""
        return self._held(k, "weight_bytes")

    def trained_bytes(self, k: int) -> Expression:
        """Bytes of the gradients on stage k."""
        return self._held(k, "gradient_bytes")

    def tied_bytes(self, k: int) -> Expression:
        """Bytes of the gradients on stage k of shared weights that other stages use too."""
        pairs = zip(self._profile.shared_weights, self._tied_on(k), strict=True)
        return weighted((weight.gradient_bytes, is_tied) for weight, is_tied in pairs)

    def is_any_tied(self, k: int) -> Expression:
        """Whether stage k holds any such gradient."""
        pairs = zip(self._profile.shared_weights, self._tied_on(k), strict=True)
        tied = [is_tied for weight, is_tied in pairs if weight.gradient_bytes]
        return self._program.at_least(f"tied_{k}", tied, high=1)

    def trained_share(self, k: int) -> Expression:
        """Which share of the model's trained bytes is on stage k."""
        return weighted([(1.0 / (self._profile.trained_bytes or 1), self.trained_bytes(k))])

    def num_trained(self, k: int) -> Expression:
        """Trained tensors on stage k."""
        return self._held(k, "num_trained")

    def is_any_trained(self, k: int) -> Expression:
        """Whether anything on stage k is trained."""
        own = [self._choices.is_on(v, k) for v, layer in enumerate(self._profile.layers) if layer.gradient_bytes]
        pairs = zip(self._profile.shared_weights, self._shared_on(k), strict=True)
        shared = [held for weight, held in pairs if weight.gradient_bytes]
        return self._program.at_least(f"trained_{k}", own + shared, high=1)

    def _held(self, k: int, field: str) -> Expression:
        own = self._choices.sum_on(k, [getattr(layer, field) for layer in self._profile.layers])
        pairs = zip(self._profile.shared_weights, self._shared_on(k), strict=True)
        return weighted([(1.0, own), *((getattr(weight, field), held) for weight, held in pairs)])

    def _tied_on(self, k: int) -> list[Expression]:
        """Of every shared weight whether stage k holds it and not all of its users: t >= u - x[user, k] for each."""
        if k not in self._tied:
            self._tied[k] = [
                self._program.at_least(f"t_{i}_{k}", [self._less(held, v, k) for v in sorted(set(x.layers))], high=1)
                for i, (x, held) in enumerate(zip(self._profile.shared_weights, self._shared_on(k), strict=True))
            ]
        return self._tied[k]

    def _less(self, held: Expression, layer: int, k: int) -> Expression:
        return weighted([(1.0, held), (-1.0, self._choices.is_on(layer, k))])

    def _shared_on(self, k: int) -> list[Expression]:
        if k not in self._shared:
            self._shared[k] = [
                self._program.at_least(f"u_{i}_{k}", [self._choices.is_on(v, k) for v in sorted(set(x.layers))], high=1)
                for i, x in enumerate(self._profile.shared_weights)
            ]
        return self._shared[k]


@dataclass(frozen=True)
class LayerSeconds:
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
        """What a stage and the engine add to each forward and to each backward."""
        return self.costs.overhead_s

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
