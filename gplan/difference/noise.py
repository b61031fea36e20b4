"""Whether a time has changed: old and new differ by more than

    1.96 sqrt(e_old^2 + e_new^2) + 5 % of the larger + half of the larger overhead_s

The first part is the 95 % band of a difference of two medians: e = 1.25 sigma / sqrt(n) is the standard error of a
median of n normal samples, sigma = (distance of the quartiles) / 1.35. It holds within one profile. From one profile to
the next the clock rate, the place in memory and other work on the host change for all samples at once: medians of an
unchanged model move by several percent while the quartiles of each stay within one or two, and no number of samples
shows it. Hence the second part. What a layer costs for being cut off is a mean over all layers that was taken off each
of them, differs from profile to profile, and decides for layers of a few microseconds. Hence the third part.

The parts are added, not squared, as drift moves all layers together. Of twenty layers that did not change one may still
be called slower or faster, and of a drift beyond 5 % all of them. Computed and given times have no noise, except
against measured ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from gplan.difference.changes import TimeChange, Verdict
from gplan.nouns import Profile, Timing

_Z = 1.96
_MEDIAN_ERROR = 1.25 / 1.35  # standard error of a median, in distances of the quartiles over sqrt(n)
_DRIFT = 0.05
_OVERHEAD_SHARE = 0.5
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A time and the standard error of it."""

    seconds: float
    error_s: float = 0.0
    is_measured: bool = False

    def times(self, count: int) -> Estimate:
        """`count` layers that were measured as one: their errors are one error."""
        return Estimate(seconds=count * self.seconds, error_s=count * self.error_s, is_measured=self.is_measured)


def estimate(timing: Timing) -> Estimate:
    """A timing's median; one without a count of its samples is taken as one sample.

    >>> round(estimate(Timing(median_s=10.0, low_s=9.0, high_s=11.7, num_samples=25)).error_s, 6)
    0.5
    """
    error_s = _MEDIAN_ERROR * (timing.high_s - timing.low_s) / math.sqrt(max(1, timing.num_samples))
    return Estimate(seconds=timing.median_s, error_s=error_s, is_measured=timing.origin == "measured")


def total(parts: Iterable[Estimate], *, fixed_s: float = 0.0) -> Estimate:
    """The sum of estimates that are independent of each other, and of a time that is known."""
    found = list(parts)
    return Estimate(
        seconds=fixed_s + sum(x.seconds for x in found),
        error_s=math.hypot(*(x.error_s for x in found)),
        is_measured=any(x.is_measured for x in found),
    )


def cut_off_noise_s(old: Profile, new: Profile) -> float:
    """What the cost of being cut off leaves unknown of a layer's time."""
    return _OVERHEAD_SHARE * max(old.overhead_s, new.overhead_s)


def judged(quantity: str, old: Estimate, new: Estimate, *, cut_off_s: float = 0.0) -> TimeChange:
    """Old and new with the noise between them; `cut_off_s` as from `cut_off_noise_s`, 0 for what was never cut off."""
    larger_s = max(old.seconds, new.seconds)
    noise_s = _ROUNDING * larger_s
    if old.is_measured or new.is_measured:
        noise_s = _Z * math.hypot(old.error_s, new.error_s) + _DRIFT * larger_s + cut_off_s
    change_s = new.seconds - old.seconds
    moved: Verdict = "slower" if change_s > 0 else "faster"
    verdict: Verdict = moved if abs(change_s) > noise_s else "same"
    return TimeChange(quantity=quantity, old_s=old.seconds, new_s=new.seconds, noise_s=noise_s, verdict=verdict)
