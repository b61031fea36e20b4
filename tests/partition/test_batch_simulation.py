"""Many candidates at once against the simulator, one at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gplan.core import EngineCost, Link
from gplan.partition.batch_simulation import Delay, WindowEnds, simulate_window, steps_s, window_times
from gplan.partition.plan_evaluation import stages_of, step_s
from gplan.partition.problem import Problem
from tests.partition.problems import EVERY, all_cuts, every_candidate, in_halves, make_problem, paths, problems


@settings(max_examples=200, deadline=None)
@given(problems(schedules=EVERY))
def test_the_step_of_every_candidate_is_the_simulators(problem: Problem) -> None:
    cuts = all_cuts(problem)
    candidates = every_candidate(problem)
    found = steps_s(problem, candidates, paths(problem, candidates, cuts))
    expected = [step_s(problem, stages_of(problem, x)) for x in cuts]
    assert found.tolist() == pytest.approx(expected, rel=1e-12)  # of a plan, contention is a factor that is rounded


@pytest.mark.parametrize("schedule", [*EVERY[:-1], "interleaved-1f1b:4"])
@pytest.mark.parametrize("recompute", ["never", "except-last", "always"])
def test_costs_that_are_no_round_numbers_give_the_same_bits_too(schedule: str, recompute: str) -> None:
    times = (np.random.default_rng(7).random((2, 12)) / 3).tolist()
    num_stages = 12 if schedule in ("interleaved-1f1b:3", "interleaved-1f1b:4") else 4
    problem = make_problem(
        *times, num_stages=num_stages, num_microbatches=9, schedule=schedule, recompute=recompute, overhead_s=0.1,
        optimizer_s=1 / 3, weight_bytes=[1, 3, 7] * 4, output_bytes=3, link=Link(latency_s=0.1, bytes_per_s=7.0),
        engine=EngineCost(action_s=0.7 / 3, sending=Link(latency_s=0.1 / 3, bytes_per_s=11.0)),
    )  # fmt: skip
    problem = replace(problem, costs=replace(problem.costs, profile=in_halves(problem.costs.profile)))
    cuts = (3, 5, 9) if num_stages == 4 else tuple(range(1, 12))
    candidates = every_candidate(problem)
    found = steps_s(problem, candidates, paths(problem, candidates, [cuts]))
    assert found.item() == step_s(problem, stages_of(problem, cuts))


def window(problem: Problem, cuts: tuple[int, ...], num_stages: int, *, delay_s: float) -> WindowEnds:
    candidates = every_candidate(problem)
    times = window_times(candidates, paths(problem, candidates, [cuts])[:, :num_stages])
    return simulate_window(problem, times, first_stage=0, delay=Delay(kept_s=delay_s, recomputed_s=delay_s))


@settings(max_examples=200, deadline=None)
@given(problems(schedules=EVERY), st.data())
def test_a_window_is_never_later_than_a_pipeline_that_contains_it(problem: Problem, data: st.DataObject) -> None:
    cuts = data.draw(st.sampled_from(all_cuts(problem)))
    for num_stages in range(1, problem.num_stages + 1):
        steps = window(problem, cuts, num_stages, delay_s=0.0)
        assert steps.optimizer_s.item() <= step_s(problem, stages_of(problem, cuts)) * (
            1 + 1e-12
        )  # sums in other orders
        assert steps.back_s.item() <= steps.optimizer_s.item()


def test_stages_that_share_a_device_take_turns() -> None:
    problem = make_problem([1, 1], [1, 1], num_stages=2, num_microbatches=3, schedule="looped-bfs:2")
    assert problem.num_devices == 1
    assert window(problem, (1,), 1, delay_s=0.0).optimizer_s.item() == 6
    assert window(problem, (1,), 2, delay_s=0.0).optimizer_s.item() == 12


def test_second_halves_hold_back_no_other_stage() -> None:
    problem = make_problem([1, 1], [2, 2], num_stages=2, num_microbatches=1, schedule="zb-h1")
    problem = replace(problem, costs=replace(problem.costs, profile=in_halves(problem.costs.profile)))
    ends = window(problem, (1,), 2, delay_s=0.0)
    assert (ends.back_s.item(), ends.optimizer_s.item()) == (3, 5)  # F F I, and the whole backward of stage 0


def test_a_delay_holds_back_each_micro_batch_and_not_the_device() -> None:
    problem = make_problem([1, 1], [1, 1], num_stages=2, num_microbatches=3)
    assert window(problem, (1,), 1, delay_s=0.0).back_s.item() == 6
    assert window(problem, (1,), 1, delay_s=5.0).back_s.item() == 3 + 5 + 3
