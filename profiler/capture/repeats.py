"""Which layers of a chain need measuring: runs of layers that repeat are cut short, the rest is shared out.

A run is a pattern of one or more layers (by their structure) that follows itself. Of its repetitions the first few and
the last are kept; since what enters a repetition is shaped like what leaves it, the kept layers form a chain again.
The ones left out cost what the second repetition costs: it has neighbours of its own kind on both sides.

    structures  e b b b b b b b n h        kept  0 1 2 3 7 8 9        layers 4, 5, 6 are like 2
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import cache
from itertools import groupby

KEPT_REPETITIONS = 4
_LONGEST_PATTERN = 64  # a block may have some dozens of operations


def sources(structures: Sequence[Hashable], *, kept: int = KEPT_REPETITIONS) -> tuple[int, ...]:
    """For every layer the layer whose costs it has: itself if it is to be measured. O(L) times the longest pattern.

    `kept` repetitions of a run are measured, at least 2.

    >>> sources("ebbbbbbbnh")
    (0, 1, 2, 3, 2, 2, 2, 7, 8, 9)
    >>> sources("xababababababy", kept=2)
    (0, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 11, 12, 13)
    """
    found: list[int] = []
    while len(found) < len(structures):
        first = len(found)
        length, count = _longest_run(structures, first)
        like = first + (length if kept > 2 else 0)
        for repetition in range(count):
            is_kept = repetition < kept - 1 or repetition == count - 1
            start = first + repetition * length if is_kept else like
            found.extend(range(start, start + length))
    return tuple(found)


class Places:
    """Where a layer has what its source has some kept layers later, given the `sources` of all layers."""

    def __init__(self, found: Sequence[int]) -> None:
        self._found = found
        self._kept = [i for i, source in enumerate(found) if source == i]
        self._place = {layer: i for i, layer in enumerate(self._kept)}
        self._runs = dict(_left_out_runs(found))
        self._end = cache(self._find_end)

    def after(self, layer: int, num_later: int) -> int:
        """The layer that is to `layer` what the kept one that many kept layers after its source is to that.

        Another repetition of the same run is as many layers away as among the kept ones, but none comes after the last;
        what follows the run is where it is. L behind the last layer.

        >>> places = Places(sources("ebbbbbbbnh"))
        >>> [places.after(5, 1), places.after(3, 1), places.after(5, 3), places.after(5, 5)]
        [6, 4, 8, 10]
        """
        end = self._end(self._found[layer], num_later)
        if end is not None:
            return end
        place = layer + num_later
        if layer in self._runs:
            length, last = self._runs[layer]
            place -= max(0, -(-(place - last) // length)) * length
        return place

    def _find_end(self, source: int, num_later: int) -> int | None:
        """Where a kept layer's other one is; None for one of the same run, or without a run in between."""
        place = self._place[source] + num_later
        if place >= len(self._kept):
            return len(self._found)
        end = self._kept[place]
        left_out = [i for i in range(source, end) if i in self._runs]
        if not left_out:
            return None
        runs = {self._runs[i] for i in left_out}
        is_same_run = len(runs) == 1 and end <= runs.pop()[1] and source >= self._found[left_out[0]]
        return None if is_same_run else end


def _left_out_runs(found: Sequence[int]) -> Iterator[tuple[int, tuple[int, int]]]:
    """For every layer that is not measured the length of its run's pattern, and the run's last layer."""
    for is_left_out, some in groupby(range(len(found)), key=lambda i: found[i] != i):
        layers = list(some)
        pattern = {found[i] for i in layers}
        if is_left_out:
            yield from ((i, (len(pattern), layers[-1] + len(pattern))) for i in layers)


def _longest_run(structures: Sequence[Hashable], first: int) -> tuple[int, int]:
    """Length of the pattern that starts at `first` and how often it follows: the run that covers the most layers."""
    best = (1, 1)
    for length in range(1, min(_LONGEST_PATTERN, (len(structures) - first) // 2) + 1):
        pattern, count = structures[first : first + length], 1
        while structures[first + count * length : first + (count + 1) * length] == pattern:
            count += 1
        if count > 1 and (best[1] == 1 or length * count > best[0] * best[1]):
            best = (length, count)
    return best
