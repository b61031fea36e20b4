"""Devices that hold several stages: the smallest step and the smallest largest load, against brute force; honest bounds."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from gplan.balancer import sharing
from gplan.balancer.price import objective_s, stages_of
from gplan.balancer.problem import Problem
from gplan.balancer.sharing import smallest_peak, smallest_shared
from gplan.errors import NoPlanError
from gplan.nouns import Pin, Wishes
from tests.balancer.problems import SHARED, all_cuts, best_objective_s, in_halves, make_problem, peak_bytes, problems


@settings(max_examples=250, deadline=None)
@given(problems(minimize=["step-time", "max-stage", "max-compute"], schedules=SHARED, max_layers=8, max_stages=8))
def test_equals_brute_force_and_is_proven(problem: Problem) -> None:
    best_s, solution = best_objective_s(problem), smallest_shared(problem)
    if best_s is None:
        assert solution is None
        return
    assert solution is not None
    stages = stages_of(problem, solution.cuts)
    assert objective_s(problem, stages) == pytest.approx(best_s, rel=1e-9)
    assert solution.lower_bound_s == pytest.approx(best_s, rel=1e-9)
    assert problem.memory_bytes is None or peak_bytes(problem, stages) <= problem.memory_bytes
    assert (solution.solver, solution.notes) == ("branch-and-bound", ())


def chain(schedule: str, num_layers: int, num_stages: int, *, seed: int = 0) -> Problem:
    """A chain of layers that differ."""
    forward_s, backward_s = np.random.default_rng(seed).integers(1, 30, (2, num_layers)).tolist()
    problem = make_problem(
        forward_s, backward_s, num_stages=num_stages, num_microbatches=8, schedule=schedule, minimize="step-time",
        stash_bytes=[1 + 7 * i % 11 for i in range(num_layers)], weight_bytes=5,
    )  # fmt: skip
    return replace(problem, costs=replace(problem.costs, profile=in_halves(problem.costs.profile)))


@pytest.mark.parametrize("schedule", SHARED[:-1])
def test_without_time_the_best_known_plan_comes_with_its_gap_and_a_note(schedule: str) -> None:
    problem = chain(schedule, 60, 12)
    hasty = smallest_shared(problem, time_limit_s=1e-3)
    patient = smallest_shared(problem, time_limit_s=0.5)
    assert hasty is not None
    assert patient is not None
    hasty_s, patient_s = (objective_s(problem, stages_of(problem, x.cuts)) for x in (hasty, patient))
    assert 0 < hasty.lower_bound_s <= patient.lower_bound_s <= patient_s <= hasty_s
    assert hasty.notes == ("the search for a shorter step was stopped after 1.00 ms",)


def test_where_the_arcs_are_too_many_the_longest_are_left_out_and_the_bound_stays_that_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = chain("looped-bfs:2", 20, 6)
    exact = smallest_shared(problem)
    monkeypatch.setattr(sharing, "_MOST_ARCS", 300)
    narrow = smallest_shared(problem)
    assert exact is not None
    assert narrow is not None
    narrow_s = objective_s(problem, stages_of(problem, narrow.cuts))
    assert narrow.lower_bound_s < exact.lower_bound_s <= narrow_s < 1.1 * exact.lower_bound_s
    assert narrow.notes


@pytest.mark.parametrize("schedule", ["interleaved-1f1b:2", "zb-v"])
def test_the_smallest_peak_is_found_and_one_byte_less_is_known_to_be_too_little(schedule: str) -> None:
    problem = chain(schedule, 9, 4)
    known = smallest_peak(problem, deadline_s=time.perf_counter() + 60)
    assert known is not None
    least = min(peak_bytes(problem, stages_of(problem, cuts)) for cuts in all_cuts(problem))
    assert (known.value, known.proven) == (least, True)
    assert smallest_shared(replace(problem, memory_bytes=least)) is not None
    assert smallest_shared(replace(problem, memory_bytes=least - 1)) is None


def test_whether_anything_fits_may_be_left_open_but_not_unsaid(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = chain("interleaved-1f1b:2", 40, 8)
    known = smallest_peak(problem, deadline_s=time.perf_counter() + 0.2)
    assert known is not None
    assert not known.proven
    between = int(0.5 * (known.lower_bound + known.value))
    with pytest.raises(NoPlanError, match="nor that there is none; the smallest memory that was found to do is"):
        smallest_shared(replace(problem, memory_bytes=between), time_limit_s=1e-3)


def test_wishes_are_granted_by_stage() -> None:
    problem = chain("looped-bfs:2", 8, 4)
    wished = replace(problem, wishes=Wishes(pins=(Pin(layer="b", stage=2),)))
    solution = smallest_shared(wished)
    assert solution is None  # two stages lie before it, and one layer
    wished = replace(problem, wishes=Wishes(pins=(Pin(layer="c", stage=2),)))
    solution = smallest_shared(wished)
    assert solution is not None
    assert solution.cuts[:2] == (1, 2)
