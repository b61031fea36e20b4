"""Constraints as a check on candidate stages: `cut_after`, `keep_together` and pins each rule some of them out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from gplan.core import Constraints, Profile
from gplan.core.errors import UsageError
from gplan.graph.down_sets import Bools, Ints, position_of
from gplan.partition.problem import Problem


class ConstraintCheck:
    """Decides which candidate stages, pairs of positions (first, end), satisfy the constraints of a problem."""

    def __init__(self, problem: Problem) -> None:
        constraints, self._downsets = problem.constraints, problem.costs.downsets
        index = {layer.name: i for i, layer in enumerate(problem.costs.profile.layers)} if constraints else {}
        self._cuts = [position_of(self._downsets, range(index[name] + 1)) for name in constraints.cut_after]
        self._kept_counts = []  # for each keep_together, [P]: how many of its layers lie before each position
        for first, last in constraints.keep_together:
            members = np.zeros(problem.num_layers, dtype=np.int64)
            members[index[first] : index[last] + 1] = 1
            self._kept_counts.append(self._downsets.sums(members))
        self._pins = [(self._downsets.is_before(index[pin.layer]), pin.stage) for pin in constraints.pins]

    def allows(self, stage: int, first: Ints, end: Ints) -> Bools:
        """[E]: whether each candidate can be the stage with this number."""
        allowed = np.ones(len(first), dtype=np.bool_)
        for cut in self._cuts:
            assert cut is not None, "a prefix of a topological order is a down-set"
            allowed &= self._contains(end, cut) | self._contains(cut, first)
        for counts in self._kept_counts:
            num_inside = counts[end] - counts[first]
            allowed &= (num_inside == 0) | (num_inside == counts[-1])
        for is_before, pinned_stage in self._pins:
            allowed &= (is_before[end] & ~is_before[first]) == (pinned_stage == stage)
        return allowed

    def _contains(self, inner: Ints | int, outer: Ints | int) -> Bools:
        """Whether the layers before one position are all before the other."""
        a, b = np.broadcast_arrays(np.asarray(inner), np.asarray(outer))
        inside: Bools = (a == b) | self._downsets.are_stages(a, b)
        return inside


def check_constraints(constraints: Constraints, profile: Profile, *, num_stages: int) -> None:
    """Raise UsageError for a constraint with an unknown layer or stage, or layers in the wrong order."""
    names = [layer.name for layer in profile.layers]
    pairs = [x for pair in constraints.keep_together for x in pair]
    for name in (*constraints.cut_after, *pairs, *(x.layer for x in constraints.pins)):
        if name not in names:
            raise UsageError(f"the profile has no layer {name!r}; expected one of {_similar_names_text(name, names)}")
    for first, last in constraints.keep_together:
        if names.index(first) > names.index(last):
            raise UsageError(
                f"{first} comes after {last}; expected the first layer first: --keep-together {last}..{first}"
            )
    for pin in constraints.pins:
        if not 0 <= pin.stage < num_stages:
            raise UsageError(f"{pin.layer} is pinned to stage {pin.stage}; expected 0 to {num_stages - 1}")
    if names[-1] in constraints.cut_after:
        raise UsageError(f"{names[-1]} is the last layer; there is nothing to cut off after it")


def _similar_names_text(name: str, names: Sequence[str]) -> str:
    """The layers to choose from: all of a few; else their number, with those most similar to `name` or the first five."""
    from difflib import get_close_matches

    like = get_close_matches(name, names, n=5, cutoff=0.6) or names[:5]
    if len(names) == len(like):
        return ", ".join(names)
    return f"its {len(names)} layers, such as {', '.join(like)} (`gplan show --all` lists them)"


def constraint_options(constraints: Constraints) -> Iterator[tuple[str, Constraints]]:
    """Each constraint by itself, with the option of the command line that makes it."""
    for name in constraints.cut_after:
        yield f"--cut-after {name}", Constraints(cut_after=(name,))
    for first, last in constraints.keep_together:
        yield f"--keep-together {first}..{last}", Constraints(keep_together=((first, last),))
    for pin in constraints.pins:
        yield f"--pin {pin.layer}={pin.stage}", Constraints(pins=(pin,))


def combined(constraints: Sequence[Constraints]) -> Constraints:
    """All of several constraints."""
    return Constraints(
        cut_after=tuple(x for each in constraints for x in each.cut_after),
        keep_together=tuple(x for each in constraints for x in each.keep_together),
        pins=tuple(x for each in constraints for x in each.pins),
        profile_order=any(each.profile_order for each in constraints),
    )
