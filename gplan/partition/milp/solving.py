"""From a problem to its best stages: solve, read the stages from the choices, price them again, and say what is proven.

A solver's numbers come with tolerances; so the cost model has the last word, and a plan that fits only by tolerance is
forbidden and the program solved again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from gplan.core.errors import NoPlanError, UsageError
from gplan.core.units import seconds_text
from gplan.graph.layer_graph import LayerGraph
from gplan.partition.candidates import TooManyCandidates
from gplan.partition.milp.assignment import StageAssignment, add_constraints, are_satisfied
from gplan.partition.milp.boundary_terms import (
    BoundaryTerms,
    ChainBoundaryTerms,
    GraphBoundaryTerms,
    OutputTerms,
    PassThroughTerms,
)
from gplan.partition.milp.coefficients import LayerSeconds, ParameterBytes
from gplan.partition.milp.memory_rows import MemoryRows
from gplan.partition.milp.objective import StepTimeRows, add_loads
from gplan.partition.milp.program import LinearProgram, SolverName, SolverResult, available_solver, solve
from gplan.partition.minimax import least_load_s, smallest_largest
from gplan.partition.plan_evaluation import fits_memory, goal_s
from gplan.partition.problem import Problem, Solution

_SCALE = 1000.0  # about what the objective is, in the units of the program


class Formulation:
    """The program of one problem. Its unit of time makes a solver's absolute tolerances mean parts in a billion."""

    def __init__(self, problem: Problem) -> None:
        figures = LayerSeconds(problem)
        profile = figures.costs.profile
        self.least_s = least_load_s(problem) * (problem.num_microbatches if problem.minimize == "step-time" else 1)
        self.unit_s = self.least_s / _SCALE or 1.0
        self.program = LinearProgram()
        in_order = pairwise(range(problem.num_layers)) if problem.constraints.profile_order else ()
        self.choices = StageAssignment(
            self.program,
            LayerGraph(problem.num_layers, (*profile.precedence, *in_order)),
            num_stages=problem.num_stages,
        )
        weights = ParameterBytes(self.program, self.choices, profile, figures.costs.workspaces.waiting)
        kind = ChainBoundaryTerms if self.choices.graph.is_chain else GraphBoundaryTerms
        cuts: BoundaryTerms = kind(self.program, problem, figures.costs, self.choices, self.unit_s)
        self.program.require(self.program.goal, at_least=self.least_s / self.unit_s)
        if problem.minimize == "step-time":
            StepTimeRows(self.program, self.choices, cuts, weights, figures, self.unit_s).add()
        else:
            add_loads(self.program, self.choices, cuts, figures=figures, unit_s=self.unit_s)
        pass_through = PassThroughTerms(self.program, problem, figures.costs, self.choices)
        outputs = OutputTerms(self.program, figures.costs, self.choices)
        MemoryRows(self.program, self.choices, cuts, weights, pass_through, outputs, figures).add()
        add_constraints(self.program, self.choices, profile=profile, constraints=problem.constraints)


Stages = tuple[tuple[int, ...], ...]

TIME_LIMIT_S = 60.0

