"""Partitions where devices hold several stages: the smallest step, the smallest largest load or peak of a device.

The best cut of one stage depends on the others of its device, so no program over (stage, position) settles it.
`branch_and_bound` searches the cuts from the first stage to the last, among the candidates that a better plan could
take. Prefixes are bounded by a simulation or by the loads so far (`objectives.py`) and by weights (`lagrangian.py`).
Exact, ties up to rounding apart; when the time is up, the proof states the gap.

The memory of a device is that of all its stages at once: candidates are checked beside the least of the device's other
stages, prefixes beside the least of those to come, partitions by the whole replay. Where the first plan does not fit,
one that fits is looked for by the smallest largest peak.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from gplan.core.errors import NoPlanError
from gplan.core.machine import FREE_LINK
from gplan.core.units import bytes_text
from gplan.graph.down_sets import Bools, Ints
from gplan.partition.batch_simulation import Delay, simulate_window
from gplan.partition.bounds import busy_within, least_step_s
from gplan.partition.branch_and_bound import (
    Incumbent,
    branch_and_bound,
    ends_of,
    locally_improved,
    path_of,
    solution_of,
)
from gplan.partition.candidates import (
    CandidateLimit,
    Candidates,
    TooManyCandidates,
    candidates_within,
    loads_s,
    on_paths,
    stage_seconds,
)
from gplan.partition.device_memory import device_peaks
from gplan.partition.lagrangian import Goal, WeightedBounds, WeightUpdates, first_weighted_bounds
from gplan.partition.memory_feasibility import DeviceMemoryLimits, lasting_bytes
from gplan.partition.minimax import ends_of_stages, least_load_s, smallest_largest
from gplan.partition.objectives import LoadGoal, PeakGoal, StepGoal
from gplan.partition.partial_plans import WeightedPrefixes
from gplan.partition.plan_evaluation import fits_memory
from gplan.partition.problem import Problem, Solution, compute_sums_s, device_sums, without_memory
from gplan.partition.step_time import TIME_LIMIT_S

_MOST_CANDIDATES = 3_000_000  # that are searched
_NARROW = 1.5  # times the longest stage of the best plan known: the stages that are looked at where all are too many
_SLACK = 1e-9  # share by which a bound may be off
_NUM_BLENDED = 17  # plans, to begin a search for a peak that is small enough with
_BURST = 25  # rounds of play, after which a partition is tried
_NUM_BURSTS = 16
_SHARE_OF_PLAY = 0.5  # of the time that is left
_WORTH_A_BURST = 1e-4  # share of the bound by which it must rise for another


@dataclass(frozen=True, slots=True, kw_only=True)
class GoalSearch:
    """A search for the partition with the smallest value of a goal."""

    problem: Problem
    goal_of: Callable[[Problem, Sequence[Candidates]], Goal]
    cap_of: Callable[[float], CandidateLimit]  # which stages a plan with a value up to this can have
    least: float  # a lower bound of all values
    enough: float | None = None  # a value that is as good as the smallest; None: none is
    num_even_plans: int = 1  # plans with even stages that are looked at to begin with

    def run(self, incumbent: Incumbent, *, deadline_s: float) -> Incumbent:
        """What is known after a search that begins with a plan."""
        incumbent = replace(incumbent, lower_bound=max(incumbent.lower_bound, min(self.least, incumbent.worth)))
        if self.enough is not None and self.is_settled(incumbent):
            return incumbent
        candidates, is_complete = self._candidates(incumbent)
        if candidates is None:
            return replace(incumbent, lower_bound=incumbent.worth) if is_complete else incumbent
        space = GoalSpace(search=self, bounds=first_weighted_bounds(self.goal_of(self.problem, candidates)))
        found = branch_and_bound(space, incumbent, deadline_s=deadline_s)
        return found if is_complete else replace(found, lower_bound=incumbent.lower_bound)

    def moved(self, incumbent: Incumbent, *, deadline_s: float) -> Incumbent:
        """What is known after moves from that plan alone."""
        candidates, _ = self._candidates(incumbent)
        if candidates is None:
            return incumbent
        return self.polished(self.goal_of(self.problem, candidates), incumbent, deadline_s)

    def is_settled(self, incumbent: Incumbent) -> bool:
        """Whether no better value is looked for: none is there, or it is settled whether one is good enough."""
        if self.enough is None:
            return incumbent.proven
        return incumbent.proven or incumbent.value <= self.enough or incumbent.lower_bound > self.enough

    def polished(self, goal: Goal, incumbent: Incumbent, deadline_s: float) -> Incumbent:
        """The incumbent after moves of single cuts; as it is where it is not made of the goal's candidates."""
        problem, candidates = self.problem, goal.candidates
        may_be = DeviceMemoryLimits(problem, candidates).fits if problem.has_memory_limit else None
        return locally_improved(
            problem, candidates, incumbent, values=goal.values, may_be=may_be, deadline_s=deadline_s
        )

    def _candidates(self, incumbent: Incumbent) -> tuple[list[Candidates] | None, bool]:
        """Those that a better plan can have and that memory may allow, if there are any; whether they are all."""
        problem, is_complete = self.problem, True
        try:
            cap = self.cap_of(incumbent.value * (1 + _SLACK))
            candidates = candidates_within(problem, cap, most=_MOST_CANDIDATES)
        except TooManyCandidates:
            cap, is_complete = self._narrow_cap(incumbent), False
            candidates = candidates_within(problem, cap, most=_MOST_CANDIDATES)
        return None if candidates is None else self._fitting(candidates), is_complete

    def _narrow_cap(self, incumbent: Incumbent) -> CandidateLimit:
        """Stages not much longer than those of the incumbent."""
        sums = compute_sums_s(self.problem)
        longest_s = float(np.diff(sums[incumbent.ends], prepend=0.0).max()) + 2 * self.problem.costs.overhead_s
        return CandidateLimit(by_load=False, most_s=[_NARROW * longest_s] * self.problem.num_stages)

    def _fitting(self, candidates: list[Candidates]) -> list[Candidates] | None:
        """The candidates that may fit beside the other stages of their device."""
        if not self.problem.has_memory_limit:
            return candidates
        limits = DeviceMemoryLimits(self.problem, candidates)
        kept = [some.take(limits.fitting(stage)) for stage, some in enumerate(candidates)]
        return on_paths(kept, self.problem.costs.num_positions)


