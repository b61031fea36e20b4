"""Arrays of candidate stages against one stage at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from gplan.graph.down_sets import Prefixes
from gplan.partition import candidates as candidates_module
from gplan.partition.candidates import CandidateLimit, TooManyCandidates, candidates_within, pairs_within
from gplan.partition.plan_evaluation import stage_loads_s, stage_of, stages_of
from gplan.partition.problem import Problem
from tests.partition.problems import EVERY, all_cuts, every_candidate, make_problem, paths, plans, problems


@settings(max_examples=200, deadline=None)
@given(problems(schedules=EVERY))
def test_loads_and_peaks_of_candidates_are_those_of_priced_stages(problem: Problem) -> None:
    candidates = every_candidate(problem)
    for cuts in all_cuts(problem)[:5]:
        stages = stages_of(problem, cuts)
        taken = paths(problem, candidates, [cuts])[0]
        for some, index, stage, load_s in zip(candidates, taken, stages, stage_loads_s(problem, stages), strict=True):
            candidate = some.take(np.array([index]))
            assert candidate.load_s.item() == load_s
            alone = stage_of(problem, stage.index, stage.first_layer, stage.end_layer)
            assert problem.peak_bytes(stage.index, candidate.first, candidate.end).item() == alone.memory.peak_bytes


@settings(max_examples=200, deadline=None)
@given(problems(minimize=["max-stage"]))
def test_candidates_within_a_cap_make_up_every_plan_within_it_and_no_other(problem: Problem) -> None:
    every = {cuts: max(stage_loads_s(problem, stages)) for cuts, stages in plans(problem)}
    cap_s = float(np.median(list(every.values()))) if every else 1e9
    candidates = candidates_within(problem, CandidateLimit.of_load(cap_s, num_stages=problem.num_stages))
    inside = [cuts for cuts, load_s in every.items() if load_s <= cap_s]
    if candidates is None:
        assert not inside
        return
    taken = {(stage, int(i)) for path in paths(problem, candidates, inside) for stage, i in enumerate(path)}
    assert len(taken) == sum(len(some) for some in candidates)  # every candidate is on a path, and every path a plan


def test_candidates_come_by_rising_first_position_and_lie_on_paths() -> None:
    stage_0, stage_1 = every_candidate(make_problem([1, 2, 3], num_stages=2))
    assert list(zip(stage_0.first, stage_0.end, strict=True)) == [(0, 1), (0, 2)]
    assert list(zip(stage_1.first, stage_1.end, stage_1.load_s, strict=True)) == [(1, 3, 15), (2, 3, 9)]


def test_pairs_in_many_chunks_are_those_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = np.array([0.0, 1, 1, 4, 5, 9])

    def pairs() -> list[tuple[int, int]]:
        found = pairs_within(Prefixes(5), sums, np.arange(5), np.arange(6), most=np.full(5, 4.0), low=0, high=9)
        return [pair for first, end in found for pair in zip(first.tolist(), end.tolist(), strict=True)]

    in_one = pairs()
    assert in_one == [(a, b) for a in range(5) for b in range(a + 1, 6) if sums[b] - sums[a] <= 4]
    monkeypatch.setattr(candidates_module, "_CHUNK", 1)
    assert pairs() == in_one


def test_more_candidates_than_may_be_held_are_refused() -> None:
    problem = make_problem([1] * 9, num_stages=3)
    with pytest.raises(TooManyCandidates):
        candidates_within(problem, CandidateLimit.of_load(100.0, num_stages=3), most=10)
