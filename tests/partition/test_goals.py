"""What is to be small: exact for partitions, from below for prefixes,
and the largest of the sums that it is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gplan.core import Stage
from gplan.partition.candidates import Candidates
from gplan.partition.goals import Goal, LoadGoal, PeakGoal, StepGoal
from gplan.partition.lagrangian import WeightUpdates, first_weighted_bounds
from gplan.partition.plan_evaluation import device_loads_s, stages_of, step_s
from gplan.partition.problem import Problem
from tests.partition.problems import EVERY, all_cuts, every_candidate, paths, peak_bytes, problems

Of = Callable[[Problem, Sequence[Stage]], float]

GOALS: tuple[tuple[Callable[[Problem, Sequence[Candidates]], Goal], Of], ...] = (
    (StepGoal, step_s),
    (LoadGoal, lambda problem, stages: max(device_loads_s(problem, stages))),
    (PeakGoal, peak_bytes),
)


@settings(max_examples=120, deadline=None)
@given(problems(max_layers=6, schedules=EVERY), st.sampled_from(GOALS), st.data())
def test_a_partition_has_the_value_that_it_is_priced_at_and_its_prefixes_no_larger_one(
    problem: Problem, pair: tuple[type[StepGoal], Of], data: st.DataObject
) -> None:
    problem = replace(problem, memory_bytes=None)
    cuts, candidates = data.draw(st.sampled_from(all_cuts(problem))), every_candidate(problem)
    goal, path = pair[0](problem, candidates), paths(problem, candidates, [cuts])
    value = pair[1](problem, stages_of(problem, cuts))
    assert goal.values(path).item() == pytest.approx(value, rel=1e-12)
    for num_stages in range(1, problem.num_stages + 1):
        least = goal.of_prefixes(path[:, :num_stages]).item()
        assert least <= value * (1 + 1e-12)
    assert least == pytest.approx(value, rel=1e-12)


@settings(max_examples=120, deadline=None)
@given(problems(max_layers=6, schedules=EVERY), st.sampled_from(GOALS), st.data())
def test_the_heaviest_sum_is_the_value_and_any_other_is_no_larger(
    problem: Problem, pair: tuple[type[StepGoal], Of], data: st.DataObject
) -> None:
    problem = replace(problem, memory_bytes=None)
    one, other = (data.draw(st.sampled_from(all_cuts(problem))) for _ in range(2))
    candidates = every_candidate(problem)
    goal = pair[0](problem, candidates)
    figures = [
        np.array([goal.figures(k)[:, i] for k, i in enumerate(paths(problem, candidates, [cuts])[0])])
        for cuts in (one, other)
    ]
    value = goal.values(paths(problem, candidates, [one])).item()
    heaviest = (goal.heaviest(figures[0]) * figures[0]).sum()
    if not problem.costs.profile.shared_weights:  # else devices may wait for each other before their updates
        assert heaviest == pytest.approx(value, rel=1e-12, abs=1e-9)
    assert heaviest <= value * (1 + 1e-12)
    for weights in (goal.heaviest(figures[1]), *goal.first_weights()):
        assert (weights * figures[0]).sum() <= value * (1 + 1e-12)


@settings(max_examples=80, deadline=None)
@given(problems(max_layers=6, schedules=EVERY), st.sampled_from(GOALS))
def test_no_partition_is_below_the_bound_of_any_weights(problem: Problem, pair: tuple[type[StepGoal], Of]) -> None:
    problem = replace(problem, memory_bytes=None)
    candidates = every_candidate(problem)
    weighted = first_weighted_bounds(pair[0](problem, candidates))
    updates = WeightUpdates.begun(weighted, weighted.best_path())
    updates.go_on(20, deadline_s=float("inf"))
    every = paths(problem, candidates, all_cuts(problem))
    values = weighted.goal.values(every)
    for bounds in (weighted, updates.weighted):
        assert bounds.whole_s <= values.min()
        for stage, through in enumerate(bounds.through_s):
            assert (through[every[:, stage]] <= values).all()
    assert weighted.whole_s <= updates.weighted.whole_s
    assert updates.middle_path().tolist() in every.tolist()


def test_play_closes_in_on_the_best_mean() -> None:
    from tests.partition.test_search import chain

    problem = chain("interleaved-1f1b:2", 40, 8)
    weighted = first_weighted_bounds(StepGoal(problem, every_candidate(problem)))
    updates = WeightUpdates.begun(weighted, weighted.best_path())
    updates.go_on(150, deadline_s=float("inf"))
    assert updates.weighted.whole_s > 1.01 * weighted.whole_s
