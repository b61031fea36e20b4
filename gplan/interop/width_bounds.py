"""Lower bounds of a setting's step in closed form, before any partition of it is made.

With W seconds of a micro-batch on all layers, F of them in forwards, K devices in a pipeline and M micro-batches, a step
takes at least

    W                      a micro-batch passes through all layers
    M W / K                all devices compute all of it
    W + ((M - 1) W - (min(M, K) - 1) F) / K
                           with one stage a device: between its first forward and backward, while the first micro-batch
                           passes through the stages behind, a device computes at most min(M, K) - 1 more forwards
    M x least load         blocks are whole, so some device has more than its share; devices without the memory for their
                           share leave more to others
    (M + K - 1) W / K      with one stage a device and M >= 2 K: device k waits for the k devices before it while the
                           pipeline fills and drains, and in between for the K - 1 - k devices behind it

Memory counts what a device surely holds: weights, gradients, the optimizer's state, and the least stash. Beside the bounds
there are two estimates, of the step and of the memory of an even pipeline, which order the search and prove nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gplan.core import Profile
from gplan.graph.down_sets import Floats, Ints
from gplan.interop.width_choices import Choice
from gplan.partition.candidates import INFINITY
from gplan.strategy_search.bounds import least_in_flight


@dataclass(frozen=True)
class ChoiceBounds:
    """The bounds of one setting; its profile is of one rank, with the blocks between the first layer and the last ones."""

    choice: Choice
    profile: Profile
    num_blocks: int
    usable_bytes: int  # for tensors, of each device

    @property
    def step_s(self) -> float:
        """No plan of the setting is faster; infinite where no plan can fit the memory."""
        num_devices, num_microbatches = self.choice.widths.pipeline, self.choice.num_microbatches
        if self._least_bytes > num_devices * self.usable_bytes or self._most_blocks.sum() < self.num_blocks:
            return INFINITY
        seconds = self._layer_s
        fullest = next(
            x for x in range(self.num_blocks + 1) if np.minimum(self._most_blocks, x).sum() >= self.num_blocks
        )
        load_s = max(self._least_load_s, fullest * min(seconds[1 : 1 + self.num_blocks]))
        whole_s, waits, through_s = sum(seconds), 0, sum(seconds)
        if self.choice.num_chunks == 1:
            waits = num_devices - 1 if num_microbatches >= 2 * num_devices else 0
            hidden_s = (min(num_microbatches, num_devices) - 1) * self._forward_s
            through_s += max(0.0, (num_microbatches - 1) * whole_s - hidden_s) / num_devices
        return max(whole_s / num_devices * (num_microbatches + waits), num_microbatches * load_s, through_s)

    @property
    def even_step_s(self) -> float:
        """What an even pipeline would take: an estimate."""
        num_devices = self.choice.widths.pipeline
        load_s = max(sum(self._layer_s) / num_devices, self._least_load_s)
        return load_s * (self.choice.num_microbatches + (num_devices - 1) / self.choice.num_chunks)

    @property
    def may_fit(self) -> bool:
        """Whether an even pipeline fits, by a rough count of what its first device keeps: an estimate."""
        num_devices, num_chunks = self.choice.widths.pipeline, self.choice.num_chunks
        times = float(self._times_kept[-1])
        if self.choice.recompute == "never" and num_chunks > 1:  # its forwards before the first backward
            times = min((num_chunks + 1) * num_devices - 1, self.choice.num_microbatches * num_chunks) / num_chunks
        held = self._state_bytes + times * sum(x.costs[0].stash_bytes for x in self.profile.layers)
        return held <= num_devices * self.usable_bytes

    @property
    def device_state_bytes(self) -> float:
        """Weights, gradients and optimizer of a device, if the layers could be divided evenly."""
        return self._state_bytes / self.choice.widths.pipeline

    @cached_property
    def _layer_s(self) -> list[float]:
        """[L]: a micro-batch on each layer."""
        costs = [x.costs[0] for x in self.profile.layers]
        forwards = 1 + (self.choice.recompute == "always")
        return [forwards * x.forward.median_s + x.backward.median_s for x in costs]

    @property
    def _forward_s(self) -> float:
        """A micro-batch's forward on all layers."""
        return sum(x.costs[0].forward.median_s for x in self.profile.layers)

    @cached_property
    def _least_load_s(self) -> float:
        """Of the fullest device, for a micro-batch."""
        return least_load_s(self._layer_s, self.choice.widths.pipeline)

    @cached_property
    def _state_bytes(self) -> float:
        """Weights, gradients and optimizer of all stages, on one rank of each."""
        held = sum(x.weight_bytes + x.gradient_bytes for x in self.profile.layers)
        return held + self.profile.step.state_bytes / self.choice.widths.replicas

    @cached_property
    def _times_kept(self) -> Floats:
        """[K]: of how many micro-batches each device keeps the stash of all its blocks at once, at least."""
        num_devices, num_chunks = self.choice.widths.pipeline, self.choice.num_chunks
        if self.choice.recompute == "always":  # while a stage is recomputed, it keeps all of one micro-batch
            return np.full(num_devices, 1 / num_chunks)
        schedule = "1f1b" if num_chunks == 1 else "interleaved-1f1b"
        found = least_in_flight(schedule, num_devices, self.choice.num_microbatches)
        return np.ones(num_devices) if found is None else found

    @cached_property
    def _most_blocks(self) -> Ints:
        """[K]: the most blocks for which each device has the memory, by their state and what they keep."""
        layers = self.profile.layers
        blocks = layers[1 : 1 + self.num_blocks]
        optimizer_share = self.profile.step.state_bytes / self.choice.widths.replicas
        optimizer_share /= sum(x.gradient_bytes for x in layers)  # bytes of state for each byte of gradients
        state = min(x.weight_bytes + x.gradient_bytes * (1 + optimizer_share) for x in blocks)
        kept = self._times_kept * min(x.costs[0].stash_bytes - x.costs[0].output_bytes for x in blocks)
        return np.floor(self.usable_bytes / (state + kept)).astype(np.int64)

    @property
    def _least_bytes(self) -> float:
        """What all devices hold together at least: the state, and the stash where the fewest copies of it are kept."""
        held = self._state_bytes
        left = float(sum(x.costs[0].stash_bytes - x.costs[0].output_bytes for x in self.profile.layers))
        for times in sorted(self._times_kept):
            kept = min(left, self.usable_bytes / times)
            held, left = held + kept * times, left - kept
        return held + left * float(max(self._times_kept))


def least_load_s(layer_s: Sequence[float], num_devices: int) -> float:
    """The smallest possible largest sum of a device, given seconds [L] of the first layer, blocks and the last layer.

    Layers need not be neighbours. Blocks count as the shortest of them, and the first layer and the last are on two devices.

    >>> least_load_s([1.0, 2.0, 2.0, 2.0, 3.0], 2)
    5.0
    """
    first, last, block = layer_s[0], layer_s[-1], min(layer_s[1:-1])
    if num_devices == 1 or not block:
        return sum(layer_s) / num_devices
    num_blocks = len(layer_s) - 2
    loads = sorted({end + i * block for end in (first, last, 0.0) for i in range(num_blocks + 1)})

    def fits(load: float) -> bool:
        left = [load - first, load - last, *[load] * (num_devices - 2)]
        return min(left) >= 0 and sum(int(x / block + 1e-9) for x in left) >= num_blocks

    return loads[bisect_left(loads, True, key=fits)]
