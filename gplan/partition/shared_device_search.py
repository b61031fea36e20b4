"""The search behind `sharing.py`: from a plan to the partition with the smallest value of a goal, or to a bound of it.

Among the candidates that a better plan could take it begins with moves from the plan and from some with even stages, sweeps a
few prefixes wide, lets weights play for better bounds and other plans, and sweeps ever wider; at last ties are settled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from gplan.core.errors import NoPlanError
from gplan.core.machine import FREE_LINK
from gplan.core.units import bytes_text, seconds_text
from gplan.graph.down_sets import Bools, Floats, Ints, position_of
from gplan.partition.batch_simulation import Delay, simulate_window
from gplan.partition.bounds import busy_within, least_step_s
from gplan.partition.branch_and_bound import Known, ends_of, path_of, sweep
from gplan.partition.candidates import (
    Candidates,
    Cap,
    TooManyCandidates,
    candidates_within,
    loads_s,
    on_paths,
    stage_seconds,
)
from gplan.partition.device_memory import device_peaks
from gplan.partition.dominance import best_by_end
from gplan.partition.lagrangian import Goal, Play, Weighed, first_weighed
from gplan.partition.local_search import polish
from gplan.partition.memory_feasibility import Room, least_mean_peak
from gplan.partition.minimax import least_load_s, smallest_largest, stages_between
from gplan.partition.objectives import LoadGoal, PeakGoal, StepGoal
from gplan.partition.plan_evaluation import fits_memory
from gplan.partition.prefixes import Nodes, empty_prefix
from gplan.partition.problem import Problem, Solution, compute_sums_s, device_sums, without_memory

_MOST_CANDIDATES = 3_000_000  # that are searched
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
    goal_of: Callable[[Problem, Sequence[Candidates]], Goal]
    cap_of: Callable[[float], Cap]  # which stages a plan with a value up to this can have
    least: float  # below which no value is
    enough: float | None = None  # a value that is as good as the smallest; None: none is
    num_evened: int = 1  # plans with even stages that are looked at to begin with

    def run(self, known: Known, *, deadline_s: float) -> Known:
        """What is known after a search that begins with a plan."""
        known = replace(known, lower_bound=max(known.lower_bound, min(self.least, known.worth)))
        if self.enough is not None and self.is_done(known):
            return known
        candidates, is_whole = self._candidates(known)
        if candidates is None:
            return replace(known, lower_bound=known.worth) if is_whole else known
        found = self._searched(candidates, known, deadline_s)
        return found if is_whole else replace(found, lower_bound=known.lower_bound)

    def moved(self, known: Known, *, deadline_s: float) -> Known:
        """What is known after moves from that plan alone."""
        candidates, _ = self._candidates(known)
        return (
            known if candidates is None else self._polished(self.goal_of(self.problem, candidates), known, deadline_s)
        )

    def _candidates(self, known: Known) -> tuple[list[Candidates] | None, bool]:
        """Those that a better plan can have and that there may be room for, if there is one; whether they are all."""
        try:
            candidates, is_whole = (
                candidates_within(self.problem, self.cap_of(known.value * (1 + _SLACK)), most=_MOST_CANDIDATES),
                True,
            )
        except TooManyCandidates:
            candidates, is_whole = (
                candidates_within(self.problem, self._narrow_cap(known), most=_MOST_CANDIDATES),
                False,
            )
        return None if candidates is None else self._with_room(candidates), is_whole

    def _narrow_cap(self, known: Known) -> Cap:
        """Stages not much longer than those of the plan that is known."""
        sums = compute_sums_s(self.problem)
        longest_s = float(np.diff(sums[known.ends], prepend=0.0).max()) + 2 * self.problem.costs.overhead_s
        return Cap(by_load=False, most_s=[_NARROW * longest_s] * self.problem.num_stages)

    def _with_room(self, candidates: list[Candidates]) -> list[Candidates] | None:
        """The candidates beside which there may be room for the other stages of their device."""
        if not self.problem.has_memory_limit:
            return candidates
        room = Room(self.problem, candidates)
        kept = [some.take(room.fitting(stage)) for stage, some in enumerate(candidates)]
        return on_paths(kept, self.problem.costs.num_positions)

    def _searched(self, candidates: list[Candidates], known: Known, deadline_s: float) -> Known:
        """What is known after a search among the paths of these candidates."""
        weighed = first_weighed(self.goal_of(self.problem, candidates))
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
            replace(known, ends=ends_of(goal.candidates, path), value=value)
            for path, value in zip(every, values, strict=True)
        ]

    def _played(self, weighed: Weighed, known: Known, deadline_s: float) -> tuple[Weighed, Known]:
        """Better weights, and the partitions found on the way."""
        now_s = time.perf_counter()
        until_s = now_s + _SHARE_OF_PLAY * (deadline_s - now_s)
        path = path_of(weighed.candidates, known.ends)
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
        start = replace(known, ends=ends_of(goal.candidates, path), value=float(goal.values(path[None])[0]))
        found = self._polished(goal, start, deadline_s)
        return found if found.value < known.value else known

    def _polished(self, goal: Goal, known: Known, deadline_s: float) -> Known:
        path = path_of(goal.candidates, known.ends)
        if path is None:
            return known
        may_be = self._room(goal) if self.problem.has_memory_limit else None
        path = polish(self.problem, goal.candidates, path, values=goal.values, may_be=may_be, deadline_s=deadline_s)
        return replace(known, ends=ends_of(goal.candidates, path), value=float(goal.values(path[None])[0]))

    def _room(self, goal: Goal) -> Callable[[Ints], Bools]:
        return Room(self.problem, goal.candidates).fits

    def _prefixes(self, weighed: Weighed) -> Prefixes:
        room = Room(self.problem, weighed.candidates) if self.problem.has_memory_limit else None
        return Prefixes(weighed=weighed, room=room)


def _promising(weighed: Weighed, known: Known) -> Weighed | None:
    """The bounds of the candidates that a plan worth having could take; None where there is none."""
    worthy = [some.take(x < known.worth) for some, x in zip(weighed.candidates, weighed.through_s, strict=True)]
    candidates = on_paths(worthy, weighed.problem.costs.num_positions)
    return None if candidates is None else weighed.among(candidates)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefixes:
    """Prefixes bounded by weights and by their goal; those without room for them are bounded by infinity."""

    weighed: Weighed
    room: Room | None
    solver: str = "branch-and-bound"

    def root(self) -> Nodes:
        """The empty prefix; labels hold what its stages add to the mean."""
        return empty_prefix(self.weighed, [0.0])

    def grow(self, parents: Nodes, candidates: Ints) -> Nodes:
        """Each parent with one more stage."""
        weighed, stage, paths = self.weighed, parents.stage, np.column_stack([parents.paths, candidates])
        end = weighed.candidates[stage].end[candidates]
        added = parents.labels[:, 0] + weighed.values[stage][candidates]
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


# Partitions where devices hold several stages: the smallest step, or the smallest largest load of a device.
#
# The best cut of one stage depends on the others of its device, so no program over (stage, position) settles it. What
# does is branch and bound over the cuts, from the first stage to the last, among the candidates that a plan better than the
# best one known could take: prefixes are bounded by a simulation, or by the loads so far (`goals.py`), and by weights
# (`weighing.py`). Exact, ties up to rounding apart; where the time is up, or the candidates are too many to be held, the proof
# states the gap.
#
# The memory of a device is that of all its stages at once. Candidates are held against what they need beside the least of the
# device's other stages, prefixes against the least of those to come, partitions against the whole replay (`room.py`).
# Where the first plan does not fit, one that does is looked for by the smallest largest peak, just as the least memory
# that does is found: what that finds is not missed here.


TIME_LIMIT_S = 10.0

_NUM_EVENED = 40  # plans, to begin a search for the smallest peak with
_SHARE_OF_START = 0.25  # of the time that is left, for one of several plans to begin with
_SHARE_OF_FIRST = 0.5  # of the time that is left: if the first plan took longer, it is the only one to begin with


def smallest_shared(
    problem: Problem, *, start: Solution | None = None, time_limit_s: float = TIME_LIMIT_S
) -> Solution | None:
    """The partition with the smallest step, or the smallest largest load; None where none is possible.

    It is no worse than `start`, if that is given and fits. Raises NoPlanError where in that time no plan was found that
    fits, nor that there is none.
    """
    started_s = time.perf_counter()
    given = None if start is None or not fits_memory(problem, start.stages) else _ends_of(problem, start.stages)
    deadline_s = started_s + time_limit_s
    starts = _starts(problem, given, deadline_s=deadline_s)
    if not starts:
        return None
    hunt = _hunt_for(problem)
    known = hunt.run(_best_of(hunt, starts, deadline_s), deadline_s=deadline_s)
    what = "a shorter step" if problem.minimize == "step-time" else "a smaller largest load"
    return Solution(
        stages=stages_between(problem, known.ends.tolist()),
        lower_bound_s=known.value if known.proven else known.lower_bound,
        solver="branch-and-bound",
        notes=() if known.proven else (f"the search for {what} was stopped after {seconds_text(time_limit_s)}",),
    )


def _best_of(hunt: Hunt, starts: Sequence[Ints], deadline_s: float) -> Known:
    """What is known of the best of some partitions; after moves, where there are several."""
    values = [_value_s(hunt.problem, ends) for ends in starts]
    every = [Known(ends=ends, value=x, lower_bound=min(x, hunt.least)) for ends, x in zip(starts, values, strict=True)]
    if len(every) > 1:
        every = [hunt.moved(known, deadline_s=_part_of(deadline_s)) for known in every]
    return min(every, key=lambda known: known.value)


def _part_of(deadline_s: float) -> float:
    """Until when one of several beginnings may take."""
    now_s = time.perf_counter()
    return now_s + _SHARE_OF_START * (deadline_s - now_s)


def _value_s(problem: Problem, ends: Ints) -> float:
    """What the problem minimises, of a partition."""
    pairs = [np.array([[first], [end]]) for first, end in pairwise([0, *ends.tolist()])]
    window = [stage_seconds(problem, stage, *pair) for stage, pair in enumerate(pairs)]
    if problem.minimize == "step-time":
        return float(simulate_window(problem, window, first_stage=0, delay=Delay()).optimizer_s[0])
    loads = [loads_s(problem, stage, pairs[stage][0], times)[0] for stage, times in enumerate(window)]
    return float(max(device_sums(problem, loads)))


def smallest_peak(problem: Problem, *, enough: float | None = None, deadline_s: float) -> Known | None:
    """The partition with the smallest largest peak of a device, in bytes; None where none is possible.

    With `enough` only whether a partition has no larger peak than that is settled: half of the time goes into the
    smallest of all, the other half into those within it alone.
    """
    free = without_memory(problem)
    start = _stages_apart(free)
    if start is None:
        return None
    hunt, known = _peak_hunt(free, enough), _known_peak(free, start)
    if enough is None:
        return hunt.run(known, deadline_s=deadline_s)
    known = hunt.run(known, deadline_s=0.5 * (time.perf_counter() + deadline_s))
    return known if hunt.is_done(known) else hunt.run(replace(known, limit=enough + 0.5), deadline_s=deadline_s)


def _peak_hunt(free: Problem, enough: float | None) -> Hunt:
    everything = Cap.of_load(float("inf"), num_stages=free.num_stages)
    return Hunt(
        problem=free,
        goal_of=PeakGoal,
        cap_of=lambda _: everything,
        least=least_mean_peak(free),
        enough=enough,
        num_evened=_NUM_EVENED,
    )


def _known_peak(free: Problem, start: Solution) -> Known:
    """The largest peak of a device, of a partition."""
    ends = _ends_of(free, start.stages)
    peaks = device_peaks(free, np.array([0, *ends[:-1]])[:, None], ends[:, None])
    return Known(ends=ends, value=float(peaks.max()), lower_bound=0.0)


def _starts(problem: Problem, given: Ints | None, *, deadline_s: float) -> list[Ints]:
    """Where the stages of partitions end, to begin with, that fit the memory; none where none is possible.

    Of the given one and that which is made without a search the better; where the latter does not fit, the given one,
    or one that is found, and that to which moves away from the latter lead.
    """
    started_s, apart = time.perf_counter(), _stages_apart(without_memory(problem))
    if apart is None:
        return []
    known = [] if given is None else [given]
    if fits_memory(problem, apart.stages):
        return [min([_ends_of(problem, apart.stages), *known], key=lambda x: _value_s(problem, x))]
    known = known or _found_to_fit(problem, deadline_s=deadline_s)
    now_s = time.perf_counter()
    if not known or now_s - started_s > _SHARE_OF_FIRST * (deadline_s - now_s):
        return known
    return [*known, *_moved_to_fit(problem, apart, deadline_s=_part_of(deadline_s))]


def _found_to_fit(problem: Problem, *, deadline_s: float) -> list[Ints]:
    """One partition that fits; none where none is possible. Raises NoPlanError where neither is known in time."""
    limit = problem.memory_of(0)
    assert limit is not None, "without a limit every partition fits"
    known = smallest_peak(problem, enough=limit, deadline_s=deadline_s)
    assert known is not None, "there is a partition"
    if known.value <= limit or known.lower_bound > limit:
        return [known.ends] if known.value <= limit else []
    raise NoPlanError(
        f"in this time no partition was found that fits {bytes_text(limit)} per device, nor that there is none; the smallest "
        f"memory that was found to fit is {bytes_text(int(known.value))}; allow more time (--time-limit), or give each device "
        "more memory"
    )


def _moved_to_fit(problem: Problem, start: Solution, *, deadline_s: float) -> list[Ints]:
    """The partition to which moves lead that make the largest peak smaller, if it fits."""
    free = without_memory(problem)
    moved = _peak_hunt(free, None).moved(_known_peak(free, start), deadline_s=deadline_s)
    return [moved.ends] if moved.value <= (problem.memory_of(0) or 0) else []


def _stages_apart(problem: Problem) -> Solution | None:
    """The partition with the smallest largest stage, as if each stage had a device of its own."""
    links = (FREE_LINK,) * (problem.num_stages - 1)
    return smallest_largest(replace(problem, schedule="gpipe", minimize="max-stage", links=links, recompute="never"))


def _ends_of(problem: Problem, stages: Sequence[Sequence[int]]) -> Ints:
    held, ends = list[int](), []
    for layers in stages:
        held.extend(layers)
        ends.append(position_of(problem.costs.downsets, held))
    return np.array(ends, dtype=np.int64)


def _hunt_for(problem: Problem) -> Hunt:
    """The search for what the problem minimises."""
    if problem.minimize == "step-time":
        return Hunt(
            problem=problem,
            goal_of=StepGoal,
            cap_of=lambda value: busy_within(problem, value),
            least=least_step_s(problem),
        )
    num_stages, least_s = problem.num_stages, least_load_s(problem)
    return Hunt(
        problem=problem,
        goal_of=LoadGoal,
        cap_of=lambda value: Cap.of_load(value, num_stages=num_stages),
        least=least_s,
    )
