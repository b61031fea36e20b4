"""Which method solves a problem: chosen by the model's graph, and named in the plan.

    chain, or down-sets that can be listed    dynamic programs and branch and bound over candidate stages: exact
    more down-sets or candidates              the mixed-integer program, started from the best plan known, until the time is up

The step time is searched among the candidates that a plan better than the best known one could use; these are few even
where all candidates together are too many to be held.

Where devices hold several stages, the best cut of one stage depends on the others of its device, so no program over
(stage, position) settles it: candidates are checked beside the least of the device's other stages, prefixes beside the
least of those to come, partitions by the whole replay of the device's memory. Where the first plan does not fit, one
that fits is looked for by the smallest largest peak. Exact, ties up to rounding apart; when the time is up, the proof
states the gap.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gplan.core import Profile
from gplan.core.errors import NoPlanError, UsageError
from gplan.core.machine import FREE_LINK
from gplan.core.units import bytes_text, seconds_text
from gplan.graph.down_sets import DownSets, Ints, Prefixes, down_sets
from gplan.graph.layer_graph import LayerGraph
from gplan.partition.batch_simulation import goal_s
from gplan.partition.branch_and_bound import Incumbent, Search
from gplan.partition.candidates import INFINITY, TooManyCandidates
from gplan.partition.goals import LoadGoal, PeakGoal, StepGoal
from gplan.partition.minimax import ends_of_stages, smallest_largest, stages_between
from gplan.partition.plan_evaluation import fits_memory
from gplan.partition.problem import Problem, Solution, device_peaks, with_valid_bound, without_memory

SOLVERS = ("auto", "dp", "milp", "cbc")
MOST_DOWN_SETS = 200_000
"""More than these are not listed; the mixed-integer program does not need them."""

_MILP_S = 60.0


def where_to_cut(profile: Profile, *, in_order: bool = False) -> DownSets | None:
    """The down-sets of a model with branches; None for a chain, or with `in_order`: the layers lie in the profile's order.

    Raises TooManyDownSets.
    """
    graph = LayerGraph(len(profile.layers), profile.precedence)
    if graph.is_chain or in_order:
        return None
    found = down_sets(graph, most=MOST_DOWN_SETS)
    if found is None:
        raise TooManyDownSets
    return found


class TooManyDownSets(Exception):
    """The model has more down-sets than are listed."""


def solve(
    problem: Problem,
    *,
    solver: str = "auto",
    start: Solution | None = None,
    time_limit_s: float | None = None,
    cutoff_s: float = INFINITY,
) -> Solution | None:
    """The best partition by one of `SOLVERS`; None where there is none, which is proven.

    Searches for the smallest step by "auto" end no worse than with `start`, if that is given and fits, and look for
    nothing above `cutoff_s`, which is then the bound.
    Raises UsageError where "dp" was asked for and there are too many down-sets for it.
    """
    try:
        problem = with_down_sets(problem)
    except TooManyDownSets:
        return _by_milp(problem, solver, time_limit_s, start=_on_prefixes(problem))
    if solver in ("milp", "cbc"):
        return _by_milp(problem, solver, time_limit_s, start=_start(problem))
    try:
        return _by_programs(problem, time_limit_s, start, cutoff_s)
    except TooManyCandidates:
        return _without_candidates(problem, solver, time_limit_s)


def with_down_sets(problem: Problem) -> Problem:
    """The same problem with the down-sets of its profile, where it has branches."""
    if problem.costs.given_downsets is not None:
        return problem
    found = where_to_cut(problem.costs.profile, in_order=problem.constraints.profile_order)
    return problem if found is None else replace(problem, costs=replace(problem.costs, given_downsets=found))


def _by_programs(
    problem: Problem, time_limit_s: float | None, start: Solution | None = None, cutoff_s: float = INFINITY
) -> Solution | None:
    if problem.minimize != "step-time" and not problem.has_chunks:
        return smallest_largest(problem)
    limit_s = TIME_LIMIT_S if time_limit_s is None else time_limit_s
    return smallest(problem, start=start, time_limit_s=limit_s, cutoff_s=cutoff_s)


def _without_candidates(problem: Problem, solver: str, time_limit_s: float | None) -> Solution | None:
    """Where the candidates are too many: from the best plan in the profile's order, by the step's search or the MILP."""
    limit_s = _MILP_S if time_limit_s is None else time_limit_s
    deadline_s = time.perf_counter() + limit_s
    start = _on_prefixes(problem)
    if problem.minimize == "step-time" and start is not None and not problem.has_chunks:
        try:
            return smallest(problem, start=start, time_limit_s=limit_s)
        except TooManyCandidates:
            pass
    return _by_milp(problem, solver, max(0.1 * limit_s, deadline_s - time.perf_counter()), start=start)


def _start(problem: Problem, *, share: float = 0.1) -> Solution | None:
    """The plan of the other methods, where they have one soon, for the mixed-integer program to start from."""
    try:
        return _by_programs(problem, share * TIME_LIMIT_S)
    except (TooManyCandidates, NoPlanError):
        return None


def _on_prefixes(problem: Problem) -> Solution | None:
    """The best plan that keeps the layers in the profile's order, as a plan to start from: nothing is proven."""
    chain = replace(problem, costs=replace(problem.costs, given_downsets=Prefixes(problem.num_layers)))
    found = _start(chain, share=0.5)
    return None if found is None else replace(found, lower_bound_s=0.0)


