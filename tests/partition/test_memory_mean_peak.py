"""What devices with several stages hold at least, against every partition."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from gplan.partition import shared_device_search
from gplan.partition.memory_feasibility import least_mean_peak
from gplan.partition.plan_evaluation import fits_memory, stages_of
from gplan.partition.problem import Problem
from gplan.partition.shared_device_search import smallest_shared
from gplan.partition.solve import with_down_sets
from tests.partition.graphs import every_partition, graph_problems
from tests.partition.problems import EVERY, SHARED, all_cuts, make_problem, peak_bytes, problems


@settings(max_examples=80, deadline=None)
@given(problems(schedules=EVERY))
def test_no_partition_has_a_smaller_largest_peak(problem: Problem) -> None:
    least = least_mean_peak(problem)
    assert least <= min(peak_bytes(problem, stages_of(problem, cuts)) for cuts in all_cuts(problem))


@settings(max_examples=40, deadline=None)
@given(graph_problems(schedules=SHARED, minimize=["step-time"]))
def test_nor_has_any_of_a_graph(problem: Problem) -> None:
    problem = with_down_sets(problem)
    too_small = replace(problem, memory_bytes=int(least_mean_peak(problem)) - 1)
    assert not any(fits_memory(too_small, stages) for stages in every_partition(problem))


@pytest.mark.parametrize(("schedule", "share"), [("looped-bfs:2", 0.99), ("interleaved-1f1b:2", 0.3), ("zb-v", 0.45)])
def test_it_is_close_where_all_stages_keep_as_many_micro_batches(schedule: str, share: float) -> None:
    problem = make_problem([1] * 24, num_stages=8, schedule=schedule, num_microbatches=8, stash_bytes=1000)
    even = peak_bytes(problem, stages_of(problem, range(3, 24, 3)))
    assert share * even < least_mean_peak(problem) <= even


def test_nothing_is_searched_where_the_devices_cannot_hold_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem([1] * 24, num_stages=8, schedule="looped-bfs:2", stash_bytes=1000, memory_bytes=20_000)
    monkeypatch.setattr(shared_device_search, "candidates_within", lambda *_, **__: pytest.fail("candidates were made"))
    assert smallest_shared(problem) is None
