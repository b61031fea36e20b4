"""The search behind `sharing.py`: from a plan to the partition with the smallest value of a goal, or to a bound of it.

Among the arcs that a better plan could take it begins with moves from the plan and from some with even stages, sweeps a
few prefixes wide, lets weights play for better bounds and other plans, and sweeps ever wider; at last ties are settled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gplan.balancer.arcs import Arcs, Cap, TooManyArcs, arcs_within, on_paths
from gplan.balancer.branch import Known, ends_of, path_of, sweep
from gplan.balancer.labels import best_by_end
from gplan.balancer.moves import polish
from gplan.balancer.nodes import Nodes, empty_prefix
from gplan.balancer.problem import Problem, compute_sums_s
from gplan.balancer.room import Room
from gplan.balancer.weighing import Goal, Play, Weighed, first_weighed
from gplan.downsets import Bools, Floats, Ints

_MOST_ARCS = 3_000_000  # that are searched
_NARROW = 1.5  # times the longest stage of the best plan known: the stages that are looked at where all are too many
_ROUNDING = 1e-12
_SLACK = 1e-9  # share by which a bound may be off
_FIRST_WIDTH = 64
_WIDER = 8  # times, from sweep to sweep
_NUM_BLENDED = 17  # plans, to begin a search for a peak that is small enough with
_BURST = 25  # rounds of play, after which a partition is tried
_NUM_BURSTS = 16
_SHARE_OF_PLAY = 0.5  # of the time that is left
_WORTH_A_BURST = 1e-4  # share of the bound by which it must rise for another


@dataclass(frozen=True, slots=True, kw_only=True)
class Hunt:
    """A search for the smallest value of a goal."""

    problem: Problem
    goal_of: Callable[[Problem, Sequence[Arcs]], Goal]
    cap_of: Callable[[float], Cap]  # which stages a plan with a value up to this can have
    least: float  # below which no value is
    enough: float | None = None  # a value that is as good as the smallest; None: none is
    num_evened: int = 1  # plans with even stages that are looked at to begin with

    def run(self, known: Known, *, deadline_s: float) -> Known:
        """What is known after a search that begins with a plan."""
        known = replace(known, lower_bound=max(known.lower_bound, min(self.least, known.worth)))
        if self.enough is not None and self.is_done(known):
            return known
        arcs, is_whole = self._arcs(known)
        if arcs is None:
            return replace(known, lower_bound=known.worth) if is_whole else known
        found = self._searched(arcs, known, deadline_s)
        return found if is_whole else replace(found, lower_bound=known.lower_bound)

    def moved(self, known: Known, *, deadline_s: float) -> Known:
        """What is known after moves from that plan alone."""
        arcs, _ = self._arcs(known)
        return known if arcs is None else self._polished(self.goal_of(self.problem, arcs), known, deadline_s)

    def _arcs(self, known: Known) -> tuple[list[Arcs] | None, bool]:
        """Those that a better plan can have and that there may be room for, if there is one; whether they are all."""
        try:
            arcs, is_whole = arcs_within(self.problem, self.cap_of(known.value * (1 + _SLACK)), most=_MOST_ARCS), True
        except TooManyArcs:
            arcs, is_whole = arcs_within(self.problem, self._narrow_cap(known), most=_MOST_ARCS), False
        return None if arcs is None else self._with_room(arcs), is_whole

    def _narrow_cap(self, known: Known) -> Cap:
        """Stages not much longer than those of the plan that is known."""
        sums = compute_sums_s(self.problem)
        longest_s = float(np.diff(sums[known.ends], prepend=0.0).max()) + 2 * self.problem.costs.overhead_s
        return Cap(by_load=False, most_s=[_NARROW * longest_s] * self.problem.num_stages)

    def _with_room(self, arcs: list[Arcs]) -> list[Arcs] | None:
        """The arcs beside which there may be room for the other stages of their device."""
        if not self.problem.has_memory_limit:
            return arcs
        room = Room(self.problem, arcs)
        kept = [some.take(room.fitting(stage)) for stage, some in enumerate(arcs)]
        return on_paths(kept, self.problem.costs.num_positions)

    def _searched(self, arcs: list[Arcs], known: Known, deadline_s: float) -> Known:
        """What is known after a search among the paths of these arcs."""
        weighed = first_weighed(self.goal_of(self.problem, arcs))
        known = self._begun(self._bounded(known, weighed), weighed, deadline_s)
        width = _FIRST_WIDTH
        while not self.is_done(known) and time.perf_counter() < deadline_s:
            promising = _promising(weighed, known)
            if promising is None:
                return replace(known, lower_bound=known.worth)
            weighed = promising
            known = sweep(weighed, self._prefixes(weighed), known, width=width, deadline_s=deadline_s)
            if width == _FIRST_WIDTH and not self.is_done(known):
                weighed, known = self._played(weighed, known, deadline_s)
            width *= _WIDER
        return self._polished(weighed.goal, known, deadline_s)

    def is_done(self, known: Known) -> bool:
        """Whether no better value is looked for: none is there, or it is settled whether one is good enough."""
        if self.enough is None:
            return known.proven
        return known.proven or known.value <= self.enough or known.lower_bound > self.enough

    def _bounded(self, known: Known, weighed: Weighed) -> Known:
        return replace(known, lower_bound=max(known.lower_bound, min(weighed.whole_s, known.worth)))

    def _begun(self, known: Known, weighed: Weighed, deadline_s: float) -> Known:
        """What is known after moves from the best of that plan and some with even stages; the most even one comes last.

        Where a value is good enough, the one with the most even loads that has it will do.
        """
        if self.enough is not None:
            blended = self._plans(weighed.goal, weighed.blended_paths(_NUM_BLENDED), known)
            enough = next((x for x in blended if x.value <= self.enough), None)
            if enough is not None:
                return enough
        evened = self._plans(weighed.goal, weighed.even_paths(self.num_evened), known)
        start = min([known, *evened], key=lambda x: x.value)
        found = self._polished(weighed.goal, start, deadline_s)
        if self.num_evened == 1 or not evened or evened[0] is start or self.is_done(found):
            return found
        other = self._polished(weighed.goal, evened[0], deadline_s)
        return min(found, other, key=lambda x: x.value)

    def _plans(self, goal: Goal, paths: Sequence[Ints], known: Known) -> list[Known]:
        """Those of some partitions that fit, with all else that is known."""
        every = np.array(paths)
        every = every[self._room(goal)(every)]
        values = goal.values(every).tolist()
        return [
            replace(known, ends=ends_of(goal.arcs, path), value=value)
            for path, value in zip(every, values, strict=True)
        ]

    def _played(self, weighed: Weighed, known: Known, deadline_s: float) -> tuple[Weighed, Known]:
        """Better weights, and the partitions found on the way."""
        now_s = time.perf_counter()
        until_s = now_s + _SHARE_OF_PLAY * (deadline_s - now_s)
        path = path_of(weighed.arcs, known.ends)
        play = Play.begun(weighed, weighed.best_path() if path is None else path)
        for _ in range(_NUM_BURSTS):
            before = known
            play.go_on(_BURST, deadline_s=until_s)
            known = self._bounded(known, play.weighed)
            known = self._tried(weighed.goal, play.middle_path(), known, until_s)
            rise = known.lower_bound - before.lower_bound
            is_stuck = rise < _WORTH_A_BURST * known.lower_bound and known.value == before.value
            if self.is_done(known) or is_stuck or time.perf_counter() > until_s:
                break
        return play.weighed, known

    def _tried(self, goal: Goal, path: Ints, known: Known, deadline_s: float) -> Known:
        """What is known after moves from another partition, if that fits."""
        if not self._room(goal)(path[None])[0]:
            return known
        start = replace(known, ends=ends_of(goal.arcs, path), value=float(goal.values(path[None])[0]))
        found = self._polished(goal, start, deadline_s)
        return found if found.value < known.value else known

    def _polished(self, goal: Goal, known: Known, deadline_s: float) -> Known:
        path = path_of(goal.arcs, known.ends)
        if path is None:
            return known
        may_be = self._room(goal) if self.problem.has_memory_limit else None
        path = polish(self.problem, goal.arcs, path, values=goal.values, may_be=may_be, deadline_s=deadline_s)
        return replace(known, ends=ends_of(goal.arcs, path), value=float(goal.values(path[None])[0]))

    def _room(self, goal: Goal) -> Callable[[Ints], Bools]:
        return Room(self.problem, goal.arcs).fits

    def _prefixes(self, weighed: Weighed) -> Prefixes:
        room = Room(self.problem, weighed.arcs) if self.problem.has_memory_limit else None
        return Prefixes(weighed=weighed, room=room)


def _promising(weighed: Weighed, known: Known) -> Weighed | None:
    """The bounds of the arcs that a plan worth having could take; None where there is none."""
    worthy = [some.take(x < known.worth) for some, x in zip(weighed.arcs, weighed.through_s, strict=True)]
    arcs = on_paths(worthy, weighed.problem.costs.num_positions)
    return None if arcs is None else weighed.among(arcs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefixes:
    """Prefixes bounded by weights and by their goal; those without room for them are bounded by infinity."""

    weighed: Weighed
    room: Room | None
    solver: str = "branch-and-bound"

    def root(self) -> Nodes:
        """The empty prefix; labels hold what its stages add to the mean."""
        return empty_prefix(self.weighed, [0.0])

    def grow(self, parents: Nodes, arcs: Ints) -> Nodes:
        """Each parent with one more stage."""
        weighed, stage, paths = self.weighed, parents.stage, np.column_stack([parents.paths, arcs])
        end = weighed.arcs[stage].end[arcs]
        added = parents.labels[:, 0] + weighed.values[stage][arcs]
        bounds = np.maximum(parents.bounds_s, (added + weighed.rest_s[stage + 1][end]) * (1 - _ROUNDING))
        there = np.arange(len(paths)) if self.room is None else np.flatnonzero(self.room.may_fit(paths))
        least = np.full(len(paths), np.inf)
        least[there] = weighed.goal.least(paths[there])
        return Nodes(paths=paths, last_end=end, labels=added[:, None], bounds_s=np.maximum(bounds, least))

    def undominated(self, nodes: Nodes) -> Nodes:
        """Without the prefixes that another one matches in all that the rest needs to know, where that is little."""
        labels = None if self.room is not None else self.weighed.goal.labels(nodes.paths)
        if labels is None:
            return nodes
        return best_by_end(nodes, labels)

    def values(self, paths: Ints) -> Floats:
        """[N]: what is to be small."""
        return self.weighed.goal.values(paths)
