"""What fits, told by bytes alone, against brute force: chains and graphs, unequal devices, constraints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gplan.cost.memory_moments import ALIKE_FROM_THE_END
from gplan.partition import memory_feasibility
from gplan.partition.candidates import TooManyCandidates
from gplan.partition.memory_feasibility import any_fits, least_peak, numbers_of_stages_that_fit
from gplan.partition.minimax import smallest_largest
from gplan.partition.plan_evaluation import stages_of
from gplan.partition.problem import Problem, moments_of
from gplan.partition.solve import with_down_sets
from tests.partition.graphs import every_partition, graph_problems, is_allowed
from tests.partition.problems import all_cuts, every_candidate, make_problem, peak_bytes, problems


@settings(max_examples=80, deadline=None)
@given(graph_problems())
def test_what_fits_is_what_brute_force_finds_to_fit(problem: Problem) -> None:
    expected = any(is_allowed(problem, stages) for stages in every_partition(problem))
    assert any_fits(with_down_sets(problem)) == expected


@settings(max_examples=60, deadline=None)
@given(problems(max_layers=6))
def test_the_least_peak_is_that_of_a_partition_and_none_has_less(problem: Problem) -> None:
    found, ends = least_peak(problem)
    assert ends[-1] == problem.num_layers
    assert found == peak_bytes(problem, stages_of(problem, ends[:-1]))
    assert found == min(peak_bytes(problem, stages_of(problem, cuts)) for cuts in all_cuts(problem))


@settings(max_examples=60, deadline=None)
@given(problems(max_layers=5), st.sampled_from(["never", "always", "except-last", "selected"]))
def test_no_stage_has_less_than_what_is_known_of_it_beforehand(problem: Problem, recompute: str) -> None:
    problem = replace(problem, memory_bytes=None, recompute=recompute)
    for stage, some in enumerate(every_candidate(replace(problem, recompute="never"))):
        held = memory_feasibility._least_held(problem, memory_feasibility._demand(problem, stage))
        assert (np.diff(held) >= 0).all()
        least = held[some.end] - held[some.first]
        assert (problem.peak_bytes(stage, some.first, some.end) >= np.floor(least)).all()


@pytest.mark.parametrize("schedule", ALIKE_FROM_THE_END)
@pytest.mark.parametrize("recompute", ["never", "always", "except-last"])
def test_stages_that_are_as_far_from_the_end_hold_the_same(schedule: str, recompute: str) -> None:
    def held(num_stages: int, num_microbatches: int, stage: int) -> bytes:
        problem = make_problem(
            [1] * 9, num_stages=num_stages, num_microbatches=num_microbatches, schedule=schedule, recompute=recompute
        )
        return moments_of(problem, stage).key

    for num_microbatches in (1, 2, 5):
        for num_stages in range(1, 10):
            for stage in range(1, num_stages):
                alike = 1 + min(num_stages - stage, num_microbatches + 1)
                assert held(num_stages, num_microbatches, stage) == held(alike, num_microbatches, 1)


def test_nothing_fits_hundreds_of_layers() -> None:
    problem = make_problem([1] * 300, num_stages=60, schedule="1f1b", stash_bytes=100, memory_bytes=1999)
    assert smallest_largest(problem) is None


def test_the_numbers_of_stages_that_fit_hundreds_of_layers_are_known() -> None:
    problem = make_problem([1] * 400, num_stages=2, schedule="1f1b", stash_bytes=100, memory_bytes=16_000)
    numbers = [number for number, fits in enumerate(numbers_of_stages_that_fit(problem), start=1) if fits]
    assert numbers == list(range(6, 401))  # 160, 80 and 53 layers in the last three stages, 40 in each before


@pytest.mark.parametrize("requested", [any_fits, least_peak, lambda problem: list(numbers_of_stages_that_fit(problem))])
def test_too_many_stages_to_be_looked_at_are_not_looked_at(
    requested: Callable[[Problem], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_feasibility, "_MOST_CHUNKS", 0)
    problem = make_problem([1] * 4, num_stages=2, stash_bytes=1000, memory_bytes=10)
    with pytest.raises(TooManyCandidates):
        requested(problem)
    assert smallest_largest(problem) is None  # it finds that out by the candidates
