"""What the layers of stages add up to: seconds by what they are of, and bytes of weights that layers may share.

A sum over the layers of a stage [first, end), two positions of `downsets`, is the difference of two prefix sums. The loss
belongs to the last layer. A shared weight counts once on every stage that has any of its users.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gplan.core import LayerCost, Profile, Timing
from gplan.graph.down_sets import DownSets, Floats, Ints

SecondsOf: TypeAlias = Literal[
    "forward", "backward", "input_gradient", "weight_gradient", "least_backward", "least_first_half", "compute",
    "least_compute", "recompute", "last_recompute",
]  # fmt: skip
"""What seconds are of. `least_backward` is whole or in halves, `least_first_half` what gradients wait for, whole or not;
`recompute` is of a layer that others follow, `last_recompute` of the last layer recomputed together."""

_ROUNDING = 1e-9  # the share of seconds below which a difference of sums is nothing


@dataclass(frozen=True)
class LayerSums:
    """Sums over the layers of stages; the profile has one micro-batch size."""

    profile: Profile
    downsets: DownSets
    num_microbatches: int

    @cached_property
    def costs(self) -> tuple[LayerCost, ...]:
        """[L]: each layer's costs."""
        return tuple(layer.costs[0] for layer in self.profile.layers)

    @property
    def loss(self) -> LayerCost | None:
        """The loss's costs; None without one."""
        return self.profile.loss[0] if self.profile.loss else None

    @cached_property
    def has_halves(self) -> bool:
        """Whether the profile has times of the two halves of a split backward."""
        return self.profile.has_halves

    def layer_s(self, name: SecondsOf) -> Floats:
        """[L]: seconds of each layer for one micro-batch, without the loss."""
        return np.array([x[name] for x in self._layer_seconds])

    def seconds(self, name: SecondsOf, first: Ints, end: Ints) -> Floats:
        """[E]: seconds of stages for one micro-batch, without overhead; the loss is not recomputed."""
        if name not in self._second_sums:
            sums = self.downsets.sums(self.layer_s(name))
            if self.loss and not name.endswith("recompute"):
                sums[-1] += self._seconds_of(self.loss)[name]
            self._second_sums[name] = sums
        sums = self._second_sums[name]
        return np.maximum(sums[end] - sums[first], 0.0)

    def recompute_s(self, first: Ints, end: Ints) -> Floats:
        """[E]: seconds that recomputing whole stages adds; it ends with the last tensor that is saved."""
        seconds = self.seconds("recompute", first, end)
        if not self.unfinished_s.any():
            return seconds
        left = seconds - self.unfinished_s[self.downsets.last_layers(first, end)]
        return np.where(left > _ROUNDING * seconds, left, 0.0)

    @cached_property
    def unfinished_s(self) -> Floats:
        """[L]: seconds that a recompute leaves out where it ends with this layer."""
        return self.layer_s("recompute") - self.layer_s("last_recompute")

    def held(self, field: str, first: Ints, end: Ints) -> NDArray[Any]:
        """[E]: a field of layers and shared weights, summed over those of stages."""
        own, shared = self._held_sums(field)
        total: NDArray[Any] = own[end] - own[first]
        for users, number in shared:
            total = total + np.where(users[end] > users[first], number, 0)
        return total

    def largest(self, field: str, first: Ints, end: Ints) -> Ints:
        """[E]: the largest such field of the layers and shared weights of stages."""
        own = np.array([getattr(x, field) for x in self.profile.layers], dtype=np.int64)
        largest = self.downsets.running_peaks(first, end, kept=np.zeros_like(own), own=own)
        for users, num_bytes in self._held_sums(field)[1]:
            largest = np.maximum(largest, np.where(users[end] > users[first], num_bytes, 0))
        return largest

    def tied_bytes(self, first: Ints, end: Ints) -> Ints:
        """[E]: bytes of the gradients, on stages, of shared weights that other stages use too."""
        total = np.zeros(len(first), dtype=np.int64)
        for used, num_bytes in self._held_sums("gradient_bytes")[1]:
            here = used[end] - used[first]
            total += np.where((here > 0) & (here < used[-1]), num_bytes, 0)
        return total

    @cached_property
    def stash(self) -> Ints:
        """[P]: bytes that the layers before each position stash for a micro-batch, without the loss."""
        return self.downsets.sums(np.array([x.stash_bytes for x in self.costs], dtype=np.int64))

    @cached_property
    def pending(self) -> Ints:
        """[P]: bytes that the layers before each position keep between the halves of a backward, with the loss."""
        sums = self.downsets.sums(np.array([x.pending_bytes for x in self.costs], dtype=np.int64))
        sums[-1] += self.loss.pending_bytes if self.loss else 0
        return sums

    def _seconds_of(self, cost: LayerCost) -> dict[SecondsOf, float]:
        """Seconds of a layer, or of the loss, for one micro-batch of the M in a step.

        The first backward of a step makes the gradients and costs more; each of the M gets its share of the difference. Of
        a split backward that belongs to the second half.
        """
        once_s = ((cost.first_backward or cost.backward).median_s - cost.backward.median_s) / self.num_microbatches
        forward_s, backward_s = cost.forward.median_s, cost.backward.median_s + once_s
        first, second = first_half(cost), cost.weight_gradient
        first_s = first.median_s if first is not None else 0.0
        second_s = max(0.0, second.median_s + once_s) if second is not None else 0.0
        least_backward_s = min(backward_s, first_s + second_s) if self.has_halves else backward_s
        return {
            "forward": forward_s,
            "backward": backward_s,
            "input_gradient": first_s,
            "weight_gradient": second_s,
            "least_backward": least_backward_s,
            "least_first_half": min(backward_s, first_s),
            "compute": forward_s + backward_s,
            "least_compute": forward_s + least_backward_s,
            "recompute": cost.recompute_s,
            "last_recompute": cost.last_recompute_s,
        }

    @cached_property
    def _layer_seconds(self) -> list[dict[SecondsOf, float]]:
        return [self._seconds_of(x) for x in self.costs]

    @cached_property
    def _second_sums(self) -> dict[SecondsOf, Floats]:
        """[P] by name: of the layers before each position."""
        return {}

    def _held_sums(self, field: str) -> tuple[NDArray[Any], list[tuple[Ints, Any]]]:
        """[P] of the layers' own, and for each shared weight its users before each position [P] and its number."""
        if field not in self._known_held:
            own = np.array([getattr(x, field) for x in self.profile.layers])
            numbers = (getattr(x, field) for x in self.profile.shared_weights)
            self._known_held[field] = self.downsets.sums(own), list(zip(self._users_of_shared, numbers, strict=True))
        return self._known_held[field]

    @cached_property
    def _known_held(self) -> dict[str, tuple[NDArray[Any], list[tuple[Ints, Any]]]]:
        return {}

    @cached_property
    def _users_of_shared(self) -> list[Ints]:
        every = np.arange(len(self.profile.layers))
        return [self.downsets.sums(np.isin(every, x.layers).astype(np.int64)) for x in self.profile.shared_weights]


def first_half(cost: LayerCost) -> Timing | None:
    """The first half of a split backward; None where there is none.

    What has only a second half is before all weights; what has neither, as the loss, has no weights.
    """
    if cost.input_gradient is None and cost.weight_gradient is not None:
        return None
    return cost.input_gradient or cost.backward
