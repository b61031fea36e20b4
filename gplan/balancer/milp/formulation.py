"""A problem as a mixed-integer linear program: the choices, what they cost, and the limits that they keep."""

from __future__ import annotations

from gplan.balancer.milp.choices import Choices
from gplan.balancer.milp.cuts import ChainCuts, Cuts, GraphCuts, SentCuts
from gplan.balancer.milp.figures import Figures
from gplan.balancer.milp.loads import add_loads
from gplan.balancer.milp.passing import Passing
from gplan.balancer.milp.program import Program
from gplan.balancer.milp.reach import Reach
from gplan.balancer.milp.room import Room
from gplan.balancer.milp.steps import Steps
from gplan.balancer.milp.weights import Weights
from gplan.balancer.milp.wishes import add_wishes
from gplan.balancer.problem import Problem

_SCALE = 1000.0  # about what the objective is, in the units of the program


class Formulation:
    """The program of one problem. Its unit of time makes a solver's absolute tolerances mean parts in a billion."""

    def __init__(self, problem: Problem) -> None:
        figures = Figures(problem)
        profile = figures.costs.profile
        self.least_s = figures.least_load_s * (problem.num_microbatches if problem.minimize == "step-time" else 1)
        self.unit_s = self.least_s / _SCALE or 1.0
        self.program = Program()
        self.choices = Choices(
            self.program,
            Reach(problem.num_layers, profile.precedence),
            num_stages=problem.num_stages,
            may_be_empty=problem.minimize == "max-device-load",
        )
        weights = Weights(self.program, self.choices, profile)
        cuts = self._cuts(problem, figures)
        self.program.require(self.program.goal, at_least=self.least_s / self.unit_s)
        if problem.minimize == "step-time":
            Steps(self.program, self.choices, cuts, weights, figures, self.unit_s).add()
        else:
            add_loads(self.program, self.choices, cuts, figures=figures, unit_s=self.unit_s)
        passing = Passing(self.program, problem, figures.costs, self.choices)
        Room(self.program, self.choices, cuts, weights, passing, figures).add()
        add_wishes(self.program, self.choices, profile=profile, wishes=problem.wishes)

    def _cuts(self, problem: Problem, figures: Figures) -> Cuts:
        if self.choices.reach.is_chain:
            cuts: Cuts = ChainCuts(problem, figures.costs, self.choices, self.unit_s)
        else:
            cuts = GraphCuts(self.program, problem, figures.costs, self.choices, self.unit_s)
        return SentCuts(cuts, problem) if problem.has_chunks else cuts
