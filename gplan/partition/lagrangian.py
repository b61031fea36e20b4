"""Bounds from weights: what is to be small is the largest of many sums over the stages, so at least any mean.

The step is at least the longest of very many paths, the largest load that of one of the devices, the largest peak that of one
moment of a device; each is a sum of figures of the stages. A mean of such sums, with weights that add up to 1, is again
a sum over the stages, and the partition for which it is smallest is a shortest path over the candidates: no partition has
less. With the best weights this is the bound of a linear program (a Lagrangian bound); they are approached by
fictitious play (Brown 1951): the partitions answer the mean of the weights so far, the weights the mean of the
partitions.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from gplan.graph.down_sets import Floats, Ints
from gplan.partition.candidates import Candidates, best_path, ends_of, prefix_tables, suffix_tables
from gplan.partition.goals import Goal
from gplan.partition.problem import ROUNDING, Problem, compute_sums_s

_TINY = 1e-300  # so that nothing is divided by 0
_HEAD_START = 20  # rounds that the first weights count for


@dataclass(frozen=True, eq=False)
class WeightedBounds:
    """The bounds that one mean of the sums gives."""

    goal: Goal
    figures: Sequence[Floats]
    weights: Floats

    @property
    def problem(self) -> Problem:
        """What is balanced."""
        return self.goal.problem

    @property
    def candidates(self) -> Sequence[Candidates]:
        """The candidates of each stage."""
        return self.goal.candidates

    @cached_property
    def values(self) -> list[Floats]:
        """[E] for each stage: what a candidate adds to the mean."""
        return [own @ figures for own, figures in zip(self.weights, self.figures, strict=True)]

    @cached_property
    def tables(self) -> Floats:
        """As `suffix_tables` of the values."""
        return suffix_tables(self.candidates, self.values, np.add, num_positions=self.problem.costs.num_positions)

    @property
    def rest_s(self) -> Floats:
        """[S+1, P]: the least that stages s, ... from each position on add."""
        rest: Floats = self.tables[:, 0]
        return rest

    @property
    def whole_s(self) -> float:
        """Of every partition."""
        return float(self.tables[0, 0, 0]) * (1 - ROUNDING)

    @cached_property
    def through_s(self) -> list[Floats]:
        """[E] for each stage: of every partition that takes this candidate."""
        before = prefix_tables(self.candidates, self.values, np.add, num_positions=self.problem.costs.num_positions)
        return [
            (before[stage][some.first] + own + self.rest_s[stage + 1][some.end]) * (1 - ROUNDING)
            for stage, (some, own) in enumerate(zip(self.candidates, self.values, strict=True))
        ]

    def among(self, candidates: Sequence[Candidates]) -> WeightedBounds:
        """The same among some of the candidates."""
        goal = self.goal.among(candidates)
        return replace(self, goal=goal, figures=[goal.figures(stage) for stage in range(len(candidates))])

    def best_path(self) -> Ints:
        """[S]: the partition with the smallest mean."""
        return best_path(self.candidates, self.tables, self.values, np.add)

    def even_path(self) -> Ints:
        """[S]: the partition whose stages add as equal parts as can be, by the sum of squares."""
        return self.least_path([own**2 for own in self.values])

    def blended_paths(self, count: int) -> list[Ints]:
        """Partitions, [S] each, from even loads (the first) to even weighted sums (the last)."""
        loads, added = _shares([x.load_s for x in self.candidates]), _shares(self.values)
        shares = np.linspace(0, 1, count).tolist()
        return [
            self.least_path([(1 - x) * load**2 + x * own**2 for load, own in zip(loads, added, strict=True)])
            for x in shares
        ]

    def least_path(self, values: Sequence[Floats]) -> Ints:
        """[S]: the partition with the smallest sum of some values of the candidates."""
        tables = suffix_tables(self.candidates, values, np.add, num_positions=self.problem.costs.num_positions)
        return best_path(self.candidates, tables, values, np.add)

    def figures_of(self, path: Ints) -> Floats:
        """[S, figures] of a partition."""
        return np.array([figures[:, i] for figures, i in zip(self.figures, path, strict=True)])


def _shares(values: Sequence[Floats]) -> list[Floats]:
    """As shares of the mean of all candidates."""
    mean = max(float(np.concatenate(values).mean()), _TINY)
    return [own / mean for own in values]


def first_weighted_bounds(goal: Goal) -> WeightedBounds:
    """The best of the bounds that need no search."""
    figures = [goal.figures(stage) for stage in range(goal.problem.num_stages)]
    return max((WeightedBounds(goal, figures, x) for x in goal.first_weights()), key=lambda weighted: weighted.whole_s)


@dataclass
class WeightUpdates:
    """Weights and partitions that answer each other, round by round."""

    weighted: WeightedBounds  # the best bound so far
    mean_weights: Floats
    mean_figures: Floats
    mean_ends_s: Floats  # [S]: the compute before the ends of the stages
    num_rounds: int = 0

    @classmethod
    def begun(cls, weighted: WeightedBounds, path: Ints) -> WeightUpdates:
        """At these weights and with this partition."""
        return cls(weighted, weighted.weights, weighted.figures_of(path), _ends_s(weighted, path))

    def go_on(self, num_rounds: int, *, deadline_s: float) -> None:
        """So many rounds more; O(candidates + S M) each."""
        for _ in range(num_rounds):
            if time.perf_counter() > deadline_s:
                return
            self._go_on()

    def _go_on(self) -> None:
        best = self.weighted
        tried = replace(best, weights=self.mean_weights)
        if tried.whole_s > best.whole_s:
            self.weighted = tried
        path = tried.best_path()
        self.num_rounds += 1
        share = 1 / (self.num_rounds + 1)
        self.mean_figures = (1 - share) * self.mean_figures + share * tried.figures_of(path)
        self.mean_ends_s = (1 - share) * self.mean_ends_s + share * _ends_s(tried, path)
        share = 1 / (self.num_rounds + _HEAD_START)
        self.mean_weights = (1 - share) * self.mean_weights + share * best.goal.heaviest(self.mean_figures)

    def middle_path(self) -> Ints:
        """[S]: the partition whose cuts are nearest to the mean ones of all partitions so far."""
        candidates, sums = self.weighted.candidates, compute_sums_s(self.weighted.problem)
        distances = [(sums[some.end] - end_s) ** 2 for some, end_s in zip(candidates, self.mean_ends_s, strict=True)]
        return self.weighted.least_path(distances)


def _ends_s(weighted: WeightedBounds, path: Ints) -> Floats:
    ends_s: Floats = compute_sums_s(weighted.problem)[ends_of(weighted.candidates, path)]
    return ends_s