@dataclass(frozen=True, slots=True, kw_only=True)
class GoalSpace:
    """The partitions of some candidates, bounded by Lagrangian weights: the `SearchSpace` of a `GoalSearch`."""

    search: GoalSearch
    bounds: WeightedBounds

    @property
    def relaxation(self) -> WeightedPrefixes:
        """Prefixes bounded by weights, and by the limits on their devices."""
        problem = self.search.problem
        limits = DeviceMemoryLimits(problem, self.bounds.candidates) if problem.has_memory_limit else None
        return WeightedPrefixes(weighted=self.bounds, limits=limits)

    @property
    def goal(self) -> Goal:
        """What is to be small."""
        return self.bounds.goal

    def fits(self, paths: Ints) -> Bools:
        """[N]: whether partitions, [N, S], fit the memory."""
        return DeviceMemoryLimits(self.search.problem, self.bounds.candidates).fits(paths)

    def is_settled(self, incumbent: Incumbent) -> bool:
        """Whether no better value is looked for."""
        return self.search.is_settled(incumbent)

    def polished(self, incumbent: Incumbent, *, deadline_s: float) -> Incumbent:
        """The incumbent after moves of single cuts."""
        return self.search.polished(self.bounds.goal, incumbent, deadline_s)

    def narrowed(self, incumbent: Incumbent) -> GoalSpace | None:
        """The space of the candidates that a plan worth having could take; None where there is none."""
        pairs = zip(self.bounds.candidates, self.bounds.through_s, strict=True)
        worthy = [some.take(x < incumbent.worth) for some, x in pairs]
        candidates = on_paths(worthy, self.search.problem.costs.num_positions)
        return None if candidates is None else replace(self, bounds=self.bounds.among(candidates))

    def begun(self, incumbent: Incumbent, *, deadline_s: float) -> tuple[GoalSpace | None, Incumbent]:
        """The space, and the best plan after moves from the incumbent and from some with even stages."""
        incumbent = self._started(self._bounded(incumbent), deadline_s)
        return (self if self.is_settled(incumbent) else self.narrowed(incumbent)), incumbent

    def strengthened(self, incumbent: Incumbent, *, deadline_s: float) -> tuple[GoalSpace, Incumbent]:
        """The space with better weights (fictitious play), and the best of the partitions found on the way."""
        now_s = time.perf_counter()
        until_s = now_s + _SHARE_OF_PLAY * (deadline_s - now_s)
        path = path_of(self.bounds.candidates, incumbent.ends)
        updates = WeightUpdates.begun(self.bounds, self.bounds.best_path() if path is None else path)
        for _ in range(_NUM_BURSTS):
            before = incumbent
            updates.go_on(_BURST, deadline_s=until_s)
            space = replace(self, bounds=updates.weighted)
            incumbent = space._tried(updates.middle_path(), space._bounded(incumbent), until_s)
            rise = incumbent.lower_bound - before.lower_bound
            is_stuck = rise < _WORTH_A_BURST * incumbent.lower_bound and incumbent.value == before.value
            if self.is_settled(incumbent) or is_stuck or time.perf_counter() > until_s:
                break
        return replace(self, bounds=updates.weighted), incumbent

    def _bounded(self, incumbent: Incumbent) -> Incumbent:
        bound = max(incumbent.lower_bound, min(self.bounds.whole_s, incumbent.worth))
        return replace(incumbent, lower_bound=bound)

    def _started(self, incumbent: Incumbent, deadline_s: float) -> Incumbent:
        """The best of moves from the incumbent and from some plans with even stages; the most even one comes last.

        Where a value is good enough, the plan with the most even loads that has it is taken.
        """
        if self.search.enough is not None:
            blended = self._plans(self.bounds.blended_paths(_NUM_BLENDED), incumbent)
            enough = next((x for x in blended if x.value <= self.search.enough), None)
            if enough is not None:
                return enough
        num_even_plans = self.search.num_even_plans
        even_plans = self._plans(self.bounds.even_paths(num_even_plans), incumbent)
        start = min([incumbent, *even_plans], key=lambda x: x.value)
        found = self.polished(start, deadline_s=deadline_s)
        if num_even_plans == 1 or not even_plans or even_plans[0] is start or self.is_settled(found):
            return found
        return min(found, self.polished(even_plans[0], deadline_s=deadline_s), key=lambda x: x.value)

    def _plans(self, paths: Sequence[Ints], incumbent: Incumbent) -> list[Incumbent]:
        """Those of some partitions that fit, with all else that is known."""
        goal, every = self.bounds.goal, np.array(paths)
        every = every[DeviceMemoryLimits(self.search.problem, goal.candidates).fits(every)]
        values = goal.values(every).tolist()
        pairs = zip(every, values, strict=True)
        return [replace(incumbent, ends=ends_of(goal.candidates, path), value=value) for path, value in pairs]

    def _tried(self, path: Ints, incumbent: Incumbent, deadline_s: float) -> Incumbent:
        """The incumbent, or what moves from another partition lead to, if that fits and is better."""
        starts = self._plans([path], incumbent)
        found = self.polished(starts[0], deadline_s=deadline_s) if starts else incumbent
        return found if found.value < incumbent.value else incumbent


