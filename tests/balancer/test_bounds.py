"""Bounds lie below every plan that they speak of."""

from __future__ import annotations

from hypothesis import given, settings

from gplan.balancer.bounds import StepBounds, segments_within
from gplan.balancer.labels import GPipeLabels
from gplan.balancer.nodes import SimulatedPrefixes
from gplan.balancer.price import Problem, objective_s
from gplan.balancer.segments import all_segments
from tests.balancer.problems import best_objective_s, make_problem, plans, problems

ROUNDING = 1 + 1e-9


@settings(max_examples=300, deadline=None)
@given(problems(minimize=["step-time"], max_layers=6))
def test_no_plan_takes_less_than_the_bound_of_any_of_its_stages(problem: Problem) -> None:
    bounds = StepBounds(problem, all_segments(problem))
    for _, stages in plans(problem):
        step_s = objective_s(problem, stages) * ROUNDING
        assert bounds.whole_s <= step_s
        for stage in stages:
            assert bounds.through_s[stage.index, stage.first_layer, stage.num_layers - 1] <= step_s
            assert bounds.rest_s[stage.index, stage.first_layer] <= step_s


@settings(max_examples=300, deadline=None)
@given(problems(minimize=["step-time"], max_layers=6))
def test_no_plan_takes_less_than_the_bound_of_any_prefix_and_all_stages_are_no_bound_but_the_step(
    problem: Problem,
) -> None:
    bounds = StepBounds(problem, all_segments(problem))
    relaxations = [SimulatedPrefixes(bounds)] + [GPipeLabels(bounds)] * (problem.schedule == "gpipe")
    for _, stages in plans(problem):
        step_s = objective_s(problem, stages)
        for relaxation in relaxations:
            nodes = relaxation.root()
            for stage in stages:
                nodes = relaxation.grow(nodes, nodes.last_end * 0 + stage.end_layer)
                assert nodes.bounds_s.item() <= step_s * ROUNDING
            assert nodes.bounds_s.item() * ROUNDING >= step_s


@settings(max_examples=100, deadline=None)
@given(problems(minimize=["step-time"], max_layers=6))
def test_segments_that_are_left_out_are_in_no_plan_within_the_limit(problem: Problem) -> None:
    best_s = best_objective_s(problem)
    if best_s is not None:
        width = segments_within(problem, best_s).width
        for _, stages in plans(problem):
            assert objective_s(problem, stages) > best_s or max(x.num_layers for x in stages) <= width


def test_one_slow_stage_is_bounded_by_its_own_work_and_its_way_there_and_back() -> None:
    problem = make_problem([1, 5, 1], num_stages=3, num_microbatches=4, schedule="1f1b", minimize="step-time")
    assert StepBounds(problem, all_segments(problem)).whole_s >= 4 * 15 + 3
