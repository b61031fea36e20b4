"""The response of a run's work to the yardstick's slowdown: an exponent, see docs/cost-model.md, Host speed.

Other work on a host slows the yardstick by another factor than the layers. How much so depends on both: on one host, at the
same time, convolutions were slowed by the power of 1.5 and linear layers by that of 0.9.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from gplan.core.host_speed import LEAST_RESPONSE, MOST_RESPONSE

Floats: TypeAlias = NDArray[np.float64]

_SPREAD = 0.4  # of the responses of models: the standard deviation
_APART_S = np.arange(0.5, 2.25, 0.25)  # ends of the ranges of time between two values that are compared
_LEAST_VALUES = 5
_MOST_RATIO = 3.0  # to the median, for which a value counts
_CERTAIN = 2.0  # standard errors: a covariance of readings as large as these tells half
_NUM_PARTS = 8  # of the time, each left out once for the standard errors


@dataclass(frozen=True, slots=True)
class Series:
    """Values above 0, and when they were measured."""

    values: Sequence[float]
    at_s: Sequence[float]

    @property
    def logs(self) -> Floats:
        """Logarithms, less their mean; far from the median they count as `_MOST_RATIO`."""
        logs, most = np.log(self.values), float(np.log(_MOST_RATIO))
        near = np.clip(logs - np.median(logs), -most, most)
        centred: Floats = near - near.mean()
        return centred


def response_of(processes: Iterable[tuple[Iterable[Series], Series]], *, usual: float) -> float:
    """The response by work of several kinds in each process and the slowdowns that its yardstick read meanwhile.

    How much slower than usual the work was is compared with the readings 0.5 to 2 s apart, and so are the readings with
    each other: the noise of a reading is in neither covariance. Their ratio is the response. As far as it is uncertain, it is
    `usual`, which holds within 0.4. Standard errors are found by leaving out one part of the time after the other.
    """
    found = [x for work, readings in processes if (x := _products(work, readings)) is not None]
    if not found:
        return usual
    kept = np.vstack([np.ones(_NUM_PARTS), 1.0 - np.eye(_NUM_PARTS)])  # all parts of the time, then all but one
    with_work, num_work, with_readings, num_readings = np.sum(found, axis=0) @ kept.T  # by range, then as kept
    is_known = num_work > 0
    of_work = (np.divide(with_work, num_work, where=is_known, out=np.zeros_like(with_work)) * num_readings).sum(axis=0)
    of_readings = (with_readings * is_known).sum(axis=0)
    if of_readings.min() <= 0.0:  # the host was too steady
        return usual
    ratios = of_work / of_readings
    doubt = (_CERTAIN * _error(of_readings) / of_readings[0]) ** 2 + (_error(ratios) / _SPREAD) ** 2
    return float(min(MOST_RESPONSE, max(LEAST_RESPONSE, usual + (ratios[0] - usual) / (1.0 + doubt))))


def _error(values: Floats) -> float:
    """The standard error of the first, which is of the whole time, by the others, each without one part of it."""
    return float(np.sqrt((_NUM_PARTS - 1) * values[1:].var()))


def _products(work: Iterable[Series], readings: Series) -> Floats | None:
    """[4, ranges, parts of the time]: products of work and readings, their number, and both of readings with each other.

    Longer work counts more. None with too few values.
    """
    kinds = [x for x in work if len(x.at_s) >= _LEAST_VALUES and min(x.values) > 0.0]
    if not kinds or len(readings.at_s) < _LEAST_VALUES:
        return None
    of_work: Floats = np.sum([np.mean(x.values) * _summed(x, readings) for x in kinds], axis=0)
    of_readings = _summed(readings, readings)
    of_readings[0] += of_readings[1] * readings.logs.var() / len(readings.at_s)  # as the mean was subtracted
    if not of_readings[1].any():
        return None
    return np.concatenate([of_work, of_readings * (of_work[1].sum() / of_readings[1].sum())])


def _summed(series: Series, readings: Series) -> Floats:
    """[2, ranges, parts of the time]: the products of logarithms of values and of readings so far apart; their number."""
    order = np.argsort(readings.at_s)
    read_at_s, at_s = np.asarray(readings.at_s)[order], np.asarray(series.at_s)
    sums = np.concatenate([[0.0], np.cumsum(readings.logs[order])])
    edges_s = np.concatenate([-_APART_S[::-1], _APART_S])
    ends = np.searchsorted(read_at_s, at_s + edges_s[:, None])  # by edge and value: how many readings are before
    part = np.minimum(_NUM_PARTS - 1, (at_s - at_s.min()) / (np.ptp(at_s) or 1.0) * _NUM_PARTS).astype(int)
    is_in_part = part[:, None] == np.arange(_NUM_PARTS)
    of_ranges = np.array([series.logs * np.diff(sums[ends], axis=0), np.diff(ends, axis=0)]) @ is_in_part
    num_ranges = len(_APART_S) - 1
    products: Floats = of_ranges[:, :num_ranges][:, ::-1] + of_ranges[:, -num_ranges:]  # earlier readings, later ones
    return products
