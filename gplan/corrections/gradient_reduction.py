"""Gradient reduction: backwards of a computed profile take longer where replicas reduce gradients beside them.

One factor for all backwards. GEMMs beside an all-reduce were measured to take 1.13 to 1.18 times as long (Echo, on A800).
Recomputed forwards are left as they are.
"""

from __future__ import annotations

from dataclasses import replace
from math import isfinite

from gplan.core import Profile
from gplan.core.errors import UsageError


def beside_reduction(profile: Profile, factor: float) -> Profile:
    """The profile with every backward, whole or in halves, `factor` times as long; raises UsageError below 1."""
    if not (isfinite(factor) and factor >= 1):
        raise UsageError(f"the slow-down of backwards is {factor:g}; expected a factor of at least 1, such as 1.15")
    return replace(
        profile.with_costs(lambda cost: cost.corrected(forward=1.0, backward=factor, recompute=1.0)),
        plan_notes=(
            *profile.plan_notes,
            f"backwards take {factor:g} times as long, as gradients are reduced beside them",
        ),
    )
