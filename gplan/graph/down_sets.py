"""Where a model can be cut: the sets of layers that may lie before a cut, numbered as positions 0, ..., P-1.

A set may lie before a cut if it contains, with each layer, everything the layer depends on: a down-set of the layer
graph. Position 0 is the empty set, the last one contains every layer. A chain has only its prefixes; branches add more,
up to exponentially many. A stage is a pair of positions (first, end), the first a subset of the end: its layers are those
that the end adds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from gplan.core import Floats as Floats
from gplan.graph.layer_graph import LayerGraph

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Numbers = TypeVar("Numbers", Floats, Ints)

Made = tuple[int, int, int]
"""A layer, a later one (L: the loss), and bytes that the later backward leaves allocated for it; may be negative."""

Way = tuple[int | None, tuple[int, ...]]
"""The producer of a value (None: an input of the model) and its consumers, rising (L: the model's output)."""

Output = tuple[Way, int]
"""A value that a layer makes, and its bytes."""

StageBytesOf: TypeAlias = Callable[[Ints, Ints], Ints]
"""Bytes of stages, [E], from their first and end positions."""

Waiting = tuple[tuple[int, ...], int]
"""The layers that use a weight, rising, and the bytes of its gradient."""


@dataclass(frozen=True)
class Prefixes:
    """The positions of a chain: position i is the cut before layer i."""

    num_layers: int

    @property
    def size(self) -> int:
        """L + 1."""
        return self.num_layers + 1

    @cached_property
    def num_before(self) -> Ints:
        """[P]: 0, 1, ..., L."""
        return np.arange(self.size)

    def is_before(self, layer: int) -> Bools:
        """[P]: whether the layer lies before each position."""
        return self.num_before > layer

    def sums(self, values: Numbers) -> Numbers:
        """[P]: the sum of values[:i]."""
        return np.concatenate([np.zeros(1, dtype=values.dtype), np.cumsum(values)])

    def last_layers(self, first: Ints, end: Ints) -> Ints:
        """[E]: the last layer of stages."""
        return end - 1

    def layers(self, first: int, end: int) -> tuple[int, ...]:
        """first, ..., end - 1."""
        return tuple(range(first, end))

    def are_stages(self, first: Ints, end: Ints) -> Bools:
        """[E]: whether the stage has a layer."""
        return first < end

    def running_peaks(
        self,
        first: Ints,
        end: Ints,
        *,
        kept: Ints,
        own: Ints,
        own_of_last: Ints | None = None,
        leftovers: Sequence[Made] = (),
        outputs: Sequence[Output] = (),
        waiting: Sequence[Waiting] = (),
        transient: Sequence[Output] = (),
    ) -> Ints:
        """[E]: the peak memory while the layers of a stage run in order, less what they keep at the end.

        Each layer v keeps kept[v] and needs max(0, own[v] - leftovers) more while it runs; its `leftovers` of layers
        that do not lie before the end are subtracted. The stage's last layer has own_of_last[v] in place of own[v], if
        that is given. `outputs` are the part of kept[v] that is there all the time if a consumer does not lie before the
        end. A gradient that is `waiting` is there from the stage's first use of its weight to before the last. What is
        `transient` counts in own[v] of each layer behind its producer up to its last reader; it is subtracted where the
        producer is not in the stage.

        O(L log L) and O(1) for each stage. O(L) for each end if there are leftovers, waiting gradients, or outputs that
        are not read by the next layer; as often again for each layer that makes such a transient one.
        """
        totals, of_last = np.cumsum(kept), own if own_of_last is None else own_of_last
        from_before = self._made_before((way, size) for way, size in transient if _is_read_next(way))
        lasting = [(way[0], way[1][-1], size) for way, size in transient if not _is_read_next(way)]
        if not leftovers and not waiting and not lasting and all(_is_read_next(way) for way, _ in outputs):
            return self._chain_peaks(first, end, totals, own, of_last, outputs, from_before) - totals[end - 1]
        layer, maker, num_bytes = np.array(leftovers, dtype=np.int64).reshape(-1, 3).T
        spans = [(made, read[-1], size) for (made, read), size in outputs]
        producer, reader, output_bytes = np.array(spans, dtype=np.int64).reshape(-1, 3).T
        peaks, order = np.empty(len(end), dtype=np.int64), np.argsort(end, kind="stable")
        for some in np.split(order, np.flatnonzero(np.diff(end[order])) + 1) if len(end) else ():
            last = int(end[some[0]])
            needed, freed = own[:last].copy(), kept[:last].copy()
            needed[last - 1] = of_last[last - 1]
            if last < self.num_layers:
                absent, held_on = (layer < last) & (maker >= last), (producer < last) & (reader >= last)
                np.subtract.at(needed, layer[absent], num_bytes[absent])
                np.subtract.at(freed, producer[held_on], output_bytes[held_on])
            levels = np.cumsum(freed)
            peaks[some] = _suffix_peaks(levels, needed, first[some], waiting, from_before, lasting) - levels[-1]
        return peaks

    def _chain_peaks(
        self,
        first: Ints,
        end: Ints,
        totals: Ints,
        own: Ints,
        of_last: Ints,
        outputs: Sequence[Output],
        from_before: Ints,
    ) -> Ints:
        """[E]: `running_peaks` above nothing, where the next layer is the only reader of everything."""
        is_one, is_long = end - first == 1, end - first > 2
        needed_first = np.where(is_one, of_last[first], own[first]) - from_before[first]
        at_first, at_last = totals[first] + np.maximum(needed_first, 0), (totals + np.maximum(of_last, 0))[end - 1]
        between = _largest_between(totals + own, first + is_long, end - is_long)
        before_last = np.where(is_long, np.maximum(at_first, between), at_first)
        leaving = self._made_before(outputs)[end] * (end < self.num_layers)
        return np.where(is_one, at_first, np.maximum(before_last + leaving, at_last))

    def _made_before(self, outputs: Iterable[Output]) -> Ints:
        """[P]: bytes of the outputs of the layer before each position."""
        found = np.zeros(self.size, dtype=np.int64)
        for (made, _), size in outputs:
            if made is not None:
                found[made + 1] += size
        return found

    def pass_through(self, outputs: Sequence[Output], *, is_unread: bool) -> StageBytesOf:
        """A function of stages (first, end) to [E]: the bytes of the W outputs made before and read after a stage.

        With `is_unread` only those that no layer of the stage reads. O(W^2), then O(log W) for each stage.
        """
        places = [((-1 if made is None else made, *read), size) for (made, read), size in outputs]
        spans = [
            (start, end, size)
            for stops, size in places
            for start, end in (pairwise(stops) if is_unread else [(stops[0], stops[-1])])
        ]
        long = np.array([x for x in spans if x[1] > x[0] + 1] or [(0, 0, 0)], dtype=np.int64)  # a layer lies in between
        made, made_at = np.unique(long[:, 0], return_inverse=True)
        last, last_at = np.unique(long[:, 1], return_inverse=True)
        table = np.zeros((len(made) + 1, len(last) + 1), dtype=np.int64)
        np.add.at(table, (made_at + 1, last_at), long[:, 2])
        table = table.cumsum(axis=0)[:, ::-1].cumsum(axis=1)[:, ::-1]
        return lambda first, end: table[np.searchsorted(made, first), np.searchsorted(last, end)]


def _is_read_next(way: Way) -> bool:
    made, read = way
    return made is None or read == (made + 1,)


def _suffix_peaks(
    levels: Ints,
    needed: Ints,
    first: Ints,
    waiting: Sequence[Waiting],
    from_before: Ints,
    lasting: Sequence[tuple[int | None, int, int]],
) -> Ints:
    """[E]: the largest of levels[first:] and what is needed above; stages with the same next users are alike.

    `from_before` is what the first layer needs less; `lasting` the producer, the last reader and the bytes of what all
    layers between need less where the stage begins behind the producer.
    """
    users_here = ([x for x in users if x < len(levels)] for users, _ in waiting)
    spans = [(users, num_bytes) for users, (_, num_bytes) in zip(users_here, waiting, strict=True) if len(users) > 1]
    makers = {made for made, _, _ in lasting if made is not None}
    starts = sorted({user for users, _ in spans for user in users[:-1]} | makers)
    peaks, number = np.empty(len(first), dtype=np.int64), np.searchsorted(starts, first)
    for i in np.unique(number):
        less, more = np.zeros_like(levels), levels.copy()
        for made, last, num_bytes in lasting:
            if made in starts[:i]:
                less[made + 1 : last + 1] += num_bytes
        for users, num_bytes in spans if i < len(starts) else ():
            start = next((x for x in users if x >= starts[i]), users[-1])
            more[start : users[-1]] += num_bytes
        here = number == i
        begin = first[here]
        later = np.maximum.accumulate((more + np.maximum(needed - less, 0))[::-1])[::-1]
        at_first = more[begin] + np.maximum(needed[begin] - less[begin] - from_before[begin], 0)
        peaks[here] = np.maximum(at_first, np.append(later[1:], at_first.min())[begin])
    return peaks


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
    """The position with exactly these layers before it; None if there is none."""
    places = np.flatnonzero(downsets.num_before == len(layers))
    for layer in layers:
        if len(places) == 1:  # of a chain's positions from the beginning
            break
        places = places[downsets.is_before(layer)[places]]
    is_found = len(places) and {*downsets.layers(0, int(places[0]))} == {*layers}
    return int(places[0]) if is_found else None


_STAGES_AT_ONCE = 1 << 16  # so that the arrays of a chunk stay in the cache


def _chunks(num_stages: int) -> Iterator[slice]:
    return (slice(start, start + _STAGES_AT_ONCE) for start in range(0, num_stages, _STAGES_AT_ONCE))


@dataclass(frozen=True, eq=False)
class GraphDownSets:
    """The positions of a graph, by rising number of layers; `members[P, L]` is true for the layers before each."""

    members: Bools

    @property
    def num_layers(self) -> int:
        """L."""
        return int(self.members.shape[1])

    @property
    def size(self) -> int:
        """P."""
        return len(self.members)

    @cached_property
    def num_before(self) -> Ints:
        """[P]: number of layers before each position, rising."""
        return np.asarray(self.members.sum(axis=1, dtype=np.int64))

    def is_before(self, layer: int) -> Bools:
        """[P]: whether the layer lies before each position."""
        return self.members[:, layer]

    def sums(self, values: Numbers) -> Numbers:
        """[P]: the sum of values[L] before each position, added in the layers' order as `Prefixes` does."""
        totals = np.zeros(self.size, dtype=values.dtype)
        for layer, value in enumerate(values):
            totals += np.where(self.members[:, layer], value, np.zeros_like(value))
        return totals

    def last_layers(self, first: Ints, end: Ints) -> Ints:
        """[E]: the last layer of stages, which run their layers by rising number."""
        return self.running_peaks(
            first, end, kept=np.zeros(self.num_layers, dtype=np.int64), own=np.arange(self.num_layers)
        )

    def layers(self, first: int, end: int) -> tuple[int, ...]:
        """The layers before `end` and not before `first`, rising."""
        return tuple(np.flatnonzero(self.members[end] & ~self.members[first]).tolist())

    def are_stages(self, first: Ints, end: Ints) -> Bools:
        """[E]: whether each `first` lies within its `end` and is not all of it; O(L / 64) for each stage."""
        inside: Bools = np.asarray(first != end)
        for word in self._words:
            inside = inside & (word[first] & ~word[end] == 0)
        return inside

    def running_peaks(
        self,
        first: Ints,
        end: Ints,
        *,
        kept: Ints,
        own: Ints,
        own_of_last: Ints | None = None,
        leftovers: Sequence[Made] = (),
        outputs: Sequence[Output] = (),
        waiting: Sequence[Waiting] = (),
        transient: Sequence[Output] = (),
    ) -> Ints:
        """[E]: as of `Prefixes`, a stage's layers running by rising number; O(L) for each stage."""
        peaks, by_layer = np.empty(len(first), dtype=np.int64), dict[int, list[tuple[Bools, int]]]()
        by_producer = dict[int | None, list[tuple[Bools, int]]]()
        for layer, maker, num_bytes in leftovers:
            by_layer.setdefault(layer, []).append((self._unread((maker,)), num_bytes))
        for (made, read), num_bytes in outputs:
            by_producer.setdefault(made, []).append((self._unread(read), num_bytes))

        def peaks_of(first: Ints, end: Ints) -> Ints:
            running = np.zeros(len(first), dtype=np.int64)
            largest = np.full(len(first), np.iinfo(np.int64).min)
            if own_of_last is not None:
                last = self.num_layers - 1 - np.argmax((self.members[end] & ~self.members[first])[:, ::-1], axis=1)
            uses = [sum(self._inside(x, first, end).astype(np.int64) for x in users) for users, _ in waiting]
            seen = [np.zeros(len(first), dtype=np.int64) for _ in waiting]
            for layer in range(self.num_layers):
                inside = self._inside(layer, first, end)
                running += inside * kept[layer]
                for unread, num_bytes in by_producer.get(layer, ()):
                    running -= inside * unread[end] * num_bytes
                needed = own[layer] if own_of_last is None else np.where(last == layer, own_of_last[layer], own[layer])
                for unread, num_bytes in by_layer.get(layer, ()):
                    needed = needed - num_bytes * unread[end]
                for (made, read), num_bytes in transient:
                    if made is not None and made < layer <= read[-1]:
                        needed = needed - num_bytes * ~self._inside(made, first, end)
                needed = np.maximum(needed, 0)
                for i, (users, num_bytes) in enumerate(waiting):
                    seen[i] += inside * (layer in users)
                    needed = needed + num_bytes * ((seen[i] > 0) & (seen[i] < uses[i]))
                np.maximum(largest, running + needed, out=largest, where=inside)
            return largest - running

        for chunk in _chunks(len(first)):
            peaks[chunk] = peaks_of(first[chunk], end[chunk])
        return peaks

    def _inside(self, layer: int, first: Ints, end: Ints) -> Bools:
        """[E]: whether stages have the layer."""
        before = self.members[:, layer]
        inside: Bools = before[end] & ~before[first]
        return inside

    def pass_through(self, outputs: Sequence[Output], *, is_unread: bool) -> StageBytesOf:
        """As of `Prefixes`; O(P W), then O(W) for each stage, or O(R) for all R readers."""
        everywhere = np.ones(self.size, dtype=np.bool_)
        ends = [
            (everywhere if made is None else self.is_before(made), self._unread(read), read, size)
            for (made, read), size in outputs
        ]

        def passing(first: Ints, end: Ints) -> Ints:
            passed = np.zeros(len(first), dtype=np.int64)
            for chunk in _chunks(len(first)):
                for made, unread, read, size in ends:
                    passes = made[first[chunk]] & unread[end[chunk]]
                    for reader in read if is_unread else ():
                        if reader < self.num_layers:
                            passes &= self.members[first[chunk], reader] | ~self.members[end[chunk], reader]
                    passed[chunk] += size * passes
            return passed

        return passing

    def _unread(self, layers: Sequence[int]) -> Bools:
        """[P]: whether any of the layers does not lie before each position."""
        if self.num_layers in layers:
            return self.num_before < self.num_layers
        unread: Bools = ~np.logical_and.reduce([self.is_before(x) for x in layers])
        return unread

    @cached_property
    def _words(self) -> NDArray[np.uint64]:
        """[L / 64, P]: the members packed into 64-bit words."""
        num_words = -(-self.num_layers // 64)
        padded = np.zeros((self.size, 64 * num_words), dtype=np.bool_)
        padded[:, : self.num_layers] = self.members
        return np.ascontiguousarray(np.packbits(padded, axis=1).view(np.uint64).T)


DownSets: TypeAlias = Prefixes | GraphDownSets
"""All P positions at which a model of L layers can be cut."""


def down_sets(graph: LayerGraph, *, most: int) -> GraphDownSets | None:
    """All down-sets of a layer graph: sets that contain, with a layer, all layers that must come before it.

    They are built level by level, a level being those of equal size. In a topological order each down-set comes from
    the one without its latest layer, so none is built twice and the size of a level is known beforehand.

    None if there are more than `most`, which is noticed before they are built. Raises ValueError for a cycle. O(P L)
    steps and P L bytes.

    >>> down_sets(LayerGraph(3, ((0, 2), (1, 2))), most=100).members.astype(int).tolist()
    [[0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 1, 0], [1, 1, 1]]
    """
    num_layers = graph.num_layers
    rank = np.argsort(np.array(graph.order, dtype=np.int64))  # of each layer in the topological order
    inputs = np.zeros((num_layers, num_layers), dtype=np.int16)  # by ranks; 1 if the column depends on the row
    for before, after in graph.edges:
        inputs[rank[before], rank[after]] = 1
    members, missing = np.zeros((1, num_layers), dtype=np.bool_), inputs.sum(axis=0, dtype=np.int16)[None]
    latest, levels, size = np.array([-1]), [members], 1
    for _ in range(num_layers):
        makes = (missing == 0) & ~members & (np.arange(num_layers) > latest[:, None])  # after all members
        size += int(np.count_nonzero(makes))
        if size > most:
            return None
        parent, latest = np.nonzero(makes)
        members = members[parent]
        members[np.arange(len(parent)), latest] = True
        missing = missing[parent] - inputs[latest]  # the number of inputs of each layer that are not in the set
        levels.append(members)
    return GraphDownSets(np.asfortranarray(np.concatenate(levels)[:, rank]))
