"""What being cut off costs: it is taken off the layers so that they sum up to the one stage."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gplan.core import Timing
from profiler.timing.rounds import corrections_of, even_cut_s, net
from tests.profiler.test_rounds import Bookkeeper, bench_of, sampled


def test_what_the_layers_have_over_the_stage_is_the_cost_of_being_cut_off() -> None:
    book = Bookkeeper(
        {"stage/forward": 1.5, "stage/backward": 1.8, "recomputed/forward": 1.4, "recomputed/backward": 3}
    )
    bench = bench_of(("a", "b"))
    sampled(bench, book)
    sampled(bench, book)  # now that the clock knows the names
    for name in book.samples:
        book.samples[name].clean_s = book.samples[name].clean_s[-5:]
    corrections = corrections_of(bench, book)
    assert corrections.forward_cut_s == pytest.approx((2 - 1.5) / 2)
    assert corrections.backward_cut_s == pytest.approx((2 - 1.8) / 2)
    assert corrections.overhead_s == pytest.approx((0.25 + 0.1) / 2)
    assert corrections.recompute_factor == pytest.approx(((1.4 + 3) - (1.5 + 1.8)) / 1.5)


def test_layers_take_longer_by_as_much_as_the_median_of_their_sums_is_above_the_sum_of_their_medians() -> None:
    book, bench = Bookkeeper(), bench_of(("a", "b", "c"))
    sampled(bench, book)
    slow = ([2.0, 1.0, 1.0, 8.0, 1.0], [1.0, 2.0, 1.0, 8.0, 1.0], [1.0, 1.0, 2.0, 8.0, 1.0])  # and once all at a time
    for name, seconds in zip("abc", slow, strict=True):
        book.samples[f"{name}/forward"].clean_s = seconds
    book.samples["together/forward"].clean_s = [sum(x) for x in zip(*slow, strict=True)]
    corrections = corrections_of(bench, book)
    assert corrections.forward_tail == pytest.approx(4 / 3)
    assert corrections.backward_tail == pytest.approx(1.0)


def test_what_layers_took_together_is_noted_for_rounds_in_which_nothing_was_refused() -> None:
    book, bench = Bookkeeper({"a/forward": 2.0, "b/forward": 3.0}), bench_of(("a", "b"))
    sampled(bench, book)
    sampled(bench, book)  # now that the clock knows the names
    assert book.samples["together/forward"].clean_s[-1] == pytest.approx(5.0)


def test_the_second_halves_of_layers_add_up_to_that_of_the_one_stage() -> None:
    names = ("b/input gradient", "c/input gradient", "b/weight gradient", "c/weight gradient", "a/weight gradient")
    book = Bookkeeper(
        {
            **dict.fromkeys(names, 1.0),
            "a/weight gradient": 7.0,
            "stage/input gradient": 1.6,
            "stage/weight gradient": 3.0,
        }
    )
    bench = bench_of(("a", "b", "c"))
    sampled(bench, book)
    sampled(bench, book)
    for name in book.samples:
        book.samples[name].clean_s = book.samples[name].clean_s[-5:]
    corrections = corrections_of(bench, book)
    assert corrections.input_gradient_cut_s == pytest.approx((2 - 1.6) / 2)
    assert corrections.weight_gradient_factor == pytest.approx(3.0 / 2)  # without a, which has no first half


def test_without_the_halves_in_one_piece_those_of_the_layers_stand() -> None:
    book = Bookkeeper()
    sampled(bench_of(("a",)), book, splits_backward=False)
    corrections = corrections_of(bench_of(("a",)), book)
    assert (corrections.input_gradient_cut_s, corrections.weight_gradient_factor) == (0.0, 1.0)


def test_a_difference_that_noise_could_have_made_is_taken_off_no_layer() -> None:
    book, bench = Bookkeeper(), bench_of(("a", "b"))
    sampled(bench, book)
    book.samples["excess/backward"].clean_s = [0.3, -0.2, 0.1, -0.3, 0.2]
    assert corrections_of(bench, book).backward_cut_s == 0.0
    book.samples["excess/backward"].clean_s = [0.3, 0.28, 0.32, 0.31, 0.29]
    assert corrections_of(bench, book).backward_cut_s == pytest.approx(0.3 / 2, rel=0.05)


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=8), st.floats(0, 1))
def test_what_is_taken_off_sums_up_to_the_excess_where_the_layers_can_bear_it(most: list[float], share: float) -> None:
    total = share * sum(most)
    found = even_cut_s(most, total)
    assert sum(min(x, found) for x in most) == pytest.approx(total, abs=1e-9)


def test_no_layer_loses_more_than_half_of_its_time() -> None:
    timing = Timing(median_s=4.0, low_s=2.0, high_s=5.0, num_samples=9)
    assert net(timing, 0.5).median_s == 3.5
    assert net(timing, 3.0).median_s == 3.0
