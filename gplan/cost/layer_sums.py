"""What the layers of stages add up to: seconds by what they are of, and bytes of weights that layers may share.

A sum over the layers of a stage [first, end), two positions of `downsets`, is the difference of two prefix sums. The loss
belongs to the last layer. A shared weight counts once on every stage that has any of its users.

Where the profile has two clocks, a pass takes max(host, device), each summed over its layers: the host enqueues ahead while
the device computes. A layer whose host waits for the device has its whole time on both clocks. So time rises with every
layer, and no stage takes more than its parts together: all bounds hold that one clock has. `both_done_s` of
`core/two_clocks.py` is the recurrence behind it. The rule leaves out the order of a stage's layers (a host behind when the stage
begins, or at a wait), and that the host runs ahead only as far as the launch queue holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, reduce
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

_PARTS: dict[SecondsOf, tuple[SecondsOf, SecondsOf]] = {
    "compute": ("forward", "backward"),
    "least_compute": ("forward", "least_backward"),
}
"""What is added up where each part has a slower clock of its own."""

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
        """[L]: seconds of each layer for one micro-batch, without the loss; with two clocks, by the one that takes longer over
        all layers, so that no stage takes less than the sum over its layers."""
        if name in _PARTS and self.profile.has_host:
            return reduce(np.add, [self.layer_s(x) for x in _PARTS[name]])
        return max(self.clocks_s(name), key=lambda seconds: float(seconds.sum()))

    def clocks_s(self, name: SecondsOf) -> list[Floats]:
        """[L] for each clock: the device's, then the host's where there is one; without the loss."""
        return [np.array([x[name] for x in costs]) for costs in self._clocks]

    def loss_clocks_s(self, name: SecondsOf) -> list[float]:
        """The same of the loss; 0 where there is none."""
        if self.loss is None or name.endswith("recompute"):
            return [0.0] * len(self._clocks)
        return [self._seconds_of(x)[name] for x in (self.loss, self.loss.on_host)[: len(self._clocks)]]

    def seconds(self, name: SecondsOf, first: Ints, end: Ints) -> Floats:
        """[E]: seconds of stages for one micro-batch, without overhead; the loss is not recomputed."""
        if name in _PARTS and self.profile.has_host:
            return reduce(np.add, [self.seconds(x, first, end) for x in _PARTS[name]])
        return reduce(np.maximum, [np.maximum(sums[end] - sums[first], 0.0) for sums in self._sums_of_clocks(name)])

    def recompute_s(self, first: Ints, end: Ints) -> Floats:
        """[E]: seconds that recomputing whole stages adds; it ends with the last tensor that is saved."""
        found, last = list[Floats](), self.downsets.last_layers(first, end)
        for sums, unfinished_s in zip(self._sums_of_clocks("recompute"), self._unfinished_s, strict=True):
            seconds = np.maximum(sums[end] - sums[first], 0.0)
            if unfinished_s.any():
                left = seconds - unfinished_s[last]
                seconds = np.where(left > _ROUNDING * seconds, left, 0.0)
            found.append(seconds)
        return reduce(np.maximum, found)

    @cached_property
    def _unfinished_s(self) -> list[Floats]:
        """[L] for each clock: seconds that a recompute leaves out where it ends with this layer."""
        return [x - y for x, y in zip(self.clocks_s("recompute"), self.clocks_s("last_recompute"), strict=True)]

    def _sums_of_clocks(self, name: SecondsOf) -> list[Floats]:
        """[P] for each clock: of the layers before each position, at the end with the loss."""
        if name not in self._second_sums:
            sums = [self.downsets.sums(x) for x in self.clocks_s(name)]
            for of_clock, loss_s in zip(sums, self.loss_clocks_s(name), strict=True):
                of_clock[-1] += loss_s
            self._second_sums[name] = sums
        return self._second_sums[name]

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
    def _clocks(self) -> list[list[dict[SecondsOf, float]]]:
        """[L] for each clock, the device's first."""
        views = [self.costs, tuple(x.on_host for x in self.costs)]
        return [[self._seconds_of(x) for x in costs] for costs in views[: 1 + self.profile.has_host]]

    @cached_property
    def _second_sums(self) -> dict[SecondsOf, list[Floats]]:
        return {}

    def _held_sums(self, field: str) -> tuple[NDArray[Any], list[tuple[Ints, Any]]]:
        """[P] of the layers' own, and for each shared weight its users before each position [P] and its number."""
        if field not in self._known_held:
            own = np.array([getattr(x, field) for x in self.profile.layers])
            numbers = (getattr(x, field) for x in self.profile.shared_weights)
            shared = [(x, number) for x, number in zip(self._users_of_shared, numbers, strict=True) if number]
            self._known_held[field] = self.downsets.sums(own), shared
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
