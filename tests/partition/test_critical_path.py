"""Paths through a long step that are made from those of a short one are paths of the long step, and nearly the longest."""

from __future__ import annotations

import numpy as np
import pytest

from gplan.core import Action, ActionKind
from gplan.partition.critical_path import TIMES, Paths, RepeatedPaths
from gplan.partition.problem import Problem
from gplan.schedules.registry import make_schedule, num_stages_of
from tests.partition.problems import make_problem

SCHEDULES = [("1f1b", 1), ("1f1b", 2), ("1f1b", 5), ("interleaved-1f1b:2", 2), ("interleaved-1f1b:3", 4)]


def problem_of(schedule: str, num_devices: int, num_microbatches: int) -> Problem:
    num_stages = num_stages_of(schedule, num_devices)
    return make_problem([1.0] * num_stages, num_stages=num_stages, num_microbatches=num_microbatches, schedule=schedule)


@pytest.mark.parametrize(("schedule", "num_devices"), SCHEDULES)
def test_more_microbatches_only_lengthen_the_middle_of_an_order(schedule: str, num_devices: int) -> None:
    few, more = 4 * num_devices, 7 * num_devices
    orders = [make_schedule(schedule, num_devices=num_devices, num_microbatches=x).orders for x in (few, more)]
    for short, long in zip(*orders, strict=True):
        later = [Action(x.stage, x.kind, x.microbatch + more - few) for x in short]
        first = next(i for i, x in enumerate(short) if x.kind is not ActionKind.FORWARD)
        end = max(i for i, x in enumerate(short) if x.kind is ActionKind.FORWARD) + 1
        assert long[:end] == short[:end] and first < end
        assert long[len(long) - len(short) + first :] == tuple(later[first:])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("schedule", "num_devices"), SCHEDULES)
def test_a_path_made_longer_is_no_longer_than_the_longest(schedule: str, num_devices: int, seed: int) -> None:
    few, more = 4 * num_devices, 9 * num_devices
    short, long = (problem_of(schedule, num_devices, x) for x in (few, more))
    paths, exact = RepeatedPaths(short, more - few), Paths(long)
    times = np.random.default_rng(seed).uniform(0.5, 1.0, (short.num_stages, len(TIMES)))
    sent = [TIMES.index("activation_s"), TIMES.index("gradient_s")]
    times[:, sent] *= 0.01
    times[-1, sent] = 0.0
    longest_s = float((exact.longest(times) * times).sum())
    for counts in (paths.longest(times), *paths.by_device(), *paths.by_device_and_back()):
        assert 0 < float((counts * times).sum()) <= longest_s * (1 + 1e-9)
    assert float((paths.longest(times) * times).sum()) >= longest_s * 0.97
    np.testing.assert_allclose(paths.by_device(), exact.by_device())
    np.testing.assert_allclose(paths.by_device_and_back(), exact.by_device_and_back())
