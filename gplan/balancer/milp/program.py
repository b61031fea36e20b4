"""A linear program being written: its variables and rows, and sums of many terms.

Expressions are PuLP's; a sum of nothing but numbers is a number, so that what is settled beforehand costs no row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, TypeAlias

import pulp

Expression: TypeAlias = Any  # a number, variable or linear expression of PuLP, which has no types

_ROUNDING = 1e-9  # by which a row of numbers alone may be missed


class Program:
    """What is to be minimised, `goal`, under rows that are added one by one."""

    def __init__(self) -> None:
        self.lp = pulp.LpProblem("gplan", pulp.LpMinimize)
        self.is_contradictory = False  # a row of numbers alone does not hold
        self._names = set[str]()
        self.goal = self.variable("goal")
        self.lp += self.goal

    @property
    def goal_value(self) -> float:
        """What a solver has found for the goal."""
        return float(pulp.value(self.goal))

    def limit_goal(self, high: float) -> None:
        """Look for nothing worse than this."""
        self.goal.upBound = high

    def variable(self, name: str, *, high: float | None = None, is_binary: bool = False) -> Expression:
        """A new variable from 0 to `high`; CBC refuses a program in which two have one name."""
        assert name not in self._names, f"there are two variables {name}"
        self._names.add(name)
        return self.lp.add_variable(
            name, 0, 1 if is_binary else high, pulp.LpBinary if is_binary else pulp.LpContinuous
        )

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
