"""Schedules: pure functions from (K, M) to the ordered actions of every device.

A schedule is defined once, here; the simulator, the memory model, the planner, the charts and the engine read it.
"""

from __future__ import annotations

from collections.abc import Callable

from gplan.errors import UsageError
from gplan.nouns import Schedule
from gplan.schedules.gpipe import gpipe
from gplan.schedules.one_f_one_b import one_f_one_b

SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {"gpipe": gpipe, "1f1b": one_f_one_b}


def make_schedule(name: str, *, num_stages: int, num_microbatches: int) -> Schedule:
    """The schedule of that name for K stages and M micro-batches; raises UsageError for a name that is not known."""
    if name not in SCHEDULES:
        raise UsageError(f"schedule {name!r} is not known; expected one of {', '.join(SCHEDULES)}")
    if num_stages < 1 or num_microbatches < 1:
        raise UsageError(f"got {num_stages} stages and {num_microbatches} micro-batches; expected at least 1 of each")
    return SCHEDULES[name](num_stages, num_microbatches)


__all__ = ["SCHEDULES", "gpipe", "make_schedule", "one_f_one_b"]