def _by_milp(problem: Problem, solver: str, time_limit_s: float | None, *, start: Solution | None) -> Solution | None:
    if solver == "dp":
        raise UsageError(
            "the dynamic program cannot hold this problem: too many ways to cut the model; let gplan choose (--solver auto) or take --solver milp"
        )
    if problem.recompute == "selected" and solver == "auto":  # the program cannot choose layers to recompute
        if start is None:
            raise UsageError(
                "the model has too many branches to choose layers to recompute, and no plan in the profile's order fits; "
                "expected --recompute never, always or except-last"
            )
        note = "too many branches to choose layers to recompute: the layers stay in the profile's order, and nothing is proven"
        return replace(start, lower_bound_s=0.0, notes=(*start.notes, note))
    from gplan.partition.milp import smallest_by_milp  # PuLP takes longer to import than a plan to find

    return smallest_by_milp(
        problem,
        start=start,
        solver="CBC" if solver == "cbc" else None,
        time_limit_s=_MILP_S if time_limit_s is None else time_limit_s,
    )


TIME_LIMIT_S = 10.0

_SHARE_OF_START = 0.25  # of the time that is left, for one of several plans to begin with
_SHARE_OF_SEARCH = 0.5  # of the time that the plan to begin with took: the search gets so much at least
_SHARE_OF_FIRST = 0.5  # of the time that is left: if the first plan took longer, it is the only one to begin with


def smallest(
    problem: Problem,
    *,
    start: Solution | None = None,
    time_limit_s: float = TIME_LIMIT_S,
    cutoff_s: float = INFINITY,
) -> Solution | None:
    """The partition with the smallest simulated step, or largest load; None where none is possible.

    It is no worse than `start`, if that is given and fits; above `cutoff_s` none is looked for.
    Raises TooManyCandidates for graphs with very many down-sets if no such `start` is given; NoPlanError where in that time no plan was found that fits, nor that there is none.
    """
    started_s = time.perf_counter()
    deadline_s = started_s + time_limit_s
    given = None if start is None or not fits_memory(problem, start.stages) else ends_of_stages(problem, start.stages)
    starts = _starts(problem, given, deadline_s=deadline_s)
    if not starts:
        return None
    now_s = time.perf_counter()
    deadline_s = max(deadline_s, now_s + _SHARE_OF_SEARCH * (now_s - started_s))
    search = Search(problem=problem, goal=StepGoal if problem.minimize == "step-time" else LoadGoal)
    known = search.run(replace(_best_of(search, starts, deadline_s), limit=cutoff_s), deadline_s=deadline_s)
    wanted = "a shorter step" if problem.minimize == "step-time" else "a smaller largest load"
    found = Solution(
        stages=stages_between(problem, known.ends.tolist()),
        lower_bound_s=known.value if known.proven and known.value <= cutoff_s else known.lower_bound,
        solver="branch-and-bound",
        notes=() if known.proven else (f"the search for {wanted} was stopped after {seconds_text(time_limit_s)}",),
    )
    return with_valid_bound(problem, found)


