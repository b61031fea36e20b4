"""Bounds lie below every plan that they speak of."""

from __future__ import annotations

from hypothesis import given, settings

from gplan.partition.bounds import StepBounds, busy_within
from gplan.partition.candidates import candidates_within
from gplan.partition.plan_evaluation import objective_s
from gplan.partition.problem import Problem
from tests.partition.problems import EVERY, best_objective_s, every_candidate, make_problem, paths, plans, problems

ROUNDING = 1 + 1e-9


@settings(max_examples=200, deadline=None)
@given(problems(minimize=["step-time"], max_layers=6, schedules=EVERY))
def test_no_plan_takes_less_than_the_bound_of_any_of_its_stages(problem: Problem) -> None:
    bounds = StepBounds(problem, every_candidate(problem))
    for cuts, stages in plans(problem):
        step_s = objective_s(problem, stages) * ROUNDING
        for stage, taken in zip(stages, paths(problem, bounds.candidates, [cuts])[0], strict=True):
            assert bounds.through_s[stage.index][taken] <= step_s
            assert bounds.rest_s[stage.index, stage.first_layer] <= step_s


@settings(max_examples=100, deadline=None)
@given(problems(minimize=["step-time"], max_layers=6, schedules=EVERY))
def test_stages_that_are_left_out_are_in_no_plan_within_the_limit(problem: Problem) -> None:
    best_s = best_objective_s(problem)
    if best_s is None:
        return
    candidates = candidates_within(problem, busy_within(problem, best_s * ROUNDING))
    assert candidates is not None
    for cuts, stages in plans(problem):
        if objective_s(problem, stages) <= best_s:
            assert len(paths(problem, candidates, [cuts])) == 1  # it raises where a candidate is missing


def test_one_slow_stage_is_bounded_by_its_own_work_and_its_way_there_and_back() -> None:
    problem = make_problem([1, 5, 1], num_stages=3, num_microbatches=4, schedule="1f1b", minimize="step-time")
    assert StepBounds(problem, every_candidate(problem)).rest_s[0, 0] >= 4 * 15 + 3
