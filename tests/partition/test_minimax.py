"""The smallest largest stage, against brute force and on cases with a known answer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from gplan.core import Link
from gplan.partition.candidates import CandidateLimit, candidates_within, suffix_tables
from gplan.partition.minimax import smallest_largest
from gplan.partition.plan_evaluation import stage_loads_s, stages_of
from gplan.partition.problem import Problem
from tests.partition.problems import make_problem, plans, problems, tie_key


def loads(problem: Problem) -> tuple[float, ...]:
    solution = smallest_largest(problem)
    assert solution is not None
    return stage_loads_s(problem, stages_of(problem, solution.cuts))


@settings(max_examples=300, deadline=None)
@given(problems(minimize=["max-stage"]))
def test_equals_brute_force_ties_included(problem: Problem) -> None:
    keys = [tie_key(problem, stages) for _, stages in plans(problem)]
    solution = smallest_largest(problem)
    if not keys:
        assert solution is None
        return
    assert solution is not None
    assert tie_key(problem, stages_of(problem, solution.cuts)) == min(keys)
    assert solution.lower_bound_s == min(keys)[0]


def test_subtracting_the_smallest_cost_would_give_23_where_the_optimum_is_13() -> None:
    problem = make_problem([6, 4, 2, 3, 2, 5], [7, 4, 3, 4, 3, 6], num_stages=4)
    assert max(loads(problem)) == 13
    assert loads(problem) == (13, 13, 12, 11)


@pytest.mark.parametrize("num_layers", [1, 2, 9])
def test_one_stage_holds_everything(num_layers: int) -> None:
    assert loads(make_problem([1.0] * num_layers, num_stages=1)) == (3.0 * num_layers,)


def test_as_many_stages_as_layers_hold_one_each() -> None:
    assert loads(make_problem([3, 1, 2], num_stages=3)) == (9, 3, 6)


def test_no_stage_is_empty_where_one_layer_outweighs_all_others() -> None:
    assert loads(make_problem([100, 1, 1], num_stages=3)) == (300, 3, 3)


def test_the_second_largest_stage_decides_between_equal_largest_ones() -> None:
    problem = make_problem([6, 1, 1, 3, 1], [0] * 5, num_stages=3)
    assert sorted(loads(problem)) == [2, 4, 6]  # and not 1, 5, 6


def test_the_fewest_bytes_decide_between_equal_loads() -> None:
    def cuts(outputs: list[int]) -> tuple[int, ...]:
        solution = smallest_largest(make_problem([4, 1, 2, 1], [0] * 4, num_stages=3, output_bytes=outputs))
        assert solution is not None
        return solution.cuts

    assert cuts([1, 9, 1, 1]) == (1, 3)
    assert cuts([1, 1, 9, 1]) == (1, 2)


def test_a_dear_cut_is_avoided_when_transfers_take_time() -> None:
    dear = make_problem([1] * 4, num_stages=2, output_bytes=[1, 50, 1, 1], link=Link(latency_s=0, bytes_per_s=1))
    solution = smallest_largest(dear)
    assert solution is not None
    assert solution.cuts in [(1,), (3,)]


def test_under_1f1b_an_early_stage_gets_fewer_layers_when_memory_is_short() -> None:
    problem = make_problem([1] * 6, num_stages=2, schedule="1f1b", stash_bytes=10, memory_bytes=40)
    solution = smallest_largest(problem)
    assert solution is not None
    assert solution.cuts == (2,)  # 2 layers twice, then 4 layers once, are 40 bytes


def test_a_long_chain_is_cut_as_evenly_as_its_layers_allow() -> None:
    assert max(loads(make_problem([1] * 400, num_stages=7))) == 3 * 58


@pytest.mark.parametrize("memory_bytes", [None, 900, 500])
def test_looking_at_short_stages_only_misses_nothing(memory_bytes: int | None) -> None:
    light_but_long = [1] * 20 + [30] * 10 + [1] * 20
    problem = make_problem(light_but_long, num_stages=9, schedule="1f1b", stash_bytes=10, memory_bytes=memory_bytes)
    every = candidates_within(problem, CandidateLimit.of_load(float("inf"), num_stages=problem.num_stages))
    assert every is not None
    tables = suffix_tables(every, [some.load_s for some in every], np.maximum, num_positions=len(light_but_long) + 1)
    solution = smallest_largest(problem)
    assert solution is not None
    assert solution.lower_bound_s == tables[0, 0, 0]
