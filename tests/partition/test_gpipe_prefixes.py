"""Labels of GPipe prefixes: one that is nowhere larger is as good, whatever stages follow."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings

from gplan.partition.batch_simulation import steps_s
from gplan.partition.bounds import GPipePrefixes, StepBounds
from gplan.partition.problem import Problem
from tests.partition.problems import all_cuts, every_candidate, paths, problems


@settings(max_examples=150, deadline=None)
@given(problems(minimize=["step-time"], max_layers=7, schedules=["gpipe"]))
def test_a_prefix_with_no_larger_label_is_as_good_with_any_rest(problem: Problem) -> None:
    problem = replace(problem, memory_bytes=None)
    candidates = every_candidate(problem)
    every = paths(problem, candidates, all_cuts(problem))
    steps, prefixes = steps_s(problem, candidates, every), GPipePrefixes(StepBounds(problem, candidates))
    for num_stages in range(1, problem.num_stages):
        _, labels = prefixes.of_prefixes(every[:, :num_stages])
        for path, label, step_s in zip(every, labels, steps, strict=True):
            same_rest = (every[:, num_stages:] == path[num_stages:]).all(axis=1)
            as_good = same_rest & (labels <= label).all(axis=1)
            assert np.all(steps[as_good] <= step_s * (1 + 1e-9))
