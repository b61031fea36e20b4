"""What crosses both cuts of a stage: activations that it holds once, gradients that it holds twice.

An activation is sent on out of the buffer in which it came. A gradient that no layer of the stage adds to is copied by
autograd from the buffer in which it came to what is sent on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gplan.downsets import Bools, DownSets, Ints, Way
from gplan.interpolation import value_cost_at
from gplan.nouns import Profile, Value


@dataclass(frozen=True, kw_only=True)
class Passing:
    """By stages, pairs of positions of `downsets`. Nothing passes those of a profile without values."""

    profile: Profile
    downsets: DownSets
    microbatch_size: int

    def activation_bytes(self, first: Ints, end: Ints) -> tuple[Ints, Ints]:
        """[E] each: of a micro-batch's activations that cross both cuts of stages, all and what no layer keeps."""
        every, unsaved = self._activations
        is_inside = self._is_inside(first, end)
        return is_inside * every(first, end), is_inside * unsaved(first, end)

    def gradient_bytes(self, first: Ints, end: Ints) -> Ints:
        """[E]: of the gradients that only pass stages."""
        return self._is_inside(first, end) * self._gradients(first, end)

    @cached_property
    def gradient_ways(self) -> tuple[list[Way], Ints]:
        """Of all values that gradients come back for, and [W] the gradients' bytes."""
        sizes = [value_cost_at(x.costs, self.microbatch_size).gradient_bytes for x in self._values]
        ways = [(x.producer, x.consumers) for x, size in zip(self._values, sizes, strict=True) if size]
        return ways, np.array([size for size in sizes if size], dtype=np.int64)

    @cached_property
    def _gradients(self) -> Callable[[Ints, Ints], Ints]:
        return self.downsets.passing(*self.gradient_ways, is_unread=True)

    @cached_property
    def _activations(self) -> tuple[Callable[[Ints, Ints], Ints], Callable[[Ints, Ints], Ints]]:
        costs = [value_cost_at(x.costs, self.microbatch_size) for x in self._values]
        sent = [cost.num_bytes if x.transfer_s is None else 0 for x, cost in zip(self._values, costs, strict=True)]
        ways = [(x.producer, x.consumers) for x in self._values]
        every, unsaved = (np.array(sizes, dtype=np.int64) for sizes in (sent, [x.unsaved_bytes for x in costs]))
        return (
            self.downsets.passing(ways, every, is_unread=False),
            self.downsets.passing(ways, unsaved, is_unread=False),
        )

    @cached_property
    def _values(self) -> list[Value]:
        return [x for x in self.profile.values if not x.is_gradient]

    def _is_inside(self, first: Ints, end: Ints) -> Bools:
        """Nothing is received before the first stage, nor sent after the last one."""
        return (first > 0) & (end < self.downsets.size - 1)
