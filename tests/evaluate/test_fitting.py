"""Factors from measured sums: found where much is known, near 1 where little is, never wild."""

from __future__ import annotations

import random

import pytest

from gplan.evaluate.calibration import Sample, common_factor, own_factors


def test_factors_of_pieces_that_are_mixed_differently_are_told_apart() -> None:
    mixes = [(1.0, 3.0), (3.0, 1.0), (2.0, 2.0), (4.0, 1.0)] * 4
    found = own_factors([Sample(measured_s=1.1 * a + 0.95 * b, pieces_s={"a": a, "b": b}) for a, b in mixes])
    assert found["a"] == pytest.approx(1.1, abs=0.01)
    assert found["b"] == pytest.approx(0.95, abs=0.01)


def test_pieces_that_are_always_mixed_alike_share_one_factor() -> None:
    found = own_factors([Sample(measured_s=1.2 * (x + 2 * x), pieces_s={"a": x, "b": 2 * x}) for x in (1.0, 2.0, 3.0)])
    assert found["a"] == pytest.approx(found["b"], abs=0.01) == pytest.approx(1.2, abs=0.01)


def test_one_odd_sample_of_one_name_moves_it_less_than_it_says() -> None:
    usual = [Sample(measured_s=1.0, pieces_s={"a": 1.0}) for _ in range(4)]
    found = own_factors([*usual, Sample(measured_s=1.1, pieces_s={"a": 1.0, "b": 0.05})])
    assert 1.0 < found["b"] < 1.5 < 3.0


def test_what_has_no_factor_is_taken_off_first() -> None:
    samples = [Sample(measured_s=0.5 + 2.0 * x, pieces_s={"a": x}, fixed_s=0.5) for x in (1.0, 2.0, 3.0)]
    assert common_factor(samples) == pytest.approx(2.0, rel=0.01)


def test_factors_are_always_above_nothing_and_bounded() -> None:
    chance = random.Random(0)
    for _ in range(50):
        samples = [
            Sample(measured_s=chance.expovariate(1), pieces_s={"a": chance.random(), "b": chance.random()})
            for _ in range(3)
        ]
        assert 0.25 <= common_factor(samples) <= 4.0
        assert all(0.125 <= x <= 8.0 for x in own_factors(samples).values())


def test_without_samples_or_with_none_that_took_time_nothing_changes() -> None:
    assert common_factor([]) == 1.0
    assert common_factor([Sample(measured_s=-1.0, pieces_s={"a": 1.0})]) == 1.0
    assert own_factors([]) == {}
    assert own_factors([Sample(measured_s=0.0, pieces_s={"a": 1.0})]) == {"a": 1.0}
