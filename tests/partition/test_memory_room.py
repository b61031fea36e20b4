"""What devices with several stages hold, as whole numbers of parts, against the replay of their orders."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gplan.partition.memory_feasibility import DeviceMemoryLimits
from gplan.partition.plan_evaluation import fits_memory, stages_of
from gplan.partition.problem import Problem, device_peaks, moments_of
from tests.partition.problems import EVERY, SHARED, all_cuts, every_candidate, make_problem, paths, peak_bytes, problems


@settings(max_examples=200, deadline=None)
@given(problems(schedules=EVERY), st.data())
def test_peaks_are_those_of_the_replay_to_the_byte(problem: Problem, data: st.DataObject) -> None:
    cuts = data.draw(st.sampled_from(all_cuts(problem)))
    bounds = np.array([0, *cuts, problem.num_layers])[:, None]
    peaks, stages = device_peaks(problem, bounds[:-1], bounds[1:])[:, 0].tolist(), stages_of(problem, cuts)
    assert max(peaks) == peak_bytes(problem, stages)
    assert peaks == [sum(stages[k].memory.peak_bytes for k in own) for own in problem.stages_by_device]


@settings(max_examples=150, deadline=None)
@given(problems(schedules=SHARED, max_layers=6), st.data())
def test_what_fits_is_never_ruled_out_before_it_is_whole(problem: Problem, data: st.DataObject) -> None:
    cuts = data.draw(st.sampled_from(all_cuts(problem)))
    limit = peak_bytes(problem, stages_of(problem, cuts)) - data.draw(st.integers(0, 1))
    problem = replace(problem, memory_bytes=max(1, limit))
    candidates = every_candidate(problem)
    limits, path = DeviceMemoryLimits(problem, candidates), paths(problem, candidates, [cuts])
    does_fit = peak_bytes(problem, stages_of(problem, cuts)) <= problem.memory_bytes
    layers = [0, *cuts, problem.num_layers]
    stages = [tuple(range(a, b)) for a, b in pairwise(layers)]
    assert limits.fits(path).item() == does_fit == fits_memory(problem, stages)
    parts = [limits.may_fit(path[:, : k + 1]).item() for k in range(problem.num_stages)]
    candidates_fit = [limits.fitting(k)[path[0, k]].item() for k in range(problem.num_stages)]
    assert all(parts) == does_fit  # once all stages of each device are there, it is known
    assert all(candidates_fit) or not does_fit


@pytest.mark.parametrize("schedule", SHARED[:-1])
def test_few_moments_are_left_of_many(schedule: str) -> None:
    problem = make_problem([1] * 24, num_stages=12, schedule=schedule, num_microbatches=64)
    num_actions = sum(len(order) for order in problem.made_schedule.orders) / problem.num_devices
    assert len(moments_of(problem, *problem.stages_by_device[0]).actions) < 0.4 * num_actions


def test_neighbours_on_one_device_hold_no_buffers_and_keep_nothing_that_was_sent() -> None:
    problem = make_problem([1] * 4, num_stages=4, schedule="zb-v", num_microbatches=3, output_bytes=10)
    parts = [stage.parts for stage in stages_of(problem, (1, 2, 3))]
    received = [(part.received_activation, part.received_gradient) for part in parts if part]
    assert received == [(0, 10), (10, 0), (0, 10), (10, 0)]  # of each one neighbour is on another device
    assert [part.sent for part in parts if part] == [0, 10, 0, 10]
    assert [stage.cost.activation_bytes for stage in stages_of(problem, (1, 2, 3))] == [10, 0, 10, 0]
