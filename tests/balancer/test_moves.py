"""Moving single cuts."""

from __future__ import annotations

import time

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gplan.balancer.batch import steps_s
from gplan.balancer.moves import fits_memory, polish
from gplan.balancer.price import Problem
from tests.balancer.problems import make_problem, plans, problems

NEVER = float("inf")


@settings(max_examples=200, deadline=None)
@given(problems(minimize=["step-time"]), st.data())
def test_polishing_keeps_to_the_memory_and_never_lengthens_the_step(problem: Problem, data: st.DataObject) -> None:
    every = [cuts for cuts, _ in plans(problem)]
    if every:
        ends = np.array([*data.draw(st.sampled_from(every)), problem.num_layers])
        polished = polish(problem, ends, deadline_s=NEVER)
        assert tuple(polished[:-1].tolist()) in every
        assert steps_s(problem, polished[None]).item() <= steps_s(problem, ends[None]).item() * (1 + 1e-9)


@settings(max_examples=200, deadline=None)
@given(problems())
def test_what_fits_is_what_the_priced_stages_say(problem: Problem) -> None:
    fitting = {cuts for cuts, _ in plans(problem)}
    every = np.array([[*cuts, problem.num_layers] for cuts in sorted(fitting)])
    if fitting:
        assert fits_memory(problem, every).all()


def test_two_cuts_are_moved_one_after_the_other() -> None:
    problem = make_problem([1] * 6, num_stages=3, minimize="step-time", output_bytes=[1, 1, 9, 1, 1, 1])
    assert polish(problem, np.array([1, 2, 6]), deadline_s=NEVER).tolist() == [2, 4, 6]


def test_nothing_is_moved_when_the_time_is_up() -> None:
    problem = make_problem([1] * 9, num_stages=3, minimize="step-time")
    assert polish(problem, np.array([1, 2, 9]), deadline_s=time.perf_counter()).tolist() == [1, 2, 9]


def test_steps_that_differ_by_rounding_count_as_equal() -> None:
    problem = make_problem([0.1] * 7, num_stages=3, num_microbatches=1, minimize="step-time")
    loads = np.diff([0, *polish(problem, np.array([1, 2, 7]), deadline_s=NEVER).tolist()])
    assert sorted(loads.tolist()) == [2, 2, 3]