def smallest_peak(problem: Problem, *, enough: float | None = None, deadline_s: float) -> Incumbent | None:
    """The partition with the smallest largest peak of a device, in bytes; None where none is possible.

    With `enough` only whether a partition has no larger peak than that is settled: half of the time goes into the
    smallest of all, the other half into those within it alone.
    """
    free = without_memory(problem)
    start = _stages_by_themselves(free)
    if start is None:
        return None
    search, known = Search(problem=free, goal=PeakGoal, enough=enough), _known_peak(free, start)
    if enough is None:
        return search.run(known, deadline_s=deadline_s)
    known = search.run(known, deadline_s=0.5 * (time.perf_counter() + deadline_s))
    known = replace(known, limit=float("inf"))
    return known if search.is_settled(known) else search.run(replace(known, limit=enough + 0.5), deadline_s=deadline_s)


def _best_of(search: Search, starts: Sequence[Ints], deadline_s: float) -> Incumbent:
    """What is known of the best of some partitions; after moves, where there are several."""
    values = [goal_s(search.problem, stages_between(search.problem, ends.tolist())) for ends in starts]
    every = [Incumbent(ends=ends, value=x, lower_bound=0.0) for ends, x in zip(starts, values, strict=True)]
    if len(every) > 1:
        every = [search.moved(known, deadline_s=_part_of(deadline_s)) for known in every]
    return min(every, key=lambda known: known.value)


def _part_of(deadline_s: float) -> float:
    """Until when one of several beginnings may take."""
    now_s = time.perf_counter()
    return now_s + _SHARE_OF_START * (deadline_s - now_s)


def _known_peak(free: Problem, start: Solution) -> Incumbent:
    """The largest peak of a device, of a partition."""
    ends = ends_of_stages(free, start.stages)
    peaks = device_peaks(free, np.array([0, *ends[:-1]])[:, None], ends[:, None])
    return Incumbent(ends=ends, value=float(peaks.max()), lower_bound=0.0)


def _starts(problem: Problem, given: Ints | None, *, deadline_s: float) -> list[Ints]:
    """Where the stages of partitions end, to begin with, that fit the memory; none where none is possible.

    The given one, which for many stages takes far less than to make one. With chunks, of it and that which is made without a
    search the better; where the latter does not fit, the given one, or one that is found, and that to which moves away from
    the latter lead.
    """
    known = [] if given is None else [given]
    if not problem.has_chunks:
        if known:
            return known
        fitting = smallest_largest(problem)
        return [] if fitting is None else [ends_of_stages(problem, fitting.stages)]
    started_s, unlimited = time.perf_counter(), _stages_by_themselves(without_memory(problem))
    if unlimited is None:
        return []
    if fits_memory(problem, unlimited.stages):
        every = [ends_of_stages(problem, unlimited.stages), *known]
        return [min(every, key=lambda ends: goal_s(problem, stages_between(problem, ends.tolist())))]
    known = known or _found_to_fit(problem, deadline_s=deadline_s)
    now_s = time.perf_counter()
    if not known or now_s - started_s > _SHARE_OF_FIRST * (deadline_s - now_s):
        return known
    free = without_memory(problem)  # moves that make the largest peak smaller may lead to one that fits
    search = Search(problem=free, goal=PeakGoal)
    moved = search.moved(_known_peak(free, unlimited), deadline_s=_part_of(deadline_s))
    return [*known, moved.ends] if moved.value <= (problem.memory_of(0) or 0) else known


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


def _stages_by_themselves(problem: Problem) -> Solution | None:
    """The partition with the smallest largest stage, as if each stage had a device of its own."""
    links = (FREE_LINK,) * (problem.num_stages - 1)
    return smallest_largest(replace(problem, schedule="gpipe", minimize="max-stage", links=links, recompute="never"))
