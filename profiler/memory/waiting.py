"""What the backward of later layers leaves to an earlier layer's: gradients that wait, less stashes that are gone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from gplan.nouns import Waiting
from profiler.memory.bytes import AllocationTrace

_LEAST_SHARE = 0.01  # of a workspace; what is less, such as the gradient of the loss itself, is not told apart

Window = tuple[int, int]
"""From when to when, on the clock of the record."""


class Later:
    """What a record of one forward and backward says of it; layers are numbered, the loss is the last."""

    def __init__(self, trace: AllocationTrace, forwards: Sequence[Window], backwards: Sequence[Window]) -> None:
        self._trace, self._backwards, num = trace, backwards, len(backwards)
        given_ns, freed_ns, num_bytes = trace.blocks()
        forward, made = _place_of(given_ns, forwards), num - 1 - _place_of(given_ns, backwards[::-1])
        freed = num - 1 - _place_of(freed_ns, backwards[::-1])
        freed[freed_ns >= backwards[0][1]] = -1  # after all of them
        is_made = given_ns >= backwards[-1][0]
        is_stash = ~is_made & (forward >= 0) & (freed_ns >= backwards[-1][0]) & (freed >= 0)
        made_until = np.zeros((num, num + 1), dtype=np.int64)  # by the layer that made it, then that freed it
        np.add.at(made_until, (made[is_made], freed[is_made] + 1), num_bytes[is_made])
        gone = np.zeros((num, num), dtype=np.int64)  # of the stash of the first layer, by the layer that freed it
        np.add.at(gone, (forward[is_stash], freed[is_stash]), num_bytes[is_stash])
        self._made_until, self._held_on, self._gone = made_until, made_until.cumsum(axis=1), gone.cumsum(axis=0)

    def workspace(self, layer: int, below: int) -> tuple[int, tuple[Waiting, ...]]:
        """Bytes that a layer's backward needs above `below`, and what of that comes of later layers' backward."""
        begins, ends = self._backwards[layer]
        whole = self._trace.peak_bytes(begins, ends)
        alone = self._trace.peak_bytes(begins, ends, without=(self._backwards[-1][0], begins))
        least = _LEAST_SHARE * (whole - below)
        return max(0, whole - below), tuple(x for x in self._of(layer, whole, alone, below) if abs(x.num_bytes) > least)

    def _of(self, layer: int, whole: int, alone: int, below: int) -> Iterator[Waiting]:
        """By later layer what it made that is held all through, less what it freed of the stashes up to this layer's.

        Of what is let go meanwhile counts by how much the peak is higher for it, at the nearest layer that made any.
        """
        later = slice(layer + 1, None)
        through, gone = self._held_on[later, layer], self._gone[layer, later]
        meanwhile = np.flatnonzero(self._made_until[later, layer + 1])
        left, clipped = (through - gone).tolist(), max(0, below - whole)
        if len(meanwhile):
            left[meanwhile[0]] += max(0, whole - alone - int(through.sum()))
        for number, num_bytes in enumerate(left, start=1):
            taken = min(max(0, -num_bytes), clipped)  # as a workspace does not fall below 0
            clipped -= taken
            yield Waiting(num_later=number, num_bytes=num_bytes + taken)


def _place_of(moments_ns: NDArray[np.int64], windows: Sequence[Window]) -> NDArray[np.int64]:
    """Which of windows that follow each other a moment is in; -1 before the first, the last one behind it."""
    return np.searchsorted([start for start, _ in windows], moments_ns, side="right") - 1
