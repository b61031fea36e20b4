"""Arrays of candidate stages against one stage at a time."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings

from gplan.balancer.price import Problem, stage_loads_s, stages_of
from gplan.balancer.segments import Segments, all_segments, fitting, prefix_tables, suffix_tables
from tests.balancer.problems import all_cuts, make_problem, problems


@settings(max_examples=200, deadline=None)
@given(problems())
def test_loads_and_peaks_of_segments_are_those_of_priced_stages(problem: Problem) -> None:
    segments = all_segments(problem)
    for cuts in all_cuts(problem)[:5]:
        stages = stages_of(problem, cuts)
        for stage, load_s in zip(stages, stage_loads_s(problem, stages), strict=True):
            entry = stage.first_layer, stage.num_layers - 1
            assert segments.load_s[entry] == load_s
            assert segments.peak_bytes(stage.index)[entry] == stage.memory.peak_bytes


@settings(max_examples=200, deadline=None)
@given(problems())
def test_programs_from_either_end_agree(problem: Problem) -> None:
    segments = all_segments(problem)
    values = fitting(segments, segments.load_s)
    for combine in (np.maximum, np.add):
        from_end = suffix_tables(segments, values, combine)
        from_start = prefix_tables(segments, values, combine)
        assert np.isclose(from_end[0, 0, 0], from_start[-1, -1])


def test_segments_beyond_the_chain_do_not_exist() -> None:
    segments = Segments(make_problem([1, 2, 3], num_stages=2), 2)
    assert segments.load_s.tolist() == [[3, 9], [6, 15], [9, np.inf], [np.inf, np.inf]]


def test_an_exemption_may_be_used_once() -> None:
    segments = all_segments(make_problem([5, 1, 7], [0, 0, 0], num_stages=3))
    values = fitting(segments, segments.load_s)
    free = fitting(segments, np.zeros(segments.load_s.shape))
    tables = suffix_tables(segments, values, np.maximum, exempt=free)
    assert tables[0, :, 0].tolist() == [7, 5]
