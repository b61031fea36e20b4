"""Search for a way to run a model: devices, replicas, micro-batches, schedule and recompute, for one batch and memory.

Every strategy of `space.py` has a closed-form bound; the promising ones are solved by the balancer (`best_first.py`), and
the bound of the resulting plan covers all strategies, also those left out when the time was up. The Pareto frontier of
step and memory comes from repeating the search with less and less memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product

from gplan.core import Constraints, Plan, Profile
from gplan.core.errors import NoPlanError, UsageError
from gplan.core.progress import Progress, no_progress
from gplan.core.units import bytes_text, counted, memory_size_text, seconds_text
from gplan.graph.down_sets import DownSets, Prefixes
from gplan.partition.balance import alternative_of
from gplan.partition.candidates import TooManyCandidates
from gplan.partition.constraints import check_constraints
from gplan.partition.diagnosis import (
    conflicting_constraints,
    no_plan_error,
    one_device_notes,
    stages_that_fit_text,
    tightest_device,
)
from gplan.partition.problem import ROUNDING, Problem
from gplan.partition.solve import TooManyDownSets, where_to_cut
from gplan.partition.validation import check_limits, why_not_selected
from gplan.schedules.registry import num_stages_of, schedule_info
from gplan.schedules.request import PlanRequest
from gplan.strategy_search.best_first import Found, best_plan_within
from gplan.strategy_search.cache import SolveCache
from gplan.strategy_search.space import Space, base_schedule, search_space

TIME_LIMIT_S = 18.0
_SHARE_OF_BEST = 0.6  # of the time, for the best plan; the rest is for the frontier
_SHARE_OF_PROOF = 0.9  # the same while the gap is large
_NUM_TRIED = 24  # strategies whose smallest memory is computed where nothing fits
_CLOSEST_S = 4.0  # for that
_NUM_POINTS = 8  # of the frontier
_LESS_MEMORY = 0.8  # the memory limit for the next point, as a share of the last point's peak
_LEAST_POINT_S = 0.5  # for a point
_POINTS_AT_LEAST = 3  # that the time left is for
_MIN_SAVING = 0.01  # share of the memory that a point of the frontier must save


def search(profile: Profile, request: PlanRequest, *, progress: Progress = no_progress) -> Plan:
    """The plan with the shortest step for a batch, with plans that need less memory in `Plan.frontier`.

    `total_devices` limits the devices of all replicas together; without it, devices on "auto" maximise samples per second
    and device. By default the batch is that of the plan made without a search, and the memory that of the profile's
    device. Micro-batches have profiled sizes where the batch can be cut so. An interrupt or the time limit ends the search
    with the best plan so far and a note; `Plan.proof` covers all strategies.

    Raises UsageError for an impossible request, NoPlanError where nothing fits or nothing was found in time.
    """
    started_s = time.perf_counter()
    memory_bytes, constraints = request.memory_bytes, request.constraints
    time_limit_s = TIME_LIMIT_S if request.time_limit_s is None else request.time_limit_s
    check_limits(memory_bytes=memory_bytes, time_limit_s=time_limit_s)
    _check_constraints(constraints, profile, request)
    space = _with_pins(search_space(profile, request), constraints)
    memory_bytes = profile.device.memory_bytes if memory_bytes is None else memory_bytes
    downsets, notes = _down_sets(profile, constraints)
    cache = SolveCache(profile=profile, space=space, constraints=constraints, downsets=downsets, progress=progress)
    until_s, latest_s = (started_s + share * time_limit_s for share in (_SHARE_OF_BEST, _SHARE_OF_PROOF))
    found = best_plan_within(cache, memory_bytes, deadline_s=until_s, latest_s=latest_s, share=(0.0, _SHARE_OF_BEST))
    if found.plan is None:
        raise _no_plan_error(cache, memory_bytes, found, time_limit_s)
    is_whole = not found.is_interrupted and _explore(
        cache, found.plan, deadline_s=started_s + time_limit_s, share=(_SHARE_OF_BEST, 1.0)
    )
    found = _with_best(cache, found, memory_bytes)
    notes = (*space.notes, *notes, *_notes(cache, found, memory_bytes, request, is_whole=is_whole))
    return _final_plan(cache, found, memory_bytes, notes, solve_s=time.perf_counter() - started_s)


def _with_best(cache: SolveCache, found: Found, memory_bytes: int | None) -> Found:
    """With the best plan that fits, even if it was found during the search with less memory."""
    best = cache.best_fitting(memory_bytes)
    is_better = cache.cost(best) < cache.cost(found.plan) * (1 - ROUNDING)
    return replace(found, plan=best) if is_better else found


def _check_constraints(constraints: Constraints, profile: Profile, request: PlanRequest) -> None:
    if constraints.pins and request.num_devices == "auto":
        pin = constraints.pins[0]
        raise UsageError(
            f"--pin {pin.layer}={pin.stage} names a stage, but the number of stages is to be found; give --k a number"
        )
    num_stages = len(profile.layers)
    if isinstance(request.num_devices, int):
        num_stages = num_stages_of(base_schedule(request), request.num_devices)
    check_constraints(constraints, profile, num_stages=num_stages)


def _with_pins(space: Space, constraints: Constraints) -> Space:
    """With pins only schedules with one stage per device: elsewhere a stage's number is another part of the model."""
    kept = tuple(x for x in space.strategies if x.num_stages == x.num_devices)
    if not constraints.pins or not kept or len(kept) == len(space.strategies):
        return space
    note = "--pin names stages, so schedules with several stages a device were left out"
    return replace(space, strategies=kept, notes=(*space.notes, note))