_NUM_EVEN_PLANS = 40  # plans, to begin a search for the smallest peak with
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
    given = None if start is None or not fits_memory(problem, start.stages) else ends_of_stages(problem, start.stages)
    deadline_s = started_s + time_limit_s
    starts = _starts(problem, given, deadline_s=deadline_s)
    if not starts:
        return None
    search = _search_for(problem)
    known = search.run(_best_of(search, starts, deadline_s), deadline_s=deadline_s)
    wanted = "a shorter step" if problem.minimize == "step-time" else "a smaller largest load"
    return solution_of(problem, known, solver="branch-and-bound", wanted=wanted, time_limit_s=time_limit_s)


def _best_of(search: GoalSearch, starts: Sequence[Ints], deadline_s: float) -> Incumbent:
    """What is known of the best of some partitions; after moves, where there are several."""
    values = [_value_s(search.problem, ends) for ends in starts]
    every = [
        Incumbent(ends=ends, value=x, lower_bound=min(x, search.least)) for ends, x in zip(starts, values, strict=True)
    ]
    if len(every) > 1:
        every = [search.moved(known, deadline_s=_part_of(deadline_s)) for known in every]
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


def smallest_peak(problem: Problem, *, enough: float | None = None, deadline_s: float) -> Incumbent | None:
    """The partition with the smallest largest peak of a device, in bytes; None where none is possible.

    With `enough` only whether a partition has no larger peak than that is settled: half of the time goes into the
    smallest of all, the other half into those within it alone.
    """
    free = without_memory(problem)
    start = _stages_by_themselves(free)
    if start is None:
        return None
    search, known = _peak_search(free, enough), _known_peak(free, start)
    if enough is None:
        return search.run(known, deadline_s=deadline_s)
    known = search.run(known, deadline_s=0.5 * (time.perf_counter() + deadline_s))
    return known if search.is_settled(known) else search.run(replace(known, limit=enough + 0.5), deadline_s=deadline_s)


