"""HiGHS, in process, and CBC, a program of its own: a start handed over, a time limit kept, an honest status back.

After a time limit PuLP calls any answer optimal; only `sol_status` shows whether it is. PuLP's HiGHS ignores a warm start, so that
the start is set on the solver itself, which runs in a thread that Ctrl-C can stop. HiGHS runs without its presolve:
that takes up to twice the time, but 1.14.0 (HiGHS issues 3043, 3073, 3094) and 1.15.1 (a test has it) call plans
optimal that are not.
"""

from __future__ import annotations

import tempfile
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import pulp

from gplan.core.errors import UsageError

Expression: TypeAlias = Any  # a number, variable or linear expression of PuLP, which has no types
SolverName = Literal["HiGHS", "CBC"]
Start = Mapping[Expression, int]  # values of the binaries of a known plan; empty: none

_ROUNDING = 1e-9  # by which a row of numbers alone may be missed
_POLL_S = 0.2  # how often Ctrl-C is looked for; the end of a solve is noticed at once
_MISSING = {
    "HiGHS": "the MILP was to be solved by HiGHS, but highspy cannot be imported; pip install highspy, or take CBC",
    "CBC": "the MILP was to be solved by CBC, but PuLP has no CBC here; pip install 'pulp[cbc]', or take HiGHS",
    None: "the MILP needs HiGHS or CBC and neither can be imported; pip install highspy",
}


class LinearProgram:
    """What is to be minimised, `goal`, under rows that are added one by one."""

    def __init__(self) -> None:
        self.lp = pulp.LpProblem("gplan", pulp.LpMinimize)
        self.is_contradictory = False  # a row of numbers alone does not hold
        self._names = set[str]()
        self.goal = self.variable("goal")
        self.lp += self.goal

    def limit_goal(self, high: float) -> None:
        """Look for nothing worse than this."""
        self.goal.upBound = high

    def variable(self, name: str, *, high: float | None = None, is_binary: bool = False) -> Expression:
        """A new variable from 0 to `high`; CBC refuses a program in which two have one name."""
        assert name not in self._names, f"there are two variables {name}"
        self._names.add(name)
        kind = pulp.LpBinary if is_binary else pulp.LpContinuous
        return self.lp.add_variable(name, 0, 1 if is_binary else high, kind)

    def at_least(self, name: str, values: Iterable[Expression], *, high: float | None = None) -> Expression:
        """A new variable that is at least 0 and each of these."""
        variable = self.variable(name, high=high)
        for value in values:
            self.require(variable, at_least=value)
        return variable

    def require(self, larger: Expression, *, at_least: Expression) -> None:
        """A row: the one is at least the other."""
        difference = weighted([(1.0, larger), (-1.0, at_least)])
        if isinstance(difference, float):
            self.is_contradictory |= difference < -_ROUNDING
        else:
            self.lp += difference >= 0

    def require_equal(self, one: Expression, other: Expression) -> None:
        """Both are the same."""
        self.require(one, at_least=other)
        self.require(other, at_least=one)


def weighted(terms: Iterable[tuple[float, Expression]]) -> Expression:
    """The sum of factor times expression; a float where no variable is left.

    >>> weighted([(2.0, 3), (1.0, 0.5)])
    6.5
    """
    factors: defaultdict[Any, float] = defaultdict(float)
    constant = 0.0
    for factor, term in terms:
        if isinstance(term, pulp.LpVariable):
            factors[term] += factor
        elif isinstance(term, pulp.LpAffineExpression):
            constant += factor * term.constant
            for variable, times in term.items():
                factors[variable] += factor * times
        else:
            constant += float(factor) * float(term)
    left = {variable: float(factor) for variable, factor in factors.items() if factor}
    return pulp.LpAffineExpression(left, constant=constant) if left else constant


def total(terms: Iterable[Expression]) -> Expression:
    """The sum of some expressions."""
    return weighted((1.0, term) for term in terms)


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverResult:
    """How a solver ended; the values it found are in the program's variables."""

    is_infeasible: bool
    has_values: bool
    is_proven: bool
    bound: float  # of the goal, in units; 0 where the solver does not say


def available_solver(requested: SolverName | None) -> SolverName:
    """The solver to use: the one asked for, else HiGHS, else CBC.

    Raises UsageError where it, or any, cannot be used.
    """
    names: tuple[SolverName, ...] = get_args(SolverName)
    if requested not in (None, *names):
        raise UsageError(f"there is no MILP solver {requested!r}; expected one of {', '.join(names)}")
    for name in names if requested is None else (requested,):
        if is_available(name):
            return name
    raise UsageError(_MISSING[requested])


def is_available(name: SolverName) -> bool:
    """Whether the solver can be used here."""
    return bool((pulp.HiGHS(msg=False) if name == "HiGHS" else _cbc()).available())


def solve(program: LinearProgram, name: SolverName, *, start: Start, time_limit_s: float) -> SolverResult:
    """Solve a program; Ctrl-C stops the solver and is passed on."""
    if program.is_contradictory:
        return SolverResult(is_infeasible=True, has_values=False, is_proven=True, bound=0.0)
    run = _run_highs if name == "HiGHS" else _run_cbc
    run(program, start, time_limit_s)
    status, is_optimal = program.lp.sol_status, program.lp.sol_status == pulp.LpSolutionOptimal
    bound = program.lp.solverModel.getInfo().mip_dual_bound if name == "HiGHS" else 0.0
    return SolverResult(
        is_infeasible=program.lp.status == pulp.LpStatusInfeasible,
        has_values=is_optimal or status == pulp.LpSolutionIntegerFeasible,
        is_proven=is_optimal,
        bound=float(pulp.value(program.goal)) if is_optimal else max(0.0, bound),
    )


def _run_highs(program: LinearProgram, start: Start, time_limit_s: float) -> None:
    def run(lp: Any) -> None:
        if start:
            columns = np.array([variable.index for variable in start], dtype=np.int32)
            lp.solverModel.setSolution(len(start), columns, np.array(list(start.values()), dtype=np.float64))
        _run_until_interrupted(lp.solverModel)

    solver = pulp.HiGHS(msg=False, gapRel=0.0, gapAbs=0.0, timeLimit=time_limit_s, presolve="off")
    solver.callSolver = run
    program.lp.solve(solver)


def _run_until_interrupted(highs: Any) -> None:
    highs.HandleUserInterrupt = True
    highs.startSolve()
    try:
        while not highs.wait(_POLL_S)[0]:
            pass
    except KeyboardInterrupt:
        highs.cancelSolve()
        highs.wait()
        raise


def _run_cbc(program: LinearProgram, start: Start, time_limit_s: float) -> None:
    for variable, value in start.items():
        variable.setInitialValue(value)
    with tempfile.TemporaryDirectory() as folder:
        solver = _cbc(gapRel=0.0, timeLimit=time_limit_s, warmStart=bool(start))
        solver.tmpDir = folder
        program.lp.solve(solver)


def _cbc(**options: Any) -> Any:
    """PuLP's own CBC, or the one that is installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        bundled = pulp.PULP_CBC_CMD(msg=False, **options)
    return bundled if bundled.available() else pulp.COIN_CMD(msg=False, **options)