def _down_sets(profile: Profile, constraints: Constraints) -> tuple[DownSets | None, tuple[str, ...]]:
    try:
        return where_to_cut(profile, in_order=constraints.profile_order), ()
    except TooManyDownSets:
        note = "with this many branches the search keeps the layers in the profile's order; others may be better"
        return Prefixes(len(profile.layers)), (note,)


def _no_plan_error(cache: SolveCache, memory_bytes: int | None, found: Found, time_limit_s: float) -> Exception:
    if found.num_left:
        return NoPlanError(
            f"no plan was found in {seconds_text(time_limit_s)}; {_open_text(cache, found)}; "
            "allow more time (--time-limit), or leave less open"
        )
    strategies, modes = cache.space.strategies, cache.space.recompute
    only = _most_telling(cache, memory_bytes)
    if memory_bytes is None or only.constraints or len(strategies) * len(modes) == 1:
        return no_plan_error(only)
    at_all = f"no plan of {_count_text(cache)} fits {bytes_text(memory_bytes)} per device"
    try:
        problem, peak_bytes = _closest(cache, memory_bytes)
    except TooManyCandidates:
        return NoPlanError(f"{at_all}; give each device more memory")
    tries_one_k = len({x.num_devices for x in strategies}) == 1
    with suppress(TooManyCandidates):
        at_all += f"; {stages_that_fit_text(problem)}" if tries_one_k and not problem.has_chunks else ""
    return NoPlanError(
        f"{at_all}; the closest that was found needs {bytes_text(peak_bytes)} (--memory {memory_size_text(peak_bytes)}): "
        f"{counted(problem.num_devices, 'device')}, {counted(problem.num_microbatches, 'micro-batch')} of "
        f"{problem.costs.profile.microbatch_sizes[0]}, {schedule_info(problem.schedule).title}, recompute {problem.recompute}"
    )


def _most_telling(cache: SolveCache, memory_bytes: int | None) -> Problem:
    """The setting to explain: of those that the constraints allow, the one with most devices, with one stage on each."""
    strategies, mode = cache.space.strategies, cache.space.recompute[0]
    for x in sorted(strategies, key=lambda x: (x.num_stages > x.num_devices, -x.num_devices)):
        if not conflicting_constraints(found := cache.problem(x, mode, memory_bytes)):
            return found
    return cache.problem(strategies[0], mode, memory_bytes)


def _count_text(cache: SolveCache) -> str:
    num_settings = len(cache.space.strategies)
    return "one setting" if num_settings == 1 else f"{num_settings} settings"


def _open_text(cache: SolveCache, found: Found) -> str:
    if len(cache.space.strategies) == 1:
        return "the one setting is still open"
    return f"{found.num_left} of {_count_text(cache)} {'is' if found.num_left == 1 else 'are'} still open"


