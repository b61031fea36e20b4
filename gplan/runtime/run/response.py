"""The response of a run's work: the exponent that turns the yardstick's slowdown into that of the work.

Both vary while the host changes its speed. The response is their covariance over that of the readings with each other, at
the same lags, so that the noise of a reading is in neither. Its standard error is that of a delete-a-group jackknife, and by
it the estimate is shrunk towards the response of the profile (docs/cost-model.md, Host speed).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from gplan.core.host_speed import response_within_bounds
from gplan.core.stage_cost import Floats

_PRIOR_DEVIATION = 0.4  # of a model's response in a run from that of its profile
_LAG_EDGES_S = np.arange(0.5, 2.25, 0.25)  # of the ranges of lags
_LEAST_READINGS = 30
_LEAST_VALUES = 5  # of one kind of work
_MOST_RATIO = 3.0  # to the median, for which a value counts
_CERTAIN = 3.0  # standard errors: if the covariance of readings is as large, the estimate has a weight of 1/2
_NUM_GROUPS = 8  # of the jackknife, one after the other in time


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Values above 0, and when they were measured."""

    values: Sequence[float]
    at_s: Sequence[float]

    @property
    def logs(self) -> Floats:
        """Logarithms of the values, at most a factor of `_MOST_RATIO` from the median, less their mean."""
        logs, most = np.log(self.values), float(np.log(_MOST_RATIO))
        near = np.clip(logs - np.median(logs), -most, most)
        centred: Floats = near - near.mean()
        return centred


def response_of(processes: Iterable[tuple[Iterable[Series], Series]], *, prior: float) -> float | None:
    """The exponent by the work of each process, a series for each kind, and by the slowdowns that its yardstick read.

    `prior`: the response of the profile. None if there are too few readings, or the host was too steady to tell.
    """
    found = [x for work, readings in processes if (x := _covariance_sums(work, readings)) is not None]
    if not found:
        return None
    all_then_without_one = np.vstack([np.ones(_NUM_GROUPS), 1.0 - np.eye(_NUM_GROUPS)])
    with_work, num_work, with_readings, num_readings = np.sum(found, axis=0) @ all_then_without_one.T  # by lag
    is_known = num_work > 0
    of_work = (np.divide(with_work, num_work, where=is_known, out=np.zeros_like(with_work)) * num_readings).sum(axis=0)
    of_readings = (with_readings * is_known).sum(axis=0)
    if of_readings.min() <= 0.0:
        return None
    ratios = of_work / of_readings
    doubt = (_CERTAIN * _jackknife_error(of_readings) / of_readings[0]) ** 4
    doubt += (_jackknife_error(ratios) / _PRIOR_DEVIATION) ** 2
    return response_within_bounds(prior + (ratios[0] - prior) / (1.0 + doubt))


def _jackknife_error(estimates: Floats) -> float:
    """The standard error of the first by the others, each without one group."""
    return float(np.sqrt((_NUM_GROUPS - 1) * estimates[1:].var()))


def _covariance_sums(work: Iterable[Series], readings: Series) -> Floats | None:
    """[4, lags, groups]: sums of products of work and readings, their number, and both of readings with each other.

    Longer work counts more. None with too few values.
    """
    kinds = [x for x in work if len(x.at_s) >= _LEAST_VALUES and min(x.values) > 0.0]
    if not kinds or len(readings.at_s) < _LEAST_READINGS:
        return None
    of_work: Floats = np.sum([np.mean(x.values) * _lagged_products(x, readings) for x in kinds], axis=0)
    of_readings = _lagged_products(readings, readings)
    of_readings[0] += of_readings[1] * readings.logs.var() / len(readings.at_s)  # as the mean was subtracted
    if not of_readings[1].any():
        return None
    return np.concatenate([of_work, of_readings * (of_work[1].sum() / of_readings[1].sum())])


def _lagged_products(series: Series, readings: Series) -> Floats:
    """[2, lags, groups]: sums of the products of logarithms of values and of readings so much earlier or later; their number."""
    order = np.argsort(readings.at_s)
    read_at_s, at_s = np.asarray(readings.at_s)[order], np.asarray(series.at_s)
    sums = np.concatenate([[0.0], np.cumsum(readings.logs[order])])
    edges_s = np.concatenate([-_LAG_EDGES_S[::-1], _LAG_EDGES_S])
    ends = np.searchsorted(read_at_s, at_s + edges_s[:, None])  # by edge and value: how many readings are before
    group = np.minimum(_NUM_GROUPS - 1, (at_s - at_s.min()) / (np.ptp(at_s) or 1.0) * _NUM_GROUPS).astype(int)
    is_in_group = group[:, None] == np.arange(_NUM_GROUPS)
    of_lags = np.array([series.logs * np.diff(sums[ends], axis=0), np.diff(ends, axis=0)]) @ is_in_group
    num_lags = len(_LAG_EDGES_S) - 1
    products: Floats = of_lags[:, :num_lags][:, ::-1] + of_lags[:, -num_lags:]
    return products
