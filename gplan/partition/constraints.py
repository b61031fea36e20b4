"""Wishes as conditions on candidate stages: `cut_after`, `keep_together` and pins each rule some of them out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from gplan.core import Profile, Wishes
from gplan.core.errors import UsageError
from gplan.graph.down_sets import Bools, Ints, position_of
from gplan.partition.problem import Problem


class Granted:
    """Which candidate stages grant a problem's wishes."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._wishes = problem.wishes
        self._index = {layer.name: i for i, layer in enumerate(problem.costs.profile.layers)} if self._wishes else {}

    def may_be(self, stage: int, first: Ints, end: Ints) -> Bools:
        """[E]: whether these can be the stage."""
        granted = np.ones(len(first), dtype=np.bool_)
        for position in self._cut_positions:
            granted &= self._contained(end, position) | self._contained(position, first)
        for together in self._together:
            held = together[end] - together[first]
            granted &= (held == 0) | (held == together[-1])
        for pin in self._wishes.pins:
            inside = self._problem.costs.downsets.contain(self._index[pin.layer])
            granted &= (inside[end] & ~inside[first]) == (pin.stage == stage)
        return granted

    def _contained(self, one: Ints | int, other: Ints | int) -> Bools:
        a, b = np.broadcast_arrays(np.asarray(one), np.asarray(other))
        inside: Bools = (a == b) | self._problem.costs.downsets.contains(a, b)
        return inside

    @cached_property
    def _cut_positions(self) -> list[int]:
        found = []
        for name in self._wishes.cut_after:
            position = position_of(self._problem.costs.downsets, range(self._index[name] + 1))
            assert position is not None, "a prefix of a topological order is a down-set"
            found.append(position)
        return found

    @cached_property
    def _together(self) -> list[Ints]:
        sums = []
        for one, other in self._wishes.keep_together:
            inside = np.zeros(self._problem.num_layers, dtype=np.int64)
            inside[self._index[one] : self._index[other] + 1] = 1
            sums.append(self._problem.costs.downsets.int_sums(inside))
        return sums


def check_wishes(wishes: Wishes, profile: Profile, *, num_stages: int) -> None:
    """Raise UsageError for a wish that names what is not there."""
    names = [layer.name for layer in profile.layers]
    asked = [*wishes.cut_after, *(x for pair in wishes.keep_together for x in pair), *(x.layer for x in wishes.pins)]
    for name in asked:
        if name not in names:
            raise UsageError(f"there is no layer {name!r}; expected one of {', '.join(nearest(name, names))}")
    for one, other in wishes.keep_together:
        if names.index(one) > names.index(other):
            raise UsageError(
                f"{one} comes after {other}; expected the first layer first: --keep-together {other}..{one}"
            )
    for pin in wishes.pins:
        if not 0 <= pin.stage < num_stages:
            raise UsageError(f"{pin.layer} is pinned to stage {pin.stage}; expected 0 to {num_stages - 1}")
    if wishes.cut_after and names[-1] in wishes.cut_after:
        raise UsageError(f"{names[-1]} is the last layer; there is nothing to cut off after it")


def nearest(name: str, names: Sequence[str]) -> list[str]:
    """Names that a mistyped one could have meant, or the first few."""
    from difflib import get_close_matches

    close = get_close_matches(name, names, n=5, cutoff=0.6)
    return close or [*names[:5], *(["..."] if len(names) > 5 else [])]


def single_wishes(wishes: Wishes) -> Iterator[tuple[str, Wishes]]:
    """Each wish by itself, with the option that makes it."""
    for name in wishes.cut_after:
        yield f"--cut-after {name}", Wishes(cut_after=(name,))
    for one, other in wishes.keep_together:
        yield f"--keep-together {one}..{other}", Wishes(keep_together=((one, other),))
    for pin in wishes.pins:
        yield f"--pin {pin.layer}={pin.stage}", Wishes(pins=(pin,))


def together(wishes: Sequence[Wishes]) -> Wishes:
    """All of some wishes."""
    return Wishes(
        cut_after=tuple(x for some in wishes for x in some.cut_after),
        keep_together=tuple(x for some in wishes for x in some.keep_together),
        pins=tuple(x for some in wishes for x in some.pins),
    )
