"""Constraints as conditions on candidate stages: `cut_after`, `keep_together` and pins each rule some of them out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from gplan.core import Constraints, Profile
from gplan.core.errors import UsageError
from gplan.graph.down_sets import Bools, Ints, position_of
from gplan.partition.problem import Problem


class ConstraintCheck:
    """Which candidate stages satisfy a problem's constraints."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._constraints = problem.constraints
        self._index = (
            {layer.name: i for i, layer in enumerate(problem.costs.profile.layers)} if self._constraints else {}
        )

    def allows(self, stage: int, first: Ints, end: Ints) -> Bools:
        """[E]: whether these can be the stage."""
        granted = np.ones(len(first), dtype=np.bool_)
        for position in self._cut_positions:
            granted &= self._contained(end, position) | self._contained(position, first)
        for together in self._together:
            held = together[end] - together[first]
            granted &= (held == 0) | (held == together[-1])
        for pin in self._constraints.pins:
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
        for name in self._constraints.cut_after:
            position = position_of(self._problem.costs.downsets, range(self._index[name] + 1))
            assert position is not None, "a prefix of a topological order is a down-set"
            found.append(position)
        return found

    @cached_property
    def _together(self) -> list[Ints]:
        sums = []
        for one, other in self._constraints.keep_together:
            inside = np.zeros(self._problem.num_layers, dtype=np.int64)
            inside[self._index[one] : self._index[other] + 1] = 1
            sums.append(self._problem.costs.downsets.int_sums(inside))
        return sums


def check_constraints(constraints: Constraints, profile: Profile, *, num_stages: int) -> None:
    """Raise UsageError for a constraint that names what is not there."""
    names = [layer.name for layer in profile.layers]
    asked = [
        *constraints.cut_after,
        *(x for pair in constraints.keep_together for x in pair),
        *(x.layer for x in constraints.pins),
    ]
    for name in asked:
        if name not in names:
            raise UsageError(f"there is no layer {name!r}; expected one of {', '.join(nearest(name, names))}")
    for one, other in constraints.keep_together:
        if names.index(one) > names.index(other):
            raise UsageError(
                f"{one} comes after {other}; expected the first layer first: --keep-together {other}..{one}"
            )
    for pin in constraints.pins:
        if not 0 <= pin.stage < num_stages:
            raise UsageError(f"{pin.layer} is pinned to stage {pin.stage}; expected 0 to {num_stages - 1}")
    if constraints.cut_after and names[-1] in constraints.cut_after:
        raise UsageError(f"{names[-1]} is the last layer; there is nothing to cut off after it")


def nearest(name: str, names: Sequence[str]) -> list[str]:
    """Names that a mistyped one could have meant, or the first few."""
    from difflib import get_close_matches

    close = get_close_matches(name, names, n=5, cutoff=0.6)
    return close or [*names[:5], *(["..."] if len(names) > 5 else [])]


def single_constraints(constraints: Constraints) -> Iterator[tuple[str, Constraints]]:
    """Each constraint by itself, with the option that makes it."""
    for name in constraints.cut_after:
        yield f"--cut-after {name}", Constraints(cut_after=(name,))
    for one, other in constraints.keep_together:
        yield f"--keep-together {one}..{other}", Constraints(keep_together=((one, other),))
    for pin in constraints.pins:
        yield f"--pin {pin.layer}={pin.stage}", Constraints(pins=(pin,))


def together(constraints: Sequence[Constraints]) -> Constraints:
    """All of some constraints."""
    return Constraints(
        cut_after=tuple(x for some in constraints for x in some.cut_after),
        keep_together=tuple(x for some in constraints for x in some.keep_together),
        pins=tuple(x for some in constraints for x in some.pins),
    )