def _peak_search(free: Problem, enough: float | None) -> GoalSearch:
    everything = CandidateLimit.of_load(float("inf"), num_stages=free.num_stages)
    return GoalSearch(
        problem=free,
        goal_of=PeakGoal,
        cap_of=lambda _: everything,
        least=lasting_bytes(free) / free.num_devices,
        enough=enough,
        num_even_plans=_NUM_EVEN_PLANS,
    )


def _known_peak(free: Problem, start: Solution) -> Incumbent:
    """The largest peak of a device, of a partition."""
    ends = ends_of_stages(free, start.stages)
    peaks = device_peaks(free, np.array([0, *ends[:-1]])[:, None], ends[:, None])
    return Incumbent(ends=ends, value=float(peaks.max()), lower_bound=0.0)


def _starts(problem: Problem, given: Ints | None, *, deadline_s: float) -> list[Ints]:
    """Where the stages of partitions end, to begin with, that fit the memory; none where none is possible.

    Of the given one and that which is made without a search the better; where the latter does not fit, the given one,
    or one that is found, and that to which moves away from the latter lead.
    """
    started_s, unlimited = time.perf_counter(), _stages_by_themselves(without_memory(problem))
    if unlimited is None:
        return []
    known = [] if given is None else [given]
    if fits_memory(problem, unlimited.stages):
        return [min([ends_of_stages(problem, unlimited.stages), *known], key=lambda x: _value_s(problem, x))]
    known = known or _found_to_fit(problem, deadline_s=deadline_s)
    now_s = time.perf_counter()
    if not known or now_s - started_s > _SHARE_OF_FIRST * (deadline_s - now_s):
        return known
    return [*known, *_moved_to_fit(problem, unlimited, deadline_s=_part_of(deadline_s))]


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
    moved = _peak_search(free, None).moved(_known_peak(free, start), deadline_s=deadline_s)
    return [moved.ends] if moved.value <= (problem.memory_of(0) or 0) else []


def _stages_by_themselves(problem: Problem) -> Solution | None:
    """The partition with the smallest largest stage, as if each stage had a device of its own."""
    links = (FREE_LINK,) * (problem.num_stages - 1)
    return smallest_largest(replace(problem, schedule="gpipe", minimize="max-stage", links=links, recompute="never"))


def _search_for(problem: Problem) -> GoalSearch:
    """The search for what the problem minimises."""
    if problem.minimize == "step-time":
        return GoalSearch(
            problem=problem,
            goal_of=StepGoal,
            cap_of=lambda value: busy_within(problem, value),
            least=least_step_s(problem),
        )
    num_stages, least_s = problem.num_stages, least_load_s(problem)
    return GoalSearch(
        problem=problem,
        goal_of=LoadGoal,
        cap_of=lambda value: CandidateLimit.of_load(value, num_stages=num_stages),
        least=least_s,
    )
