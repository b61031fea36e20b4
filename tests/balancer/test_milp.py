"""The integer program is an independent check of the other solvers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from gplan.balancer import milp, solve
from gplan.balancer.milp import smallest_by_milp
from gplan.balancer.price import Problem, objective_s, stages_of
from gplan.nouns import SharedWeight
from tests.balancer.problems import best_objective_s, make_problem, peak_bytes, problems


@settings(max_examples=150, deadline=None)
@given(problems(max_layers=6, max_stages=4))
def test_equals_brute_force_and_the_other_solvers(problem: Problem) -> None:
    best_s = best_objective_s(problem)
    by_milp, by_dp = smallest_by_milp(problem), solve(problem, solver="dp")
    if best_s is None:
        assert by_milp is by_dp is None
        return
    assert by_milp is not None
    assert by_dp is not None
    for solution in (by_milp, by_dp):
        stages = stages_of(problem, solution.cuts)
        assert objective_s(problem, stages) == pytest.approx(best_s, rel=1e-6)
        assert solution.lower_bound_s == objective_s(problem, stages)
        assert problem.memory_bytes is None or peak_bytes(stages) <= problem.memory_bytes
    assert by_milp.solver == "milp/HiGHS"


@settings(max_examples=600, deadline=None)
@given(problems(max_layers=5, max_stages=3, minimize=["max-stage"]))
def test_only_plans_that_are_too_large_by_rounding_must_be_forbidden(problem: Problem) -> None:
    forbidden: list[tuple[int, ...]] = []
    with pytest.MonkeyPatch.context() as patch:
        original = milp._Model.forbid
        patch.setattr(milp._Model, "forbid", lambda model, cuts: [forbidden.append(cuts), original(model, cuts)])
        smallest_by_milp(problem)
    for cuts in forbidden:
        assert peak_bytes(stages_of(problem, cuts)) <= problem.memory_bytes + 2


def test_a_shared_weight_is_held_by_every_stage_that_uses_it() -> None:
    shared = SharedWeight(name="tied", layers=(0, 3), num_parameters=25, weight_bytes=1000, gradient_bytes=0)
    needed = 1000 + 40 + 40 + 80  # the tied one, then weights, gradients and optimizer states of two layers
    problem = make_problem([1] * 4, num_stages=2, weight_bytes=20, shared_weights=(shared,), memory_bytes=needed - 1)
    assert smallest_by_milp(problem) is None
    assert smallest_by_milp(replace(problem, memory_bytes=needed)) is not None


@pytest.mark.parametrize("minimize", ["max-stage", "step-time"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_agrees_with_the_other_solvers_on_a_chain_of_sixteen_layers(minimize: str, schedule: str) -> None:
    forward_s = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]
    problem = make_problem(
        forward_s, num_stages=4, schedule=schedule, minimize=minimize, stash_bytes=100, memory_bytes=2500
    )
    by_milp, by_dp = smallest_by_milp(problem), solve(problem, solver="dp")
    assert by_milp is not None
    assert by_dp is not None
    assert by_milp.lower_bound_s == pytest.approx(by_dp.lower_bound_s)


@pytest.mark.parametrize("memory_bytes", [400 * 10**9, 400 * 10**9 - 1])
def test_a_plan_that_is_one_byte_too_large_does_not_pass_by_tolerance(memory_bytes: int) -> None:
    problem = make_problem([1] * 4, num_stages=2, num_microbatches=2, stash_bytes=10**11, memory_bytes=memory_bytes)
    assert (smallest_by_milp(problem) is not None) == (memory_bytes == 400 * 10**9)


@pytest.mark.filterwarnings("ignore:PULP_CBC_CMD is deprecated")
def test_cbc_takes_over_where_highs_cannot_be_imported_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(milp, "find_spec", lambda _: None)
    solution = smallest_by_milp(make_problem([3, 1, 2, 2], num_stages=2))
    assert solution is not None
    assert (solution.cuts, solution.lower_bound_s) == ((2,), 12)
    assert solution.solver == "milp/CBC"
    assert solution.notes == ("highspy cannot be imported: the MILP was solved by CBC",)


def test_without_time_the_answer_is_not_called_optimal() -> None:
    forward_s = [1 + 7 * i % 13 for i in range(40)]
    problem = make_problem(forward_s, num_stages=8, num_microbatches=16, schedule="1f1b", minimize="step-time")
    solution = smallest_by_milp(problem, time_limit_s=0.01)
    assert solution is not None
    assert solution.lower_bound_s < objective_s(problem, stages_of(problem, solution.cuts))
    assert "in 10.0 ms" in solution.notes[0] or "after 10.0 ms" in solution.notes[0]
