"""Factors that explain measured sums by predicted pieces, and that few or odd samples cannot make wild.

A sum is measured, its pieces were predicted: measured = fixed + factor[a] piece[a] + factor[b] piece[b] + ... All
pieces first share one factor; then each name gets its own deviation from it. Both are least squares of the relative
error with shrinkage (ridge), as for figures that are noisy by 3 %, a common factor that is 1 to within 30 % and
deviations from it of 10 %. Factors end between a half and twice the common one, which itself ends between a quarter and
four.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

_NOISE = 0.03
_COMMON_SPREAD, _OWN_SPREAD = 0.3, 0.1
_MOST_COMMON, _MOST_OWN = 4.0, 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A measured time, the predicted pieces of it by name, and what of the prediction has no factor."""

    measured_s: float
    pieces_s: Mapping[str, float]
    fixed_s: float = 0.0


def common_factor(samples: Sequence[Sample]) -> float:
    """The one factor on all pieces; 1 without samples.

    >>> round(common_factor([Sample(measured_s=1.2, pieces_s={"a": 0.5, "b": 0.5})]), 2)
    1.2
    """
    used = [x for x in samples if x.measured_s > 0]
    pieces = np.array([sum(x.pieces_s.values()) / x.measured_s for x in used])
    wanted = np.array([1 - x.fixed_s / x.measured_s for x in used])
    prior = (_NOISE / _COMMON_SPREAD) ** 2
    factor = (pieces @ wanted + prior) / (pieces @ pieces + prior)
    return float(np.clip(factor, 1 / _MOST_COMMON, _MOST_COMMON))


def own_factors(samples: Sequence[Sample]) -> dict[str, float]:
    """The factor of every name among the pieces, near the common one where little is known of it."""
    names = sorted({name for x in samples for name in x.pieces_s})
    used = [x for x in samples if x.measured_s > 0]
    common = common_factor(used)
    pieces = np.array([[common * x.pieces_s.get(name, 0.0) / x.measured_s for name in names] for x in used])
    if not pieces.size:
        return dict.fromkeys(names, common)
    missing = np.array([1 - x.fixed_s / x.measured_s for x in used]) - pieces.sum(axis=1)
    prior = (_NOISE / _OWN_SPREAD) ** 2 * np.eye(len(names))
    own = np.clip(1 + np.linalg.solve(pieces.T @ pieces + prior, pieces.T @ missing), 1 / _MOST_OWN, _MOST_OWN)
    return {name: common * float(x) for name, x in zip(names, own, strict=True)}
