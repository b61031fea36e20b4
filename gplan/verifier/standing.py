"""How the plan stands among its rivals: regret, rank correlation, and how much of it is noise.

The logarithms of the measured steps are taken as plan + round + noise: what a round has in common is the host's drift,
and the rest, pooled over all plans that have all rounds, is the noise. The mean of R rounds is then uncertain by
noise / sqrt(R). Rank correlation: Spearman's, the correlation of the ranks, ties sharing their mean rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gplan.nouns import Verification

_SURE = 2.0  # standard errors


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The plan beside the best of those measured with the same batch."""

    best: str
    regret: float  # by what share the plan's step is longer than the best one's
    predicted_lead: float  # by what share the plan's step was predicted to be longer than the best one's
    uncertainty: float | None  # of the regret, two standard errors; None: there is one round, or one plan
    rank_correlation: float | None  # None: fewer than three plans, or all alike
    num_same_batch: int  # plans that the regret is over
    median_error: float  # of the predicted steps, without sign, over all plans
    largest_error: float

    @property
    def is_within_noise(self) -> bool:
        """Whether the difference to the best is no more than chance would make."""
        return self.regret <= (math.inf if self.uncertainty is None else self.uncertainty)


def standing_of(verification: Verification) -> Standing:
    """Of the seconds a sample; the regret is over plans of one batch size, as a larger batch alone makes them fewer."""
    contenders, chosen = verification.contenders, verification.chosen
    alike = [x for x in contenders if x.plan.batch_size == chosen.plan.batch_size]
    best = min(alike, key=verification.beside)
    errors = [abs(x.error) for x in contenders]
    noise = noise_of([x.steps_s for x in contenders if len(x.steps_s) == verification.num_rounds])
    return Standing(
        best=best.label,
        regret=1.0 / verification.beside(best) - 1.0,
        predicted_lead=chosen.predicted_s / best.predicted_s - 1.0,
        uncertainty=None if noise is None else _SURE * noise * math.sqrt(2 / len(best.steps_s)),
        rank_correlation=_correlation_of(verification),
        num_same_batch=len(alike),
        median_error=float(np.median(errors)),
        largest_error=max(errors),
    )


def noise_of(steps_s: Sequence[Sequence[float]]) -> float | None:
    """The share by which a plan's step differs from round to round, the drift of all aside; `steps_s[plan][round]`.

    None where there is one plan or one round. A host that slows down for all plans alike is not noisy:

    >>> noise_of([[1.0, 2.0], [3.0, 6.0]])
    0.0
    """
    logs = np.log(np.array(steps_s))
    freedom = (logs.shape[0] - 1) * (logs.shape[1] - 1)
    if not freedom:
        return None
    rest = logs - logs.mean(axis=1, keepdims=True) - logs.mean(axis=0, keepdims=True) + logs.mean()
    return round(float(np.sqrt((rest**2).sum() / freedom)), 12)


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Spearman's; None for fewer than three values, or where one side's are all alike.

    >>> rank_correlation([1, 2, 3], [10, 30, 20]), rank_correlation([1, 2, 3], [1, 1, 1])
    (0.5, None)
    """
    ranks = [_ranks(values) for values in (one, other)]
    if len(one) < 3 or any(len(set(x)) == 1 for x in ranks):
        return None
    return round(float(np.corrcoef(np.array(ranks))[0, 1]), 12)


def _correlation_of(verification: Verification) -> float | None:
    contenders = verification.contenders
    measured = [verification.beside(x) / x.plan.batch_size for x in contenders]
    return rank_correlation([x.predicted_sample_s for x in contenders], measured)


def _ranks(values: Sequence[float]) -> list[float]:
    """From 0; values that tie share the mean of their ranks."""
    return [sum(x < y for x in values) + (sum(x == y for x in values) - 1) / 2 for y in values]