def _closest(cache: SolveCache, memory_bytes: int) -> tuple[Problem, int]:
    """The strategy that needs the least memory, and how much, among those that can be computed in a few seconds."""
    deadline_s = time.perf_counter() + _CLOSEST_S
    single = [x for x in cache.space.strategies if x.num_stages == x.num_devices]  # fast to compute
    every = sorted(
        single or cache.space.strategies, key=lambda x: (x.schedule == "gpipe", x.num_stages * x.num_microbatches)
    )
    modes = sorted(cache.space.recompute, key=lambda mode: mode not in ("selected", "always"))
    modes = [x for x in modes if x != "selected" or not all(why_not_selected(y.schedule) for y in every)]
    tried: list[tuple[Problem, int]] = []
    for strategy, mode in product(every[:: max(1, len(every) // _NUM_TRIED)], modes[:2]):
        if tried and time.perf_counter() > deadline_s:
            break
        if mode == "selected" and why_not_selected(strategy.schedule):
            continue
        problem = cache.problem(strategy, mode, memory_bytes)
        tried.append((problem, tightest_device(problem).peak_bytes))
    return min(tried, key=lambda pair: pair[1])


def _notes(
    cache: SolveCache, found: Found, memory_bytes: int | None, request: PlanRequest, *, is_whole: bool
) -> list[str]:
    plan, notes = found.plan, list[str]()
    assert plan is not None, "a search without a plan is an error"
    every = _count_text(cache)
    if found.is_interrupted:
        left = f"{_open_text(cache, found)}, the bound is of all" if found.num_left else "the bound is of all settings"
        notes.append(f"the search was interrupted: {left}")
    elif found.num_left:
        notes.append(f"the time was up: {_open_text(cache, found)}, the bound is of all")
    else:
        notes.append(f"the best of {every}; bounds ruled out what was not among {cache.num_solved} partitions solved")
    if not is_whole and not found.is_interrupted:
        notes.append("the search for plans with less memory was interrupted")
    num_undecided = sum(memory == memory_bytes for _, _, memory in cache.undecided)  # the others are of the frontier
    if num_undecided:
        ways = "1 way to recompute has" if num_undecided == 1 else f"{num_undecided} ways to recompute have"
        notes.append(f"whether {ways} a plan that fits was not found in time")
    used = plan.num_ranks
    if request.total_devices is not None and used < request.total_devices:
        k, num_idle = request.num_devices, request.total_devices - used
        reason = "no plan that uses more was found to be faster"
        if isinstance(k, int) and num_idle < k:
            reason = f"another pipeline needs {k}, {num_idle} {'is' if num_idle == 1 else 'are'} left; --k auto tries other numbers"
        notes.append(f"{used} of {request.total_devices} devices are used; {reason}")
    return notes


def _final_plan(
    cache: SolveCache, found: Found, memory_bytes: int | None, notes: tuple[str, ...], *, solve_s: float
) -> Plan:
    plan = found.plan
    assert plan is not None, "a search without a plan is an error"
    num_devices = plan.num_ranks
    lower_bound_s = found.lower_bound / cache.weight(num_devices)
    comparable = [x for x in cache.plans if not cache.space.per_device or x.num_devices * x.num_replicas == num_devices]
    proof = replace(
        plan.proof,
        solver=f"search/{plan.proof.solver}",
        lower_bound_s=min(lower_bound_s, plan.prediction.step_s),
        solve_s=solve_s,
    )
    return replace(
        plan,
        memory_limit_bytes=memory_bytes,
        proof=proof,
        notes=(*plan.notes, *notes, *one_device_notes(plan, cache.profile)),
        frontier=tuple(alternative_of(x) for x in _pareto_frontier(plan, comparable)),
    )


def _explore(cache: SolveCache, plan: Plan, *, deadline_s: float, share: tuple[float, float]) -> bool:
    """Repeat the search with less and less memory than the plan needs; returns False if it was interrupted."""
    peak_bytes = plan.peak_bytes
    low, high = share
    for index in range(1, _NUM_POINTS):
        now_s = time.perf_counter()
        if deadline_s - now_s < _LEAST_POINT_S:
            return True
        part = (high - low) / (_NUM_POINTS - 1)
        until_s = now_s + (deadline_s - now_s) / min(_POINTS_AT_LEAST, _NUM_POINTS - index)
        point_share = (low + (index - 1) * part, low + index * part)
        try:
            found = best_plan_within(cache, int(_LESS_MEMORY * peak_bytes), deadline_s=until_s, share=point_share)
        except KeyboardInterrupt:
            return False
        if found.is_interrupted or found.plan is None:
            return not found.is_interrupted
        peak_bytes = found.plan.peak_bytes
    return True


def _pareto_frontier(plan: Plan, plans: Sequence[Plan]) -> Iterator[Plan]:
    """The plan, then slower plans that each need at least 1 % less memory than the one before; by rising step."""
    last = plan
    yield plan
    for other in sorted(plans, key=lambda x: (x.prediction.step_s, x.peak_bytes)):
        is_smaller = other.peak_bytes <= (1 - _MIN_SAVING) * last.peak_bytes
        if is_smaller and other.prediction.step_s > last.prediction.step_s:
            yield other
            last = other
