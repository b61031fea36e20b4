"""What crosses both cuts of a stage: activations that it holds once, gradients that it holds twice.

An activation is sent on out of the buffer in which it came. A gradient that no layer of the stage adds to is copied by
autograd from the buffer in which it came to what is sent on.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gplan.downsets import DownSets, Ints, Way
from gplan.interpolation import value_cost_at
from gplan.nouns import Profile


@dataclass(frozen=True, kw_only=True)
class Passing:
    """By stages, pairs of positions of `downsets`; nothing passes a chain's, whose layers read from the one before."""

    profile: Profile
    downsets: DownSets
    microbatch_size: int

    def activation_bytes(self, first: Ints, end: Ints) -> tuple[Ints, Ints]:
        """[E] each: of a micro-batch's activations that cross both cuts of stages, all and what no layer keeps."""
        ways, sizes, unsaved = self._activation_ways
        return self._sum(first, end, ways, sizes), self._sum(first, end, ways, unsaved)

    def gradient_bytes(self, first: Ints, end: Ints) -> Ints:
        """[E]: of the gradients that only pass stages."""
        return self._sum(first, end, *self.gradient_ways)

    @cached_property
    def gradient_ways(self) -> tuple[list[Way], Ints]:
        """The ways of gradients, from a reader back to the one before it or the producer; [W] their bytes."""
        ways, sizes = list[Way](), list[int]()
        for value in self.profile.values:
            num_bytes = value_cost_at(value.costs, self.microbatch_size).gradient_bytes
            if num_bytes and not value.is_gradient:
                stops: tuple[int | None, ...] = (value.producer, *value.consumers[:-1])
                ways += [(made, (read,)) for made, read in zip(stops, value.consumers, strict=True)]
                sizes += [num_bytes] * len(value.consumers)
        return ways, np.array(sizes, dtype=np.int64)

    @cached_property
    def _activation_ways(self) -> tuple[list[Way], Ints, Ints]:
        """[W] each the bytes that take them: those that are sent, and those that no layer keeps."""
        values = [x for x in self.profile.values if not x.is_gradient]
        costs = [value_cost_at(x.costs, self.microbatch_size) for x in values]
        sizes = [cost.num_bytes if x.transfer_s is None else 0 for x, cost in zip(values, costs, strict=True)]
        ways = [(x.producer, x.consumers) for x in values]
        return ways, np.array(sizes, dtype=np.int64), np.array([x.unsaved_bytes for x in costs], dtype=np.int64)

    def _sum(self, first: Ints, end: Ints, ways: list[Way], sizes: Ints) -> Ints:
        if not ways:
            return np.zeros_like(first)
        is_inside = (first > 0) & (end < self.downsets.size - 1)  # nothing is received before, nor sent after
        return is_inside * self.downsets.passing(first, end, ways=ways, sizes=sizes)
