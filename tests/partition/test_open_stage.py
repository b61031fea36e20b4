from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gplan.graph.down_sets import Floats, GraphDownSets
from gplan.partition.open_stage import OpenPlan, smallest_largest_open
from tests.graphs import Graph, graphs, towers

FORBIDDEN = float("inf")


@dataclass(frozen=True)
class Case:
    """Whole numbers and speeds that are powers of two, so that sums are exact and many plans tie."""

    positions: GraphDownSets
    work_s: Floats
    entering_s: Floats
    leaving_s: Floats
    fixed_s: float
    speeds: list[float]

    def solve(self, **options: object) -> OpenPlan | None:
        return smallest_largest_open(
            self.positions,
            work_s=self.work_s,
            entering_s=self.entering_s,
            leaving_s=self.leaving_s,
            fixed_s=self.fixed_s,
            num_stages=len(self.speeds),
            speeds=self.speeds,
            **options,
        )

    def load_s(self, inner: tuple[int, ...]) -> float:
        path = [0, *inner, self.positions.size - 1]
        return max(
            (self.work_s[j] - self.work_s[i]) / speed + self.entering_s[i] + self.leaving_s[j] + self.fixed_s
            for (i, j), speed in zip(pairwise(path), self.speeds, strict=True)
        )

    def is_chain(self, inner: tuple[int, ...]) -> bool:
        path = np.array([0, *inner, self.positions.size - 1])
        return bool(self.positions.contains(path[:-1], path[1:]).all())

    def brute_s(self) -> float:
        """The smallest largest load of every plan; infinity where there is none."""
        inner = combinations(range(1, self.positions.size - 1), len(self.speeds) - 1)
        return min((self.load_s(x) for x in inner if self.is_chain(x)), default=FORBIDDEN)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    positions = draw(graphs(max_layers=5)).positions
    layers = draw(st.lists(st.integers(0, 9), min_size=positions.num_layers, max_size=positions.num_layers))
    costs = st.lists(st.sampled_from([0, 1, 2, 5, FORBIDDEN]), min_size=positions.size, max_size=positions.size)
    entering_s, leaving_s = np.array(draw(costs), dtype=float), np.array(draw(costs), dtype=float)
    entering_s[[0, -1]] = leaving_s[[0, -1]] = 0.0
    num_stages = draw(st.integers(1, min(4, positions.num_layers)))
    return Case(
        positions=positions,
        work_s=positions.sums(np.array(layers, dtype=float)),
        entering_s=entering_s,
        leaving_s=leaving_s,
        fixed_s=draw(st.sampled_from([0.0, 3.0])),
        speeds=draw(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=num_stages, max_size=num_stages)),
    )


@given(cases())
@settings(max_examples=300, deadline=None)
def test_no_plan_of_exactly_k_stages_has_a_smaller_largest_load(case: Case) -> None:
    plan, best_s = case.solve(), case.brute_s()
    if plan is None:
        assert best_s == FORBIDDEN
        return
    assert plan.load_s == plan.lower_bound_s == best_s == case.load_s(plan.path)
    assert case.is_chain(plan.path)
    assert len(plan.path) == len(case.speeds) - 1


def chain(num_layers: int, num_stages: int) -> Case:
    positions = Graph(num_layers, [(i, i + 1) for i in range(num_layers - 1)]).positions
    nothing = np.zeros(positions.size)
    return Case(positions, positions.sums(np.ones(num_layers)), nothing, nothing, 0.0, [1.0] * num_stages)


def random_towers(length: int, num_stages: int) -> Case:
    positions, generator = towers(length, length).positions, np.random.default_rng(1)
    cut_s = generator.random(positions.size)
    cut_s[[0, -1]] = 0.0
    work_s = positions.sums(generator.random(positions.num_layers))
    return Case(positions, work_s, cut_s, cut_s, 0.25, [1.0] * num_stages)


def test_every_stage_gets_a_layer_even_where_fewer_stages_would_do() -> None:
    assert chain(4, 4).solve() == OpenPlan(path=(1, 2, 3), load_s=1.0, lower_bound_s=1.0)
    assert chain(3, 4).solve() is None


def test_one_stage_holds_everything() -> None:
    assert chain(3, 1).solve() == OpenPlan(path=(), load_s=3.0, lower_bound_s=3.0)


def test_a_fast_device_gets_more_work() -> None:
    case = chain(9, 2)
    plan = Case(case.positions, case.work_s, case.entering_s, case.leaving_s, 0.0, [1.0, 2.0]).solve()
    assert plan == OpenPlan(path=(3,), load_s=3.0, lower_bound_s=3.0)


def test_a_plan_of_thousands_of_down_sets_with_any_costs_is_proven() -> None:
    case = random_towers(40, 5)
    plan = case.solve()
    assert plan is not None
    assert case.is_chain(plan.path)
    assert plan.load_s == pytest.approx(case.load_s(plan.path), rel=1e-12)
    assert plan.lower_bound_s == plan.load_s


def test_after_the_deadline_the_plan_so_far_comes_with_its_gap() -> None:
    case = random_towers(10, 3)
    hurried, proven = case.solve(deadline_s=time.perf_counter()), case.solve()
    assert hurried is not None
    assert proven is not None
    assert case.is_chain(hurried.path)
    assert hurried.lower_bound_s < proven.load_s < hurried.load_s
