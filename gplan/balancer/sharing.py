"""Partitions where devices hold several stages: the smallest step, or the smallest largest load of a device.

The best cut of one stage depends on the others of its device, so no program over (stage, position) settles it. What
does is branch and bound over the cuts, from the first stage to the last, among the arcs that a plan better than the
best one known could take: prefixes are bounded by a simulation, or by the loads so far (`goals.py`), and by weights
(`weighing.py`). Exact, ties up to rounding apart; where the time is up, or the arcs are too many to be held, the proof
states the gap.

The memory of a device is that of all its stages at once. Arcs are held against what they need beside the least of the
device's other stages, prefixes against the least of those to come, partitions against the whole replay (`room.py`).
Where the first plan does not fit, one that does is looked for by the smallest largest peak, just as the least memory
that does is found: what that finds is not missed here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from gplan.balancer.arcs import Cap, loads_s, stage_times
from gplan.balancer.batch import Delay, simulate_window
from gplan.balancer.bounds import busy_within, least_step_s
from gplan.balancer.branch import Known
from gplan.balancer.goals import LoadGoal, PeakGoal, StepGoal
from gplan.balancer.held import device_peaks
from gplan.balancer.hunt import Hunt
from gplan.balancer.largest import least_load_s, smallest_largest, stages_between
from gplan.balancer.mean_peak import least_mean_peak
from gplan.balancer.price import fits_memory
from gplan.balancer.problem import Problem, Solution, device_sums, without_memory
from gplan.downsets import Ints, position_of
from gplan.errors import NoPlanError
from gplan.units import bytes_text, seconds_text

TIME_LIMIT_S = 10.0

_NUM_EVENED = 40  # plans, to begin a search for the smallest peak with
_SHARE_OF_START = 0.25  # of the time that is left, for one of several plans to begin with
_SHARE_OF_FIRST = 0.5  # of the time that is left: if the first plan took longer, it is the only one to begin with


def smallest_shared(
    problem: Problem, *, start: Solution | None = None, time_limit_s: float = TIME_LIMIT_S
) -> Solution | None:
    """The partition with the smallest step, or the smallest largest load; None where none is possible.

    It is no worse than `start`, if that is given and fits. Raises NoPlanError where in that time no plan was found that
    fits, nor that there is none.
    """
    started_s = time.perf_counter()
    given = None if start is None or not fits_memory(problem, start.stages) else _ends_of(problem, start.stages)
    deadline_s = started_s + time_limit_s
    starts = _starts(problem, given, deadline_s=deadline_s)
    if not starts:
        return None
    hunt = _hunt_for(problem)
    known = hunt.run(_best_of(hunt, starts, deadline_s), deadline_s=deadline_s)
    what = "a shorter step" if problem.minimize == "step-time" else "a smaller largest load"
    return Solution(
        stages=stages_between(problem, known.ends.tolist()),
        lower_bound_s=known.value if known.proven else known.lower_bound,
        solver="branch-and-bound",
        notes=() if known.proven else (f"the search for {what} was stopped after {seconds_text(time_limit_s)}",),
    )


def _best_of(hunt: Hunt, starts: Sequence[Ints], deadline_s: float) -> Known:
    """What is known of the best of some partitions; after moves, where there are several."""
    values = [_value_s(hunt.problem, ends) for ends in starts]
    every = [Known(ends=ends, value=x, lower_bound=min(x, hunt.least)) for ends, x in zip(starts, values, strict=True)]
    if len(every) > 1:
        every = [hunt.moved(known, deadline_s=_part_of(deadline_s)) for known in every]
    return min(every, key=lambda known: known.value)


def _part_of(deadline_s: float) -> float:
    """Until when one of several beginnings may take."""
    now_s = time.perf_counter()
    return now_s + _SHARE_OF_START * (deadline_s - now_s)


def _value_s(problem: Problem, ends: Ints) -> float:
    """What the problem minimises, of a partition."""
    pairs = [np.array([[first], [end]]) for first, end in pairwise([0, *ends.tolist()])]
    window = [stage_times(problem, stage, *pair) for stage, pair in enumerate(pairs)]
    if problem.minimize == "step-time":
        return float(simulate_window(problem, window, first_stage=0, delay=Delay()).optimizer_s[0])
    loads = [loads_s(problem, stage, pairs[stage][0], times)[0] for stage, times in enumerate(window)]
    return float(max(device_sums(problem, loads)))


def smallest_peak(problem: Problem, *, enough: float | None = None, deadline_s: float) -> Known | None:
    """The partition with the smallest largest peak of a device, in bytes; None where none is possible.

    With `enough` only whether a partition has no larger peak than that is settled: half of the time goes into the
    smallest of all, the other half into those within it alone.
    """
    free = without_memory(problem)
    start = _stages_apart(free)
    if start is None:
        return None
    hunt, known = _peak_hunt(free, enough), _known_peak(free, start)
    if enough is None:
        return hunt.run(known, deadline_s=deadline_s)
    known = hunt.run(known, deadline_s=0.5 * (time.perf_counter() + deadline_s))
    return known if hunt.is_done(known) else hunt.run(replace(known, limit=enough + 0.5), deadline_s=deadline_s)


def _peak_hunt(free: Problem, enough: float | None) -> Hunt:
    everything = Cap.of_load(float("inf"), num_stages=free.num_stages)
    return Hunt(
        problem=free,
        goal_of=PeakGoal,
        cap_of=lambda _: everything,
        least=least_mean_peak(free),
        enough=enough,
        num_evened=_NUM_EVENED,
    )


def _known_peak(free: Problem, start: Solution) -> Known:
    """The largest peak of a device, of a partition."""
    ends = _ends_of(free, start.stages)
    peaks = device_peaks(free, np.array([0, *ends[:-1]])[:, None], ends[:, None])
    return Known(ends=ends, value=float(peaks.max()), lower_bound=0.0)


def _starts(problem: Problem, given: Ints | None, *, deadline_s: float) -> list[Ints]:
    """Where the stages of partitions end, to begin with, that fit the memory; none where none is possible.

    Of the given one and that which is made without a search the better; where the latter does not fit, the given one,
    or one that is found, and that to which moves away from the latter lead.
    """
    started_s, apart = time.perf_counter(), _stages_apart(without_memory(problem))
    if apart is None:
        return []
    known = [] if given is None else [given]
    if fits_memory(problem, apart.stages):
        return [min([_ends_of(problem, apart.stages), *known], key=lambda x: _value_s(problem, x))]
    known = known or _found_to_fit(problem, deadline_s=deadline_s)
    now_s = time.perf_counter()
    if not known or now_s - started_s > _SHARE_OF_FIRST * (deadline_s - now_s):
        return known
    return [*known, *_moved_to_fit(problem, apart, deadline_s=_part_of(deadline_s))]


def _found_to_fit(problem: Problem, *, deadline_s: float) -> list[Ints]:
    """One partition that fits; none where none is possible. Raises NoPlanError where neither is known in time."""
    limit = problem.memory_of(0)
    assert limit is not None, "without a limit every partition fits"
    known = smallest_peak(problem, enough=limit, deadline_s=deadline_s)
    assert known is not None, "there is a partition"
    if known.value <= limit or known.lower_bound > limit:
        return [known.ends] if known.value <= limit else []
    raise NoPlanError(
        f"in this time no partition was found that fits {bytes_text(limit)} per device, nor that there is none; the smallest "
        f"memory that was found to do is {bytes_text(int(known.value))}; allow more time (--time-limit), or give each device "
        "more memory"
    )


def _moved_to_fit(problem: Problem, start: Solution, *, deadline_s: float) -> list[Ints]:
    """The partition to which moves lead that make the largest peak smaller, if it fits."""
    free = without_memory(problem)
    moved = _peak_hunt(free, None).moved(_known_peak(free, start), deadline_s=deadline_s)
    return [moved.ends] if moved.value <= (problem.memory_of(0) or 0) else []


def _stages_apart(problem: Problem) -> Solution | None:
    """The partition with the smallest largest stage, as if each stage had a device of its own."""
    return smallest_largest(replace(problem, schedule="gpipe", minimize="max-compute", recompute="never"))


def _ends_of(problem: Problem, stages: Sequence[Sequence[int]]) -> Ints:
    held, ends = list[int](), []
    for layers in stages:
        held.extend(layers)
        ends.append(position_of(problem.costs.downsets, held))
    return np.array(ends, dtype=np.int64)


def _hunt_for(problem: Problem) -> Hunt:
    """The search for what the problem minimises."""
    if problem.minimize == "step-time":
        return Hunt(
            problem=problem,
            goal_of=StepGoal,
            cap_of=lambda value: busy_within(problem, value),
            least=least_step_s(problem),
        )
    num_stages, least_s = problem.num_stages, least_load_s(problem)
    return Hunt(
        problem=problem,
        goal_of=LoadGoal,
        cap_of=lambda value: Cap.of_load(value, num_stages=num_stages),
        least=least_s,
    )
