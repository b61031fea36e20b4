"""The integer program on graphs, for every objective, against every chain of down-sets."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gplan.core import Constraints, EngineCost, Link, LinkPoint, Pin, Profile, Value, ValueCost
from gplan.core.machine import FREE_LINK
from gplan.cost.stage_table import StageTable
from gplan.partition.batch_simulation import goal_s
from gplan.partition.milp import smallest_by_milp
from gplan.partition.problem import Problem, Solution
from gplan.partition.solve import with_down_sets
from tests.made import make_profile
from tests.partition.graphs import best_goal_s, every_partition, graph_problems, is_allowed
from tests.partition.problems import SHARED


def value(producer: int | None, *consumers: int, num_bytes: int = 1) -> Value:
    """A value of some bytes."""
    cost = ValueCost(microbatch_size=1, num_bytes=num_bytes)
    return Value(producer=producer, consumers=consumers, costs=(cost,))


def problem_of(profile: Profile, num_stages: int, minimize: str = "max-stage", **more: object) -> Problem:
    """A problem over a graph, of four micro-batches."""
    problem = Problem(
        costs=StageTable(profile, 4), num_stages=num_stages, schedule="gpipe", recompute="never", minimize=minimize
    )
    return replace(problem, **more)


def graph(forward_s: list[float], *values: Value, link: Link | None = None) -> Profile:
    """A profile with these values; backwards take no time."""
    profile = make_profile(forward_s, [0] * len(forward_s), **({"link": link} if link else {}))
    return replace(profile, values=values)


def check(problem: Problem, found: Solution | None) -> None:
    """Compare with every chain of down-sets."""
    best_s = best_goal_s(problem)
    if best_s is None:
        assert found is None
        return
    assert found is not None
    assert is_allowed(problem, found.stages)
    assert goal_s(problem, found.stages) == pytest.approx(best_s, rel=1e-6)
    assert found.lower_bound_s == goal_s(problem, found.stages)


@settings(max_examples=60, deadline=None)
@given(st.one_of(graph_problems(), graph_problems(schedules=SHARED)))
def test_paths_of_candidate_stages_equal_brute_force(problem: Problem) -> None:
    check(problem, smallest_by_milp(with_down_sets(problem)))


@settings(max_examples=60, deadline=None)
@given(st.one_of(graph_problems(), graph_problems(schedules=SHARED)))
def test_the_linear_part_equals_brute_force_after_excluding_answers(problem: Problem) -> None:
    """Nothing that the program leaves out of the costs makes its bound too high."""
    check(problem, smallest_by_milp(problem))


@settings(max_examples=40, deadline=None)
@given(graph_problems(max_layers=5, max_stages=3))
def test_from_any_plan_it_comes_to_the_best(problem: Problem) -> None:
    allowed = [stages for stages in every_partition(problem) if is_allowed(problem, stages)]
    if not allowed:
        return
    worst = max(allowed, key=lambda stages: goal_s(problem, stages))
    found = smallest_by_milp(with_down_sets(problem), start=Solution(stages=worst, lower_bound_s=0.0, solver="by hand"))
    assert found is not None
    assert found.lower_bound_s == pytest.approx(min(goal_s(problem, stages) for stages in allowed), rel=1e-6)


@settings(max_examples=15, deadline=None)
@given(graph_problems(max_layers=5, max_stages=3))
def test_cbc_comes_to_the_same(problem: Problem) -> None:
    best_s, found = best_goal_s(problem), smallest_by_milp(problem, solver="CBC")
    assert (found is None) == (best_s is None)
    if found is not None:
        assert found.lower_bound_s == pytest.approx(best_s, rel=1e-6)


def test_cbc_takes_what_sending_keeps_a_stage_that_is_recomputed_but_for_the_last() -> None:
    """Kept and recomputed backwards send the same: as two variables of one name, CBC refused them."""
    points = (LinkPoint(num_bytes=1, seconds=1.0), LinkPoint(num_bytes=3, seconds=1.5))
    engine = EngineCost(action_s=0.5, sending=Link(latency_s=1.0, bytes_per_s=2.0, points=points))
    cost = ValueCost(microbatch_size=1, num_bytes=2, gradient_bytes=2)
    values = (Value(producer=0, consumers=(2,), costs=(cost,)), Value(producer=1, consumers=(2,), costs=(cost,)))
    profile = replace(graph([1, 2, 3], *values), engine=engine)
    problem = problem_of(profile, 2, "step-time", recompute="except-last")
    found = smallest_by_milp(problem, solver="CBC")
    assert found is not None
    assert found.lower_bound_s == pytest.approx(best_goal_s(problem), rel=1e-6)


def test_layers_of_two_towers_share_a_stage() -> None:
    towers = graph([1, 3, 3, 1], value(0, 2), value(1, 3))  # layers 0 and 2, and 1 and 3
    found = smallest_by_milp(problem_of(towers, 2))
    assert found is not None
    assert found.lower_bound_s == 4
    assert found.stages in [((0, 1), (2, 3)), ((0, 2), (1, 3)), ((1, 3), (0, 2))]


def test_a_value_that_two_layers_read_crosses_once() -> None:
    fan = graph([1, 1, 1], value(0, 1, 2, num_bytes=6), link=Link(latency_s=0.0, bytes_per_s=1.0))
    found = smallest_by_milp(problem_of(fan, 2))
    assert found is not None
    assert found.lower_bound_s == 1 + 6  # what layer 0 makes, received for both


def test_nothing_to_send_pays_no_latency() -> None:
    boundaries = graph([2, 2], value(0, 2), value(None, 1, num_bytes=0), link=Link(latency_s=5.0, bytes_per_s=1.0))
    found = smallest_by_milp(problem_of(boundaries, 2))
    assert found is not None
    assert found.stages == ((1,), (0,))  # layer 0 last: its value goes to the model's output, over no cut
    assert found.lower_bound_s == 2


@pytest.mark.parametrize("cut_after", [("a",), ("a", "a")])
def test_a_prefix_that_must_end_a_stage_does(cut_after: tuple[str, ...]) -> None:
    towers = graph([1, 3, 3, 1], value(0, 2), value(1, 3))
    found = smallest_by_milp(problem_of(towers, 2, constraints=Constraints(cut_after=cut_after)))
    assert found is not None
    assert found.stages == ((0,), (1, 2, 3))


def test_constraints_that_contradict_each_other_are_impossible() -> None:
    chain = graph([1, 1], value(0, 1))
    constraints = Constraints(keep_together=(("a", "b"),), pins=(Pin(layer="a", stage=0), Pin(layer="b", stage=1)))
    assert smallest_by_milp(problem_of(chain, 2, constraints=constraints)) is None


def test_forty_layers_with_far_more_down_sets_than_can_be_listed() -> None:
    towers = graph([1 + 5 * v % 7 for v in range(40)], *(value(v, v + 8) for v in range(32)), link=FREE_LINK)
    found = smallest_by_milp(problem_of(towers, 4))
    assert found is not None
    assert found.lower_bound_s == sum(1 + 5 * v % 7 for v in range(40)) / 4
