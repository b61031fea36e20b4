"""Less memory for a longer step: the plans that no other one beats in both.

The search is repeated within ever less memory until nothing fits or the time is up; all that was found on the way
counts. Each point is the best that was found for its memory, the first one the plan itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from gplan.core import Plan
from gplan.strategy_search.best_first import best_within
from gplan.strategy_search.cache import Engine

NUM_POINTS = 8
_LESS = 0.8  # of the memory of one point, to begin the search for the next
_NEXT_S = 0.5  # at least, for a point
_WORTH_SHOWING = 0.01  # share of the memory by which a point must need less than the one before


def explore(engine: Engine, plan: Plan, *, deadline_s: float, share: tuple[float, float]) -> bool:
    """Search within ever less memory than the plan needs; whether nothing interrupted it."""
    peak_bytes = plan.peak_bytes
    low, high = share
    for index in range(1, NUM_POINTS):
        now_s = time.perf_counter()
        if deadline_s - now_s < _NEXT_S:
            return True
        part = (high - low) / (NUM_POINTS - 1)
        until_s = now_s + (deadline_s - now_s) / (NUM_POINTS - index)
        here = (low + (index - 1) * part, low + index * part)
        try:
            found = best_within(engine, int(_LESS * peak_bytes), deadline_s=until_s, share=here)
        except KeyboardInterrupt:
            return False
        if found.is_interrupted or found.plan is None:
            return not found.is_interrupted
        peak_bytes = found.plan.peak_bytes
    return True


def frontier_of(plan: Plan, plans: Sequence[Plan]) -> tuple[Plan, ...]:
    """The plan and those that need clearly less memory than all that are faster: rising step, falling peak."""
    return tuple(_falling(plan, sorted(plans, key=lambda x: (x.prediction.step_s, x.peak_bytes))))


def _falling(plan: Plan, rising: Sequence[Plan]) -> Iterator[Plan]:
    last = plan
    yield plan
    for other in rising:
        if (
            other.peak_bytes <= (1 - _WORTH_SHOWING) * last.peak_bytes
            and other.prediction.step_s > last.prediction.step_s
        ):
            yield other
            last = other
