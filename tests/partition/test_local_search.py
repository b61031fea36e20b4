"""Moving one cut at a time, or two."""

from __future__ import annotations

import time
from functools import partial

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gplan.partition.batch_simulation import steps_s
from gplan.partition.candidates import CandidateLimit, candidates_within
from gplan.partition.local_search import polish
from gplan.partition.memory_feasibility import DeviceMemoryLimits
from gplan.partition.plan_evaluation import stages_of, step_s
from gplan.partition.problem import Problem
from tests.partition.problems import EVERY, Cuts, make_problem, paths, plans, problems

NEVER = float("inf")


def polished(problem: Problem, cuts: Cuts, *, deadline_s: float = NEVER) -> Cuts:
    """Where a partition is cut after its cuts were moved, among those that fit the memory."""
    candidates = candidates_within(problem, CandidateLimit.of_load(float("inf"), num_stages=problem.num_stages))
    assert candidates is not None
    path = polish(
        problem,
        candidates,
        paths(problem, candidates, [cuts])[0],
        values=partial(steps_s, problem, candidates),
        may_be=DeviceMemoryLimits(problem, candidates).fits
        if problem.has_memory_limit and problem.has_chunks
        else None,
        deadline_s=deadline_s,
    )
    return tuple(int(some.end[i]) for some, i in zip(candidates, path, strict=True))[:-1]


@settings(max_examples=200, deadline=None)
@given(problems(minimize=["step-time"], schedules=EVERY), st.data())
def test_polishing_keeps_to_the_memory_and_never_lengthens_the_step(problem: Problem, data: st.DataObject) -> None:
    every = [cuts for cuts, _ in plans(problem)]
    if every:
        cuts = data.draw(st.sampled_from(every))
        found = polished(problem, cuts)
        assert found in every
        before_s, after_s = (step_s(problem, stages_of(problem, x)) for x in (cuts, found))
        assert after_s <= before_s * (1 + 1e-9)


def test_two_cuts_are_moved_one_after_the_other() -> None:
    problem = make_problem([1] * 6, num_stages=3, minimize="step-time", output_bytes=[1, 1, 9, 1, 1, 1])
    assert polished(problem, (1, 2)) == (2, 4)


def test_nothing_is_moved_when_the_time_is_up() -> None:
    problem = make_problem([1] * 9, num_stages=3, minimize="step-time")
    assert polished(problem, (1, 2), deadline_s=time.perf_counter()) == (1, 2)


def test_steps_that_differ_by_rounding_count_as_equal() -> None:
    problem = make_problem([0.1] * 7, num_stages=3, num_microbatches=1, minimize="step-time")
    loads = np.diff([0, *polished(problem, (1, 2)), 7])
    assert sorted(loads.tolist()) == [2, 2, 3]
