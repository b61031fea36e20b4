"""The response of work to the yardstick's slowdown."""

from __future__ import annotations

from statistics import fmean

import numpy as np
import pytest

from gplan.runtime.run.response import Series, response_of

USUAL = 0.8
NOISE = 0.12  # of one reading, as measured on a shared host


def measured(response: float, *, change: float, seed: int = 0) -> tuple[list[Series], Series]:
    """Two minutes of work of two kinds, and readings; the speed changes by this factor after some seconds each time."""
    random = np.random.default_rng(seed)
    ends_s = np.cumsum(random.uniform(2.0, 8.0, 60))

    def series(at_s: np.ndarray, *, usual_s: float, exponent: float, noise: float) -> Series:
        slowdowns = np.where(np.searchsorted(ends_s, at_s) % 2, change, 1.0)
        values = usual_s * slowdowns**exponent * random.lognormal(0.0, noise, len(at_s))
        return Series(values.tolist(), at_s.tolist())

    work = [
        series(np.arange(first, 120.0, 1.3), usual_s=0.1 * kind, exponent=response, noise=0.05)
        for kind, first in enumerate([0.2, 0.9], start=1)
    ]
    return work, series(np.arange(0.0, 120.0, 0.7), usual_s=1.0, exponent=1.0, noise=NOISE)


@pytest.mark.parametrize("response", [0.5, 0.8, 1.5])
def test_a_host_that_changes_its_speed_shows_the_response(response: float) -> None:
    found = [
        response_of([measured(response, change=1.6, seed=2 * i + x) for x in (0, 1)], usual=USUAL) for i in range(10)
    ]
    assert fmean(found) == pytest.approx(response, abs=0.1)
    assert max(abs(x - response) for x in found) < 0.35


@pytest.mark.parametrize("usual", [USUAL, 1.3])
def test_a_steady_host_leaves_the_usual_response(usual: float) -> None:
    found = [response_of([measured(1.0, change=1.0, seed=seed)], usual=usual) for seed in range(20)]
    assert fmean(found) == pytest.approx(usual, abs=0.15)
    assert sum(abs(x - usual) > 0.3 for x in found) <= 4


def test_values_that_tell_nothing() -> None:
    work, readings = measured(1.5, change=1.6)
    few = Series(readings.values[:4], readings.at_s[:4])
    far_apart = Series(readings.values[::5], readings.at_s[::5])
    assert response_of([], usual=USUAL) == response_of([([few], readings)], usual=USUAL) == USUAL
    assert response_of([(work, few)], usual=USUAL) == response_of([(work, far_apart)], usual=USUAL) == USUAL
    no_time = Series([0.0] * 20, list(range(20)))
    assert response_of([([no_time, *work], readings)], usual=USUAL) == response_of([(work, readings)], usual=USUAL)


def test_a_disturbed_reading_counts_little() -> None:
    work, readings = measured(0.8, change=1.6)
    disturbed = Series([50.0 * x if i % 40 == 0 else x for i, x in enumerate(readings.values)], readings.at_s)
    assert response_of([(work, disturbed)], usual=USUAL) == pytest.approx(0.8, abs=0.25)


def test_a_response_stays_within_its_bounds() -> None:
    assert response_of([measured(3.5, change=1.35, seed=x) for x in (0, 1)], usual=USUAL) == 2.0
    assert response_of([measured(-1.0, change=1.6)], usual=USUAL) == 0.25