_AGREES = 1e-5  # share by which the program's objective and the cost model's may differ
_SLACK = 1 + 1e-9  # by which a known plan's objective may be off in the program


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
    time was over before any plan was found; ValueError where the start is no plan for the problem.
    """
    _check(problem, time_limit_s)
    name = available_solver(solver)
    if problem.num_layers < problem.num_stages:
        return None
    until_s = time.monotonic() + time_limit_s
    search = _Search(problem=problem, start=start, name=name)
    outcome, stages = search.run(until_s=until_s)
    if outcome.is_infeasible and search.start is None:
        return None
    if outcome.is_infeasible and search.start is not None:  # by rounding: nothing is below the start
        found = search.as_best(search.start.stages)
    elif outcome.is_proven and stages:
        found = search.proven(stages)
    else:
        found = search.best_known(stages, outcome, limit=seconds_text(time_limit_s))
    replaced = ("highspy cannot be imported: the MILP was solved by CBC",) if name == "CBC" and solver is None else ()
    return replace(found, notes=replaced + found.notes)


def _check(problem: Problem, time_limit_s: float) -> None:
    if not time_limit_s > 0:
        raise UsageError(f"the MILP was given {time_limit_s:g} s; expected more than 0")
    if problem.recompute == "selected":
        raise UsageError(
            "the MILP does not choose layers to recompute; expected recompute never, always or except-last"
        )


@dataclass(frozen=True)
class _Search:
    """One problem, as a program that begins at a known plan."""

    problem: Problem
    start: Solution | None
    name: SolverName

    def __post_init__(self) -> None:
        if self.start is not None and not self._is_plan(self.start.stages):
            raise ValueError(f"start has stages {self.start.stages}; expected a plan for the problem")

    @cached_property
    def formulation(self) -> Formulation:
        """The program."""
        return Formulation(self.problem)

    def run(self, *, until_s: float) -> tuple[SolverResult, Stages | None]:
        """How the solver ended, and its stages, which fit the memory exactly; until a time of time.monotonic()."""
        program, choices = self.formulation.program, self.formulation.choices
        hint = {}
        if self.start is not None:
            hint = choices.values_for(self.start.stages)
            program.limit_goal(goal_s(self.problem, self.start.stages) / self.formulation.unit_s * _SLACK)
        while True:
            left_s = max(1e-3, until_s - time.monotonic())
            outcome = solve(program, self.name, start=hint, time_limit_s=left_s)
            stages = choices.stages_found() if outcome.has_values else None
            if stages is None or fits_memory(self.problem, stages):
                return outcome, stages
            choices.forbid(stages)

    def proven(self, stages: Stages) -> Solution:
        """The stages that the solver found as the best: by the cost model's objective, which must be the program's."""
        best = self.as_best(stages)
        by_model_s, by_program_s = best.lower_bound_s, self.formulation.unit_s * self.formulation.program.goal_value
        agrees = abs(by_program_s - by_model_s) <= _AGREES * by_model_s
        assert agrees, f"the MILP says {by_program_s}, the cost model {by_model_s}"
        return best

    def as_best(self, stages: Stages) -> Solution:
        """These stages, which nothing is better than."""
        return Solution(stages=stages, lower_bound_s=goal_s(self.problem, stages), solver=f"milp/{self.name}")

    def best_known(self, stages: Stages | None, outcome: SolverResult, *, limit: str) -> Solution:
        """The best plan when the time is over, with what is proven."""
        note = f"the MILP was stopped after {limit}"
        known = [Solution(stages=stages, lower_bound_s=0.0, solver=f"milp/{self.name}")] if stages else []
        if self.start is not None:
            known.append(self.start)
        if not known:
            known = [self._smallest_largest(limit)]
            note = f"the MILP found no plan in {limit}: this is the plan with the smallest largest stage"
        best_s, best = min(((goal_s(self.problem, x.stages), x) for x in known), key=lambda pair: pair[0])
        bound_s = max(self.formulation.least_s, outcome.bound * self.formulation.unit_s)
        return replace(best, lower_bound_s=min(best_s, bound_s), notes=(note,))

    def _smallest_largest(self, limit: str) -> Solution:
        """A plan in place of one that was not found: with the layers in the profile's order, of which there are few."""
        costs = replace(self.problem.costs, given_downsets=None)
        try:
            found = smallest_largest(replace(self.problem, costs=costs))
        except TooManyCandidates:
            found = None
        if found is None:
            raise NoPlanError(
                f"in {limit} the MILP found no plan, nor that there is none; give it more time, or its devices more memory"
            )
        return found

    def _is_plan(self, stages: Stages) -> bool:
        return (
            self.formulation.choices.are_stages(stages)
            and fits_memory(self.problem, stages)
            and are_satisfied(self.problem.constraints, profile=self.problem.costs.profile, stages=stages)
        )
