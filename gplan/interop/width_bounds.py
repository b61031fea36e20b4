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
    M W / K + w            with v stages a device: before its first forward of chunk c, device k has had K of each chunk before
                           that, while the first micro-batch passed through c K + k stages; so too after its last backward.
                           Over all devices and chunks that is a mean wait w of (sum over k of (K - 1 - k) t_k) / (v K), least
                           where the last devices have the most, t_k = T / M: w >= W (M W / T - 1) / (2 v K)

Memory counts what a device surely holds: weights, gradients, the optimizer's state, and the least stash; when it holds most
of its last chunk, it holds K micro-batches of each other one, and of the first more if the warm-up is longer. The devices must
have the memory for all blocks if each has the lightest, and for the heavy ones by themselves. Beside the bounds there are two
estimates, of the step and of the memory of an even pipeline, which order the search and prove nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from math import sqrt

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
    usable_bytes: int  # for tensors, of each device

    @property
    def step_s(self) -> float:
        """No plan of the setting is faster; infinite where no plan can fit the memory."""
        num_devices, num_microbatches = self.choice.widths.pipeline, self.choice.num_microbatches
        whole_s = through_s = float(self._layer_s.sum())
        if self.device_state_bytes > self.usable_bytes or any(most.sum() < len(x) - 2 for x, most in self._most_blocks):
            return INFINITY
        if self.choice.num_chunks == 1:
            forward_s = sum(x.costs[0].forward.median_s for x in self.profile.layers)
            hidden_s = (min(num_microbatches, num_devices) - 1) * forward_s
            through_s += max(0.0, (num_microbatches - 1) * whole_s - hidden_s) / num_devices
            if num_microbatches >= 2 * num_devices:
                through_s = max(through_s, (num_microbatches + num_devices - 1) * whole_s / num_devices)
        share_s, wait_s = num_microbatches * whole_s / num_devices, whole_s / (2 * num_devices * self.choice.num_chunks)
        filled_s = 0.5 * (share_s - wait_s + sqrt((share_s - wait_s) ** 2 + 4 * wait_s * num_microbatches * whole_s))
        return max(share_s, num_microbatches * self._least_load_s, through_s, filled_s)

    @property
    def even_step_s(self) -> float:
        """What an even pipeline would take: an estimate."""
        num_devices = self.choice.widths.pipeline
        load_s = max(float(self._layer_s.sum()) / num_devices, self._least_load_s)
        return load_s * (self.choice.num_microbatches + (num_devices - 1) / self.choice.num_chunks)

    @property
    def may_fit(self) -> bool:
        """Whether each device may have its even share of blocks: an estimate."""
        num_devices = self.choice.widths.pipeline
        return all(most.min() >= (len(x) - 2) // num_devices for x, most in self._most_blocks)

    @property
    def device_state_bytes(self) -> float:
        """Weights, gradients and optimizer of a device, if the layers could be divided evenly."""
        return self._state_bytes / self.choice.widths.pipeline

    @cached_property
    def _layer_s(self) -> Floats:
        """[L]: a micro-batch on each layer."""
        costs = [x.costs[0] for x in self.profile.layers]
        forwards = 1 + (self.choice.recompute == "always")
        return np.array([forwards * x.forward.median_s + x.backward.median_s for x in costs])

    @cached_property
    def _least_load_s(self) -> float:
        """Of the fullest device, for a micro-batch."""
        return max(least_load_s(self._layer_s[x], most) for x, most in self._most_blocks)

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
    def _most_blocks(self) -> list[tuple[Ints, Ints]]:
        """For all blocks, and those with more bytes than some: the layers, with the first and the last, and [K] the most blocks
        for which each device has the memory beside its end's layer, from the last device of the pipeline to the first."""
        layers, trained = self.profile.layers, (*self.profile.layers, *self.profile.shared_weights)
        num_devices, num_chunks = self.choice.widths.pipeline, self.choice.num_chunks
        num_microbatches = self.choice.num_microbatches
        optimizer_share = self.profile.step.state_bytes / self.choice.widths.replicas
        optimizer_share /= sum(x.gradient_bytes for x in trained)  # bytes of state for each byte of gradients
        gradient = np.array([float(x.gradient_bytes) for x in layers])
        lasting = np.array([x.weight_bytes for x in layers]) + optimizer_share * gradient
        # a stage frees its last output, and has what it received instead, but for the first
        kept, sent_bytes = np.array([float(x.costs[0].stash_bytes) for x in layers]), layers[1].costs[0].output_bytes
        kept[-1] -= layers[-1].costs[0].output_bytes
        # whether so much is kept after a first backward too, with which gradients begin
        is_kept_later = self._times_kept < num_microbatches if num_chunks == 1 else num_microbatches > num_devices
        held = lasting + np.outer(is_kept_later * np.ones(num_devices), gradient) + np.outer(self._times_kept, kept)
        left = np.full(num_devices, float(self.usable_bytes))
        if num_chunks > 1 and self.choice.recompute == "never":  # beyond that, of a block of each stage
            num_warmup = np.minimum(2 * np.arange(1, num_devices + 1) - 1, num_microbatches)
            further = num_warmup + (num_chunks - 1) * num_devices - num_chunks * self._times_kept
            further[-1] = 0.0  # of the first stage, which may have no block
            left -= further * kept[1:-1].min()
        left[0] -= held[0, -1]
        left[-1] -= held[-1, 0] - self._times_kept[-1] * sent_bytes
        inner = np.arange(1, len(layers) - 1)
        found = []
        for least in np.unique(held[-1, inner]):
            blocks = inner[held[-1, inner] >= least]
            fits = np.cumsum(np.sort(held[:, blocks], axis=1), axis=1) <= left[:, None]
            found.append((np.array([0, *blocks, len(layers) - 1]), fits.sum(axis=1) * bool(left.min() >= 0)))
        return found


def least_load_s(layer_s: Floats, most_blocks: Ints) -> float:
    """A lower bound of the largest sum of a device, exact for equal blocks, given seconds [L] of the first layer, blocks and the last layer.

    Each device has at most so many blocks, [K] from the last device of the pipeline to the first, any of them.

    >>> least_load_s(np.array([1.0, 2.0, 2.0, 2.0, 3.0]), np.array([3, 3]))
    5.0
    """
    first, last, num_blocks = layer_s[0], layer_s[-1], len(layer_s) - 2
    if len(most_blocks) == 1:
        return float(layer_s.sum())
    least = np.concatenate([[0.0], np.cumsum(np.sort(layer_s[1:-1]))])  # [blocks + 1]: of so many blocks
    loads = np.unique(np.concatenate([end + least for end in (0.0, first, last)]))
    ends = np.array([last, *[0.0] * (len(most_blocks) - 2), first])

    def fits(load: float) -> bool:
        counts = np.searchsorted(least, (load - ends) * (1 + 1e-9), side="right") - 1
        return bool(counts.min() >= 0 and np.minimum(counts, most_blocks).sum() >= num_blocks)

    return float(loads[bisect_left(loads, True, hi=len(loads) - 1, key=fits)])
