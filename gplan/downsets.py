"""Where a model can be cut: the sets of layers that may lie before a cut, numbered as positions 0, ..., P-1.

A set may lie before a cut if it holds, with a layer, all that the layer needs: a down-set of the graph. Position 0
holds nothing, the last one every layer. A chain has only its prefixes; branches bring more, up to exponentially many. A
stage is a pair of positions (first, end), the first within the end: the layers that the end adds to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

Made = tuple[int, int, int]
"""A layer, a later one (L: the loss), and bytes that the later one's backward leaves to it; some are below 0."""

Way = tuple[int | None, tuple[int, ...]]
"""From the layer that makes a value, None for an input of the model, to those that read it, rising; L is the output."""


class DownSets(Protocol):
    """All positions at which a model of L layers may be cut, each of them within the last."""

    @property
    def num_layers(self) -> int:
        """L."""
        ...

    @property
    def size(self) -> int:
        """P, the number of positions."""
        ...

    @property
    def num_before(self) -> Ints:
        """[P]: how many layers lie before each position; it never falls."""
        ...

    @property
    def covers(self) -> tuple[Ints, Ints, Ints]:
        """All pairs of positions that differ by one layer, by rising upper position: the lower,
        the upper and the layer."""
        ...

    def contain(self, layer: int) -> Bools:
        """[P]: whether the layer lies before each position."""
        ...

    def sums(self, values: Floats) -> Floats:
        """[P]: the sum of values[L] over the layers before each position."""
        ...

    def int_sums(self, values: Ints) -> Ints:
        """[P]: the same of whole numbers, exactly."""
        ...

    def layers(self, first: int, end: int) -> tuple[int, ...]:
        """The layers of the stage from one position to another, rising."""
        ...

    def contains(self, first: Ints, end: Ints) -> Bools:
        """[E]: whether each `first` lies within its `end` and is not all of it."""
        ...

    def running_peaks(self, first: Ints, end: Ints, *, kept: Ints, own: Ints, waiting: Sequence[Made] = ()) -> Ints:
        """[E]: the most above what stays, while the layers of a stage run in order.

        Each layer v leaves kept[v] behind and has own[v] more while it runs, less what is `waiting` of layers that do
        not come before the end, but not below 0; all that is kept at the end is taken off.
        """
        ...

    def passing(self, ways: Sequence[Way], sizes: Ints, *, is_unread: bool) -> Callable[[Ints, Ints], Ints]:
        """Of stages, `first` and `end`, [E]: the sum of sizes[W] over what is made before a stage and read behind it.

        With `is_unread` only what no layer of the stage reads.
        """
        ...


@dataclass(frozen=True)
class Prefixes:
    """The positions of a chain: position i lies before layer i."""

    num_layers: int

    @property
    def size(self) -> int:
        """L + 1."""
        return self.num_layers + 1

    @cached_property
    def num_before(self) -> Ints:
        """[P]: 0, 1, ..., L."""
        return np.arange(self.size)

    @cached_property
    def covers(self) -> tuple[Ints, Ints, Ints]:
        """Each position and the next, with the layer between them."""
        layers = np.arange(self.num_layers)
        return layers, layers + 1, layers

    def contain(self, layer: int) -> Bools:
        """[P]: whether the layer lies before each position."""
        return self.num_before > layer

    def sums(self, values: Floats) -> Floats:
        """[P]: the sum of values[:i]."""
        return np.concatenate([[0.0], np.cumsum(values)])

    def int_sums(self, values: Ints) -> Ints:
        """[P]: the same of whole numbers."""
        return np.concatenate([[0], np.cumsum(values)]).astype(np.int64)

    def layers(self, first: int, end: int) -> tuple[int, ...]:
        """first, ..., end - 1."""
        return tuple(range(first, end))

    def contains(self, first: Ints, end: Ints) -> Bools:
        """[E]: whether the stage has a layer."""
        return first < end

    def running_peaks(self, first: Ints, end: Ints, *, kept: Ints, own: Ints, waiting: Sequence[Made] = ()) -> Ints:
        """[E]: as in `DownSets`; O(L log L) and O(1) for each stage, with something waiting O(L) for each end."""
        totals = np.cumsum(kept)
        if not waiting:
            return _largest_between(totals + own, first, end) - totals[end - 1]
        layer, maker, num_bytes = np.array(waiting, dtype=np.int64).T
        peaks, order = np.empty(len(end), dtype=np.int64), np.argsort(end, kind="stable")
        for some in np.split(order, np.flatnonzero(np.diff(end[order])) + 1) if len(end) else ():
            last = int(end[some[0]])
            needed = own[:last].copy()
            absent = (layer < last) & (maker >= last) & (last < self.num_layers)
            np.subtract.at(needed, layer[absent], num_bytes[absent])
            held = totals[:last] + np.maximum(needed, 0)
            peaks[some] = np.maximum.accumulate(held[::-1])[::-1][first[some]] - totals[last - 1]
        return peaks

    def passing(self, ways: Sequence[Way], sizes: Ints, *, is_unread: bool) -> Callable[[Ints, Ints], Ints]:
        """As in `DownSets`; O(W^2), then O(log W) for each stage."""
        places = [(-1 if made is None else made, *read) for made, read in ways]
        spans = [
            (start, end, size)
            for stops, size in zip(places, sizes.tolist(), strict=True)
            for start, end in (pairwise(stops) if is_unread else [(stops[0], stops[-1])])
        ]
        long = np.array([x for x in spans if x[1] > x[0] + 1] or [(0, 0, 0)], dtype=np.int64)  # a layer lies in between
        made, made_at = np.unique(long[:, 0], return_inverse=True)
        last, last_at = np.unique(long[:, 1], return_inverse=True)
        table = np.zeros((len(made) + 1, len(last) + 1), dtype=np.int64)
        np.add.at(table, (made_at + 1, last_at), long[:, 2])
        table = table.cumsum(axis=0)[:, ::-1].cumsum(axis=1)[:, ::-1]
        return lambda first, end: table[np.searchsorted(made, first), np.searchsorted(last, end)]


def _largest_between(values: Ints, first: Ints, end: Ints) -> Ints:
    """[E]: the largest of values[first:end], none of them empty, from maxima over powers of two."""
    tables, length = [values], 1
    while 2 * length <= int((end - first).max(initial=1)):
        tables.append(np.maximum(tables[-1][: len(values) - 2 * length + 1], tables[-1][length:]))
        length *= 2
    level = np.maximum(np.frexp(end - first)[1] - 1, 0)
    largest = np.empty(np.shape(first), dtype=np.int64)
    for power, table in enumerate(tables):
        there = level == power
        largest[there] = np.maximum(table[first[there]], table[end[there] - (1 << power)])
    return largest


def position_of(downsets: DownSets, layers: Sequence[int]) -> int | None:
    """The position with exactly these layers before it; None where there is none."""
    places = np.flatnonzero(downsets.num_before == len(layers))
    for layer in layers:
        if len(places) == 1:  # of a chain's positions from the beginning
            break
        places = places[downsets.contain(layer)[places]]
    is_found = len(places) and {*downsets.layers(0, int(places[0]))} == {*layers}
    return int(places[0]) if is_found else None
