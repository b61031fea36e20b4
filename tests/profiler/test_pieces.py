"""What being cut off costs: it is taken off the layers so that they sum up to the one stage."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gplan.nouns import Timing
from profiler.timing.pieces import cut_s, net, pieces_of
from tests.profiler.test_rounds import Bookkeeper, bench_of, sampled


def test_what_the_layers_have_over_the_stage_is_the_cost_of_being_cut_off() -> None:
    book = Bookkeeper(
        {"stage/forward": 1.5, "stage/backward": 1.8, "checkpoint/forward": 1.4, "checkpoint/backward": 3}
    )
    bench = bench_of(("a", "b"))
    sampled(bench, book)
    sampled(bench, book)  # now that the clock knows the names
    for name in book.samples:
        book.samples[name].clean_s = book.samples[name].clean_s[-5:]
    pieces = pieces_of(bench, book)
    assert pieces.forward_cut_s == pytest.approx((2 - 1.5) / 2)
    assert pieces.backward_cut_s == pytest.approx((2 - 1.8) / 2)
    assert pieces.overhead_s == pytest.approx((0.25 + 0.1) / 2)
    assert pieces.recompute_factor == pytest.approx(((1.4 + 3) - (1.5 + 1.8)) / 1.5)


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=8), st.floats(0, 1))
def test_what_is_taken_off_sums_up_to_the_excess_where_the_layers_can_bear_it(most: list[float], share: float) -> None:
    total = share * sum(most)
    found = cut_s(most, total)
    assert sum(min(x, found) for x in most) == pytest.approx(total, abs=1e-9)


def test_no_layer_loses_more_than_half_of_its_time() -> None:
    timing = Timing(median_s=4.0, low_s=2.0, high_s=5.0, num_samples=9)
    assert net(timing, 0.5).median_s == 3.5
    assert net(timing, 3.0).median_s == 3.0
