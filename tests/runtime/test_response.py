"""The response of work to the yardstick's slowdown."""

from __future__ import annotations

from statistics import fmean

import numpy as np
import pytest

from gplan.runtime.run.response import Series, response_of

PRIOR = 0.8
NOISE = 0.12  # of one reading, as measured on a shared host


def measured(response: float, *, change: float, seconds: float = 120.0, seed: int = 0) -> tuple[list[Series], Series]:
    """Work of two kinds, and readings; the speed changes by this factor after some seconds each time."""
    random = np.random.default_rng(seed)
    ends_s = np.cumsum(random.uniform(2.0, 8.0, 60))

    def series(at_s: np.ndarray, *, usual_s: float, exponent: float, noise: float) -> Series:
        slowdowns = np.where(np.searchsorted(ends_s, at_s) % 2, change, 1.0)
        values = usual_s * slowdowns**exponent * random.lognormal(0.0, noise, len(at_s))
        return Series(values=values.tolist(), at_s=at_s.tolist())

    work = [
        series(np.arange(first, seconds, 1.3), usual_s=0.1 * kind, exponent=response, noise=0.05)
        for kind, first in enumerate([0.2, 0.9], start=1)
    ]
    return work, series(np.arange(0.0, seconds, 0.7), usual_s=1.0, exponent=1.0, noise=NOISE)


def every_nth(series: Series, step: int) -> Series:
    """Every so many-th value."""
    return Series(values=series.values[::step], at_s=series.at_s[::step])


@pytest.mark.parametrize("response", [0.5, 1.0, 1.5])
def test_a_host_that_changes_its_speed_shows_the_response(response: float) -> None:
    found = [
        response_of([measured(response, change=1.6, seed=2 * i + x) for x in (0, 1)], prior=PRIOR) for i in range(10)
    ]
    errors = [x - response for x in found if x is not None]
    assert len(errors) == 10
    assert abs(fmean(errors)) < 0.1
    assert max(map(abs, errors)) < 0.35


@pytest.mark.parametrize("seconds", [25.0, 120.0])
@pytest.mark.parametrize("prior", [PRIOR, 1.3])
def test_a_steady_host_leaves_the_prior(prior: float, seconds: float) -> None:
    found = [
        response_of([measured(1.0, change=1.0, seconds=seconds, seed=2 * i + x) for x in (0, 1)], prior=prior) or prior
        for i in range(20)
    ]
    assert fmean(found) == pytest.approx(prior, abs=0.12)
    assert sum(abs(x - prior) > 0.3 for x in found) <= 2


def test_values_that_tell_nothing() -> None:
    work, readings = measured(1.5, change=1.6)
    few, far_apart = measured(1.5, change=1.6, seconds=20.0)[1], every_nth(readings, 5)
    assert response_of([], prior=PRIOR) is None
    assert response_of([(work, few)], prior=PRIOR) is response_of([(work, far_apart)], prior=PRIOR) is None
    assert response_of([([every_nth(work[0], 30)], readings)], prior=PRIOR) is None
    no_time = Series(values=[0.0] * 20, at_s=list(range(20)))
    assert response_of([([no_time, *work], readings)], prior=PRIOR) == response_of([(work, readings)], prior=PRIOR)


def test_a_disturbed_reading_counts_little() -> None:
    work, readings = measured(1.5, change=1.6)
    disturbed = [50.0 * x if i % 40 == 0 else x for i, x in enumerate(readings.values)]
    found = response_of([(work, Series(values=disturbed, at_s=readings.at_s))], prior=PRIOR)
    assert found is not None and found > 1.0


def test_a_response_stays_within_its_bounds() -> None:
    assert response_of([measured(3.5, change=1.35, seed=x) for x in (0, 1)], prior=PRIOR) == 2.0
    assert response_of([measured(-1.0, change=1.6)], prior=PRIOR) == 0.25
