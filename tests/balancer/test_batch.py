"""Many candidates at once against the simulator, one at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gplan.balancer.batch import Delay, Ends, simulate_window, steps_s, window_times
from gplan.balancer.price import stages_of, step_s
from gplan.balancer.problem import Problem
from tests.balancer.problems import all_cuts, every_arc, make_problem, paths, problems


@settings(max_examples=300, deadline=None)
@given(problems())
def test_the_step_of_every_candidate_is_the_simulators_to_the_last_bit(problem: Problem) -> None:
    cuts = all_cuts(problem)
    arcs = every_arc(problem)
    found = steps_s(problem, arcs, paths(problem, arcs, cuts))
    assert found.tolist() == [step_s(problem, stages_of(problem, x)) for x in cuts]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("recompute", ["never", "except-last", "always"])
def test_costs_that_are_no_round_numbers_give_the_same_bits_too(schedule: str, recompute: str) -> None:
    times = (np.random.default_rng(7).random((2, 12)) / 3).tolist()
    problem = make_problem(
        *times,
        num_stages=4,
        num_microbatches=9,
        schedule=schedule,
        recompute=recompute,
        overhead_s=0.1,
        optimizer_s=1 / 3,
    )
    arcs = every_arc(problem)
    found = steps_s(problem, arcs, paths(problem, arcs, [(3, 5, 9)]))
    assert found.item() == step_s(problem, stages_of(problem, (3, 5, 9)))


def window(problem: Problem, cuts: tuple[int, ...], num_stages: int, *, delay_s: float) -> Ends:
    arcs = every_arc(problem)
    times = window_times(arcs, paths(problem, arcs, [cuts])[:, :num_stages])
    return simulate_window(problem, times, first_stage=0, delay=Delay(kept_s=delay_s, recomputed_s=delay_s))


@settings(max_examples=200, deadline=None)
@given(problems(), st.data())
def test_a_window_is_never_later_than_a_pipeline_that_contains_it(problem: Problem, data: st.DataObject) -> None:
    cuts = data.draw(st.sampled_from(all_cuts(problem)))
    for num_stages in range(1, problem.num_stages + 1):
        steps = window(problem, cuts, num_stages, delay_s=0.0)
        assert steps.optimizer_s.item() <= step_s(problem, stages_of(problem, cuts))


def test_a_delay_holds_back_each_micro_batch_and_not_the_device() -> None:
    problem = make_problem([1, 1], [1, 1], num_stages=2, num_microbatches=3)
    assert window(problem, (1,), 1, delay_s=0.0).back_s.item() == 6
    assert window(problem, (1,), 1, delay_s=5.0).back_s.item() == 3 + 5 + 3
