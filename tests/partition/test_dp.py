"""The programs over paths of candidates."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings

from gplan.partition.candidates import prefix_tables, suffix_tables
from gplan.partition.problem import Problem
from tests.partition.problems import every_candidate, make_problem, problems


@settings(max_examples=200, deadline=None)
@given(problems())
def test_programs_from_either_end_agree(problem: Problem) -> None:
    candidates = every_candidate(problem)
    loads = [some.load_s for some in candidates]
    for combine in (np.maximum, np.add):
        from_end = suffix_tables(candidates, loads, combine, num_positions=problem.num_layers + 1)
        from_start = prefix_tables(candidates, loads, combine, num_positions=problem.num_layers + 1)
        assert np.isclose(from_end[0, 0, 0], from_start[-1, -1])


def test_an_exemption_may_be_used_once() -> None:
    candidates = every_candidate(make_problem([5, 1, 7], [0, 0, 0], num_stages=3))
    loads, free = [some.load_s for some in candidates], [np.zeros(len(some)) for some in candidates]
    tables = suffix_tables(candidates, loads, np.maximum, num_positions=4, exempt=free)
    assert tables[0, :, 0].tolist() == [7, 5]
