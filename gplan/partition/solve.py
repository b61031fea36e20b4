"""Which method solves a problem: chosen by the model's graph, and named in the plan.

    chain, or down-sets that can be listed    dynamic programs and branch and bound over candidate stages: exact
    more down-sets or candidates              the mixed-integer program, started from the best plan known, until the time is up

The step time is searched among the candidates that a plan better than the best known one could use; these are few even
where all candidates together are too many to be held.
"""

from __future__ import annotations

import time
from dataclasses import replace

from gplan.core import Profile
from gplan.core.errors import NoPlanError, UsageError
from gplan.graph.down_sets import DownSets, Prefixes, down_sets
from gplan.graph.layer_graph import LayerGraph
from gplan.partition.candidates import TooManyCandidates
from gplan.partition.minimax import smallest_largest
from gplan.partition.problem import Problem, Solution
from gplan.partition.search import TIME_LIMIT_S, smallest

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
    problem: Problem, *, solver: str = "auto", start: Solution | None = None, time_limit_s: float | None = None
) -> Solution | None:
    """The best partition by one of `SOLVERS`; None where there is none, which is proven.

    Searches for the smallest step by "auto" end no worse than with `start`, if that is given and fits.
    Raises UsageError where "dp" was asked for and there are too many down-sets for it.
    """
    try:
        problem = with_down_sets(problem)
    except TooManyDownSets:
        return _by_milp(problem, solver, time_limit_s, start=_on_prefixes(problem))
    if solver in ("milp", "cbc"):
        return _by_milp(problem, solver, time_limit_s, start=_start(problem))
    try:
        return _by_programs(problem, time_limit_s, start)
    except TooManyCandidates:
        return _without_candidates(problem, solver, time_limit_s)


def with_down_sets(problem: Problem) -> Problem:
    """The same problem with the down-sets of its profile, where it has branches."""
    if problem.costs.given_downsets is not None:
        return problem
    found = where_to_cut(problem.costs.profile, in_order=problem.constraints.profile_order)
    return problem if found is None else replace(problem, costs=replace(problem.costs, given_downsets=found))


def _by_programs(problem: Problem, time_limit_s: float | None, start: Solution | None = None) -> Solution | None:
    if problem.minimize != "step-time" and not problem.has_chunks:
        return smallest_largest(problem)
    return smallest(problem, start=start, time_limit_s=TIME_LIMIT_S if time_limit_s is None else time_limit_s)


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


def _start(problem: Problem) -> Solution | None:
    """The plan of the other methods, where they have one soon, for the mixed-integer program to start from."""
    try:
        return _by_programs(problem, 0.1 * TIME_LIMIT_S)
    except (TooManyCandidates, NoPlanError):
        return None


def _on_prefixes(problem: Problem) -> Solution | None:
    """The best plan that keeps the layers in the profile's order, as a plan to start from: nothing is proven."""
    chain = replace(problem, costs=replace(problem.costs, given_downsets=Prefixes(problem.num_layers)))
    try:
        found = _by_programs(chain, 0.5 * TIME_LIMIT_S)
    except (TooManyCandidates, NoPlanError):
        return None
    return None if found is None else replace(found, lower_bound_s=0.0)


def _in_profile_order(start: Solution | None) -> Solution:
    """The plan known, for a problem whose layers to recompute the mixed-integer program cannot choose."""
    if start is None:
        raise UsageError(
            "the model has too many branches to choose layers to recompute, and no plan in the profile's order fits; "
            "expected --recompute never, always or except-last"
        )
    note = (
        "too many branches to choose layers to recompute: the layers stay in the profile's order, and nothing is proven"
    )
    return replace(start, lower_bound_s=0.0, notes=(*start.notes, note))


def _by_milp(problem: Problem, solver: str, time_limit_s: float | None, *, start: Solution | None) -> Solution | None:
    if solver == "dp":
        raise UsageError(
            "the dynamic program cannot hold this problem: too many ways to cut the model; let gplan choose (--solver auto) or take --solver milp"
        )
    if problem.recompute == "selected" and solver == "auto":
        return _in_profile_order(start)
    from gplan.partition.milp.solving import smallest_by_milp  # PuLP takes longer to import than a plan to find

    return smallest_by_milp(
        problem,
        start=start,
        solver="CBC" if solver == "cbc" else None,
        time_limit_s=_MILP_S if time_limit_s is None else time_limit_s,
    )
