"""From a problem to its best stages: solve, read the stages from the choices, price them again, and say what is proven.

A solver's numbers come with tolerances; so the cost model has the last word, and a plan that fits only by tolerance is
forbidden and the program solved again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from gplan.balancer.arcs import TooManyArcs
from gplan.balancer.largest import smallest_largest
from gplan.balancer.milp.formulation import Formulation
from gplan.balancer.milp.solvers import Outcome, SolverName, available_solver, solve
from gplan.balancer.price import Problem, Solution, laid_out, objective_s, stages_of
from gplan.errors import NoPlanError, UsageError
from gplan.units import seconds_text

TIME_LIMIT_S = 60.0

_AGREES = 1e-5  # share by which the program's objective and the cost model's may differ

Stages = tuple[tuple[int, ...], ...]


def smallest_by_milp(
    problem: Problem,
    *,
    start: Solution | None = None,
    solver: SolverName | None = None,
    time_limit_s: float = TIME_LIMIT_S,
) -> Solution | None:
    """The partition with the smallest objective; None where it is proven that there is none.

    The search begins at the plan `start`, if there is one; without a solver's name HiGHS is taken, or CBC where it
    cannot be imported. When the time is over the best plan so far comes with the bound that is proven, and a note.

    Raises UsageError for a time limit of 0, a solver that is not there and recompute "selected"; NoPlanError where the
    time was over before any plan was found.
    """
    _check(problem, time_limit_s)
    name = available_solver(solver)
    if problem.num_layers < problem.num_stages and problem.minimize != "max-device-load":
        return None
    formulation = Formulation(problem)
    outcome, stages = _solve(formulation, problem, name=name, start=start, time_limit_s=time_limit_s)
    if outcome.is_infeasible:
        return None
    notes = () if name == solver or name == "HiGHS" else ("highspy cannot be imported: the MILP was solved by CBC",)
    if outcome.is_proven and stages:
        return Solution(
            stages=stages, lower_bound_s=_agreed_s(formulation, problem, stages), solver=f"milp/{name}", notes=notes
        )
    bound_s = max(formulation.least_s, outcome.bound * formulation.unit_s)
    return _unproven(problem, stages, start, name=name, bound_s=bound_s, notes=notes, time_limit_s=time_limit_s)


def goal_s(problem: Problem, stages: Sequence[Sequence[int]]) -> float:
    """What the problem minimises, of these stages, by the cost model."""
    laid, cuts = laid_out(problem, stages)
    return objective_s(laid, stages_of(laid, cuts))


def fits(problem: Problem, stages: Sequence[Sequence[int]]) -> bool:
    """Whether all stages fit the memory of their devices."""
    laid, cuts = laid_out(problem, stages)
    bounds = np.array([0, *cuts, laid.num_layers])
    limits = [problem.memory_of(k) for k in range(len(stages))]
    return all(
        limit is None or laid.peak_bytes(k, bounds[k : k + 1], bounds[k + 1 : k + 2])[0] <= limit
        for k, limit in enumerate(limits)
    )


def _check(problem: Problem, time_limit_s: float) -> None:
    if not time_limit_s > 0:
        raise UsageError(f"the MILP was given {time_limit_s:g} s; expected more than 0")
    if problem.recompute == "selected":
        raise UsageError(
            "the MILP does not choose layers to recompute; expected recompute never, always or except-last"
        )


def _solve(
    formulation: Formulation, problem: Problem, *, name: SolverName, start: Solution | None, time_limit_s: float
) -> tuple[Outcome, Stages | None]:
    """How the solver ended, and its stages, which fit the memory exactly."""
    until_s = time.monotonic() + time_limit_s
    choices = formulation.choices
    hint = choices.values_for(start.stages) if start else {}
    while True:
        left_s = max(1e-3, until_s - time.monotonic())
        outcome = solve(formulation.program, name, start=hint, time_limit_s=left_s)
        stages = choices.stages_found() if outcome.has_values else None
        if stages is None or fits(problem, stages):
            return outcome, stages
        choices.forbid(stages)


def _agreed_s(formulation: Formulation, problem: Problem, stages: Stages) -> float:
    """The objective of proven stages by the cost model, which must be the program's."""
    by_model_s, by_program_s = goal_s(problem, stages), formulation.unit_s * formulation.program.goal_value
    agrees = abs(by_program_s - by_model_s) <= _AGREES * by_model_s
    assert agrees, f"the MILP says {by_program_s}, the cost model {by_model_s}"
    return by_model_s


def _unproven(
    problem: Problem,
    stages: Stages | None,
    start: Solution | None,
    *,
    name: SolverName,
    bound_s: float,
    notes: tuple[str, ...],
    time_limit_s: float,
) -> Solution:
    """The best plan that is known when the time is over."""
    limit = seconds_text(time_limit_s)
    found = [(goal_s(problem, stages), f"milp/{name}", stages)] if stages else []
    if start:
        found.append((goal_s(problem, start.stages), start.solver, start.stages))
    note = f"the MILP was stopped after {limit}"
    if not found:
        other = _smallest_largest(problem)
        if other is None:
            raise NoPlanError(f"the MILP found no plan in {limit}, nor that there is none; give it more time or memory")
        note = f"the MILP found no plan in {limit}: this is the plan with the smallest largest stage"
        found = [(goal_s(problem, other.stages), other.solver, other.stages)]
    best_s, method, best = min(found, key=lambda x: x[0])
    return Solution(stages=best, lower_bound_s=min(best_s, bound_s), solver=method, notes=(*notes, note))


def _smallest_largest(problem: Problem) -> Solution | None:
    try:
        return smallest_largest(problem)
    except TooManyArcs:
        return None
