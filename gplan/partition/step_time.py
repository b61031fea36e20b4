"""The partition with the smallest simulated step: ever longer steps are looked for among the candidates they can have.

A plan whose step is within a limit is made of candidates that are within bounds which follow from the limit. Mostly the candidates
within the step of a good plan are few, and one search settles it. Where they are too many, the limit starts just above
what a step takes at least and rises: a limit without a plan raises the bound; the best plan of the first limit that has
one within it is the optimum. Ties are settled by moving single cuts only. The time is limited; the proof then states
the gap.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from gplan.graph.down_sets import Bools, Ints
from gplan.partition.batch_simulation import steps_s
from gplan.partition.bounds import StepBounds, busy_within, filtered, least_step_s
from gplan.partition.branch_and_bound import (
    Incumbent,
    branch_and_bound,
    locally_improved,
    solution_of,
)
from gplan.partition.candidates import Candidates, TooManyCandidates, candidates_within, fitting, on_paths
from gplan.partition.dominance import GPipeLabels
from gplan.partition.minimax import ends_of_stages, smallest_largest
from gplan.partition.objectives import StepGoal
from gplan.partition.partial_plans import Relaxation, SimulatedPrefixes
from gplan.partition.plan_evaluation import goal_s
from gplan.partition.problem import ROUNDING, Problem, Solution, with_valid_bound, without_memory

TIME_LIMIT_S = 10.0

_FEW_CANDIDATES = 1_000_000  # that are searched without further ado
_MANY_CANDIDATES = 4_000_000  # of one limit
_SLACK = 1e-9  # share by which a bound may be off
_RISES = (
    2e-4, 5e-4, 1e-3, 2e-3, 4e-3, 7e-3, 0.01, 0.015, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.35, 0.6, 1.0, 2.0, 5.0,
    float("inf"),
)  # fmt: skip


def smallest_step(
    problem: Problem, *, start: Solution | None = None, time_limit_s: float = TIME_LIMIT_S
) -> Solution | None:
    """The partition with the smallest simulated step; None where no partition is possible.

    `start` is a plan to begin with, by default that with the smallest largest stage. Raises TooManyCandidates for graphs
    with very many down-sets if no `start` is given.
    """
    start = start or smallest_largest(problem)
    if start is None:
        return None
    deadline_s = time.perf_counter() + time_limit_s
    known = Incumbent(ends=ends_of_stages(problem, start.stages), value=goal_s(problem, start.stages), lower_bound=0.0)
    try:
        limit_s = known.value * (1.0 + ROUNDING)
        known = _within(problem, known, limit_s, most=_FEW_CANDIDATES, deadline_s=deadline_s)
    except TooManyCandidates:
        known = _deepened(problem, known, deadline_s=deadline_s)
    solver = "dp" if problem.schedule == "gpipe" else "branch-and-bound"
    found = solution_of(problem, known, solver=solver, wanted="a shorter step", time_limit_s=time_limit_s)
    return with_valid_bound(problem, found)


def _deepened(problem: Problem, known: Incumbent, *, deadline_s: float) -> Incumbent:
    """What is known after limits that rise from the least possible step to that of the best plan known."""
    least_s = least_step_s(problem)
    known = replace(known, lower_bound=min(least_s, known.value))
    for rise in _RISES:
        limit_s = min(least_s * (1.0 + rise), known.value * (1.0 + ROUNDING))
        try:
            found = _within(problem, known, limit_s, most=_MANY_CANDIDATES, deadline_s=deadline_s)
        except TooManyCandidates:
            return known
        is_settled = found.value <= limit_s or limit_s >= known.value
        known = replace(found, limit=float("inf"))
        if not found.proven or is_settled:
            return known
    return known


def _within(problem: Problem, known: Incumbent, limit_s: float, *, most: int, deadline_s: float) -> Incumbent:
    """What is known after looking for plans within the limit; a plan above it may be found beside."""
    candidates = candidates_within(without_memory(problem), busy_within(problem, limit_s), most=most)
    limited = replace(known, limit=limit_s)
    filtered_candidates = None if candidates is None else filtered(problem, candidates, limit_s)
    if filtered_candidates is None:
        return replace(limited, lower_bound=max(known.lower_bound, limited.worth))
    space = StepSpace(bounds=StepBounds(problem, filtered_candidates))
    return branch_and_bound(space, limited, deadline_s=deadline_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpace:
    """The paths of some candidates, which need not fit the memory yet: a `SearchSpace` for one stage a device."""

    bounds: StepBounds

    @property
    def relaxation(self) -> Relaxation:
        """Labels for GPipe; for other schedules a simulation of the prefix."""
        return GPipeLabels(self.bounds) if self.bounds.problem.schedule == "gpipe" else SimulatedPrefixes(self.bounds)

    def is_settled(self, incumbent: Incumbent) -> bool:
        """Whether no partition is better."""
        return incumbent.proven

    def narrowed(self, incumbent: Incumbent) -> StepSpace | None:
        """The space of the candidates that a plan worth having could take."""
        worth_s = incumbent.worth * (1.0 + _SLACK)
        pairs = zip(self.bounds.candidates, self.bounds.through_s, strict=True)
        return self._among([some.take(x <= worth_s) for some, x in pairs])

    def begun(self, incumbent: Incumbent, *, deadline_s: float) -> tuple[StepSpace | None, Incumbent]:
        """The space of what fits the memory, narrowed before and after a local search for the first incumbent, with the
        bound of all its paths."""
        space, problem = self.narrowed(incumbent), self.bounds.problem
        if space is not None:
            space = space._among([fitting(problem, stage, x) for stage, x in enumerate(space.bounds.candidates)])
        if space is not None:
            incumbent = space.polished(incumbent, deadline_s=deadline_s)
            space = space.narrowed(incumbent)
        if space is not None:
            incumbent = replace(incumbent, lower_bound=max(incumbent.lower_bound, space.bounds.whole_s))
        return space, incumbent

    def _among(self, candidates: list[Candidates]) -> StepSpace | None:
        """The space of some of the candidates; None where no path is left."""
        left = on_paths(candidates, self.bounds.problem.costs.num_positions)
        return None if left is None else StepSpace(bounds=StepBounds(self.bounds.problem, left))

    def strengthened(self, incumbent: Incumbent, *, deadline_s: float) -> tuple[StepSpace, Incumbent]:
        """The space as it is: its bounds have no weights to improve."""
        return self, incumbent

    @property
    def goal(self) -> StepGoal:
        """The step."""
        return StepGoal(self.bounds.problem, self.bounds.candidates)

    def fits(self, paths: Ints) -> Bools:
        """[N]: all, as candidates that do not are left out when the search begins."""
        return np.ones(len(paths), dtype=np.bool_)

    def polished(self, incumbent: Incumbent, *, deadline_s: float) -> Incumbent:
        """The incumbent after moves of single cuts; as it is where it is not made of the space's candidates."""
        problem, candidates = self.bounds.problem, self.bounds.candidates
        values = partial(steps_s, problem, candidates)
        return locally_improved(problem, candidates, incumbent, values=values, deadline_s=deadline_s)
