"""How to run a model at all: devices, replicas, micro-batches, schedule and recompute, for one batch and one memory.

Every setting is bounded in closed form, the promising ones are solved by the balancer, and the bound of a plan covers
all settings, also those that were left out when the time was up. See `space.py` for what is looked at, `race.py` for
the order, `frontier.py` for plans that need less memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Literal

from gplan.core import Constraints, Plan, Profile
from gplan.core.errors import NoPlanError, UsageError
from gplan.core.units import bytes_text, counted, seconds_text
from gplan.graph.down_sets import DownSets, Prefixes
from gplan.partition.balance import alternative_of
from gplan.partition.candidates import TooManyCandidates
from gplan.partition.constraints import check_constraints
from gplan.partition.diagnosis import no_plan_error, one_device_notes, tightest_device
from gplan.partition.problem import Problem
from gplan.partition.solve import TooManyDownSets, where_to_cut
from gplan.partition.validation import why_not_selected
from gplan.schedules.registry import num_stages_of, schedule_info
from gplan.strategy_search.best_first import Found, best_within
from gplan.strategy_search.cache import Engine
from gplan.strategy_search.pareto import explore, frontier_of
from gplan.strategy_search.space import Asked, Space, space_of

TIME_LIMIT_S = 18.0
_ROUNDING = 1e-12
_SHARE_OF_BEST = 0.6  # of the time, for the best plan; the rest is for the frontier
_NUM_TRIED = 24  # settings whose smallest memory is found where nothing fits
_CLOSEST_S = 4.0  # for that


def search(
    profile: Profile,
    *,
    num_devices: int | Literal["auto"] = "auto",
    num_microbatches: int | Literal["auto"] | None = None,
    schedule: str = "auto",
    recompute: str = "auto",
    most_devices: int | None = None,
    batch_size: int | None = None,
    microbatch_size: int | None = None,
    memory_bytes: int | None = None,
    constraints: Constraints | None = None,
    time_limit_s: float = TIME_LIMIT_S,
    progress: Callable[[str, float], None] = lambda _text, _share: None,
) -> Plan:
    """The plan with the shortest step for a batch, and with it plans that need less memory (`Plan.frontier`).

    "auto" leaves to the search what other values fix; `num_devices`, a schedule and a way to recompute are as for
    `balance`. With `most_devices`, those of all replicas are at most as many, and the replicas add up their gradients.
    Without, "auto" is as many as train the most samples a second and device. The batch is by default that of the plan
    that is made without a search, the memory what the profile knows of its device. Micro-batches have profiled sizes
    wherever the batch can be cut so. An interrupt, or the time, ends the search with the best plan so far: its notes
    say so, and `Plan.proof` is of all settings.

    Raises UsageError for what cannot be searched, NoPlanError where nothing fits or nothing was found in time.
    """
    started_s = time.perf_counter()
    if not time_limit_s > 0:
        raise UsageError(f"the time limit is {time_limit_s:g} s; expected more than 0")
    if memory_bytes is not None and memory_bytes < 1:
        raise UsageError(f"the memory of each device is {memory_bytes} bytes; expected at least 1")
    asked = Asked(
        num_devices=num_devices,
        num_microbatches=num_microbatches,
        schedule=schedule,
        recompute=recompute,
        most_devices=most_devices,
        batch_size=batch_size,
        microbatch_size=microbatch_size,
    )
    constraints = constraints or Constraints()
    _check_constraints(constraints, profile, asked)
    space = _with_pins(space_of(profile, asked), constraints)
    memory_bytes = profile.device.memory_bytes if memory_bytes is None else memory_bytes
    downsets, notes = _where_to_cut(profile)
    engine = Engine(profile=profile, space=space, constraints=constraints, downsets=downsets, progress=progress)
    until_s = started_s + _SHARE_OF_BEST * time_limit_s
    found = best_within(engine, memory_bytes, deadline_s=until_s, share=(0.0, _SHARE_OF_BEST))
    if found.plan is None:
        raise _no_plan_error(engine, memory_bytes, found, time_limit_s)
    is_whole = not found.is_interrupted and explore(
        engine, found.plan, deadline_s=started_s + time_limit_s, share=(_SHARE_OF_BEST, 1.0)
    )
    found = _with_best(engine, found, memory_bytes)
    notes = (*space.notes, *notes, *_notes(engine, found, memory_bytes, asked, is_whole=is_whole))
    return _finished(engine, found, memory_bytes, notes, solve_s=time.perf_counter() - started_s)


def _with_best(engine: Engine, found: Found, memory_bytes: int | None) -> Found:
    """With the best plan that fits, also where it was only found while less memory was looked at."""
    fitting = [x for x in engine.plans if memory_bytes is None or x.peak_bytes <= memory_bytes]
    best = min(fitting, key=engine.cost_of)
    is_better = found.plan is not None and engine.cost_of(best) < engine.cost_of(found.plan) * (1 - _ROUNDING)
    return replace(found, plan=best) if is_better else found


def _check_constraints(constraints: Constraints, profile: Profile, asked: Asked) -> None:
    if constraints.pins and asked.num_devices == "auto":
        pin = constraints.pins[0]
        raise UsageError(
            f"--pin {pin.layer}={pin.stage} names a stage, but the number of stages is to be found; give --k a number"
        )
    num_stages = len(profile.layers)
    if asked.num_devices != "auto":
        num_stages = num_stages_of("gpipe" if asked.schedule == "auto" else asked.schedule, asked.num_devices)
    check_constraints(constraints, profile, num_stages=num_stages)


def _with_pins(space: Space, constraints: Constraints) -> Space:
    """Without schedules of which a stage's number means another part of the model than with one stage on each
    device."""
    kept = tuple(x for x in space.settings if x.num_stages == x.num_devices)
    if not constraints.pins or not kept or len(kept) == len(space.settings):
        return space
    note = "--pin names stages, so schedules with several stages a device were left out"
    return replace(space, settings=kept, notes=(*space.notes, note))


def _where_to_cut(profile: Profile) -> tuple[DownSets | None, tuple[str, ...]]:
    try:
        return where_to_cut(profile), ()
    except TooManyDownSets:
        note = "with this many branches the search keeps the layers in the profile's order; others may be better"
        return Prefixes(len(profile.layers)), (note,)


def _no_plan_error(engine: Engine, memory_bytes: int | None, found: Found, time_limit_s: float) -> Exception:
    if found.num_left:
        return NoPlanError(
            f"no plan was found in {seconds_text(time_limit_s)}; {_open_text(engine, found)}; "
            "allow more time (--time-limit), or leave less open"
        )
    settings, modes = engine.space.settings, engine.space.recompute
    only = engine.problem(settings[0], modes[0], memory_bytes)
    if memory_bytes is None or only.constraints or len(settings) * len(modes) == 1:
        return no_plan_error(only)
    at_all = f"no plan of {_count_text(engine)} fits {bytes_text(memory_bytes)} per device"
    try:
        problem, peak_bytes = _closest(engine, memory_bytes)
    except TooManyCandidates:
        return NoPlanError(f"{at_all}; give each device more memory")
    return NoPlanError(
        f"{at_all}; of those tried again without a limit, {counted(problem.num_devices, 'device')}, "
        f"{counted(problem.num_microbatches, 'micro-batch')} of {problem.costs.microbatch_size}, "
        f"{schedule_info(problem.schedule).title}, "
        f"recompute {problem.recompute} come closest with {bytes_text(peak_bytes)}"
    )


def _count_text(engine: Engine) -> str:
    num_settings = len(engine.space.settings)
    return "one setting" if num_settings == 1 else f"{num_settings} settings"


def _open_text(engine: Engine, found: Found) -> str:
    if len(engine.space.settings) == 1:
        return "the one setting is still open"
    return f"{found.num_left} of {_count_text(engine)} {'is' if found.num_left == 1 else 'are'} still open"


def _closest(engine: Engine, memory_bytes: int) -> tuple[Problem, int]:
    """Of some settings that which can do with the least memory, and that: as many as are looked at in a few seconds."""
    deadline_s = time.perf_counter() + _CLOSEST_S
    apart = [x for x in engine.space.settings if x.num_stages == x.num_devices]  # of these it is found soon
    every = sorted(
        apart or engine.space.settings, key=lambda x: (x.schedule == "gpipe", x.num_stages * x.num_microbatches)
    )
    modes = sorted(engine.space.recompute, key=lambda mode: mode not in ("selected", "always"))
    modes = [x for x in modes if x != "selected" or not why_not_selected(every[0].schedule)]
    tried: list[tuple[Problem, int]] = []
    for setting, mode in product(every[:: max(1, len(every) // _NUM_TRIED)], modes[:2]):
        if tried and time.perf_counter() > deadline_s:
            break
        problem = engine.problem(setting, mode, memory_bytes)
        tried.append((problem, tightest_device(problem).peak_bytes))
    return min(tried, key=lambda pair: pair[1])


def _notes(engine: Engine, found: Found, memory_bytes: int | None, asked: Asked, *, is_whole: bool) -> list[str]:
    plan, notes = found.plan, list[str]()
    assert plan is not None, "a search without a plan is an error"
    every = _count_text(engine)
    if found.is_interrupted:
        left = f"{_open_text(engine, found)}, the bound is of all" if found.num_left else "the bound is of all settings"
        notes.append(f"the search was interrupted: {left}")
    elif found.num_left:
        notes.append(f"the time was up: {_open_text(engine, found)}, the bound is of all")
    else:
        notes.append(f"the best of {every}; bounds ruled out what was not among {engine.num_solved} partitions solved")
    if not is_whole and not found.is_interrupted:
        notes.append("the search for plans with less memory was interrupted")
    num_undecided = sum(memory == memory_bytes for _, _, memory in engine.undecided)  # the others are of the frontier
    if num_undecided:
        ways = "1 way to recompute has" if num_undecided == 1 else f"{num_undecided} ways to recompute have"
        notes.append(f"whether {ways} a plan that fits was not found in time")
    used = plan.num_devices * plan.num_replicas
    if asked.most_devices is not None and used < asked.most_devices:
        notes.append(f"{used} of {asked.most_devices} devices are used; no plan that uses more was found to be faster")
    return notes


def _finished(
    engine: Engine, found: Found, memory_bytes: int | None, notes: tuple[str, ...], *, solve_s: float
) -> Plan:
    plan = found.plan
    assert plan is not None, "a search without a plan is an error"
    num_devices = plan.num_devices * plan.num_replicas
    lower_bound_s = found.lower_bound / engine.weight(num_devices)
    comparable = [
        x for x in engine.plans if not engine.space.per_device or x.num_devices * x.num_replicas == num_devices
    ]
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
        notes=(*plan.notes, *notes, *one_device_notes(plan, engine.profile)),
        frontier=tuple(alternative_of(x) for x in frontier_of(plan, comparable)),
    )
