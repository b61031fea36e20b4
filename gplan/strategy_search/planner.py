"""The planner: one function from a profile and a request to a plan.

A request whose dials are all values is one partition problem. Open dials are searched together: devices, replicas,
micro-batches, schedule and recompute, for one batch and memory. Every setting of `space.py` has a closed-form bound; those
that could be the best are balanced (`setting_search.py`), and the bound of the resulting plan covers all settings, also
those left out when the time was up. The Pareto frontier of step and memory comes from repeating the search with less and
less memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice, product
from typing import Any, cast

from gplan.core import OBJECTIVES, Alternative, Constraints, Machine, Plan, Profile
from gplan.core.errors import NoPlanError, UsageError
from gplan.core.progress import Progress, no_progress
from gplan.core.units import bytes_text, counted, memory_text, seconds_text
from gplan.corrections.links import on_alike_hosts
from gplan.cost.reserved_bytes import beside_bytes, bytes_over, with_reserved
from gplan.graph.down_sets import Prefixes
from gplan.partition.balance import alternative_of, balance_fixed, smaller_microbatches
from gplan.partition.candidates import TooManyCandidates
from gplan.partition.diagnosis import (
    conflicting_constraints,
    no_plan_error,
    one_device_notes,
    size_to_profile_text,
    stages_that_fit,
    tightest_device,
)
from gplan.partition.plan_evaluation import with_reserved_memory
from gplan.partition.problem import Problem
from gplan.partition.solve import TooManyDownSets, where_to_cut
from gplan.partition.validation import check_choice, check_constraints, check_counts, check_limits, why_not_selected
from gplan.schedules.registry import custom_counts, default_num_microbatches, num_stages_of, schedule_info
from gplan.schedules.request import OptionNames, PipelineSetting, PlanRequest, any_setting
from gplan.strategy_search.setting_search import NUM_RIVALS, SettingSearch, TensorLimit
from gplan.strategy_search.space import Setting, base_schedule, search_space

_NUM_TRIES = 10  # of plans for a request without open dials that fits with what the allocators reserve


def plan(profile: Profile, request: PlanRequest, *, progress: Progress = no_progress) -> Plan:
    """The best plan for a request, with a lower bound and the gap in `Plan.proof`.

    Where the profile has the layers' tensors, as those of GPUs do, the plan fits with what the allocators reserve and what
    is taken beside that. Planning counts the bytes of tensors alone: it gets the limit less what is taken beside them, and
    again, a few times, less what the plan found reserves beyond tensors (`TensorLimit`); in a search for that setting alone. The
    bound stays that of the first limit, as other plans may reserve less.

    Raises UsageError for an impossible request, NoPlanError where no plan fits the memory or none was found in time.
    """
    request = with_counts(request)
    if request.machine is not None and request.total_devices is not None:
        profile, request = _on_alike_hosts(profile, request, request.machine, request.total_devices)
    if request.is_open:
        _check_searchable(request)
        return search(profile, request, progress=progress)
    request = _with_microbatch_size(profile, request)
    check_limits(memory_bytes=request.memory_bytes, time_limit_s=request.time_limit_s)
    progress("no plan yet", 0.0)
    limit, within = _limits(profile, request)
    tensors, failed, fitting, bound_s = TensorLimit(within or 0), None, list[Plan](), float("inf")
    deadline_s = time.perf_counter() + (TIME_LIMIT_S if request.time_limit_s is None else request.time_limit_s)
    for _ in range(_NUM_TRIES):
        try:
            found = with_reserved(balance_fixed(profile, replace(request, memory_bytes=within)), profile)
        except NoPlanError as error:
            failed = _of_whole_device(error, within, limit)
            tensors.rise()
        else:
            bound_s = min(bound_s, found.proof.lower_bound_s)
            found = replace(found, proof=replace(found.proof, lower_bound_s=bound_s))
            lacking = found.device_total_bytes - limit if limit and within != limit else 0
            if lacking > 0:
                tensors.lower(found.peak_bytes, lacking)
            else:
                fitting.append(found)
                tensors.rise()
        if not tensors.is_worth_trying or time.perf_counter() > deadline_s:
            break
        within = tensors.num_bytes
    if failed is not None and not fitting:
        raise failed
    found = min(fitting, key=lambda x: x.proof.objective_s, default=found)
    return _finished(found, profile, limit, request.options)


def _on_alike_hosts(
    profile: Profile, request: PlanRequest, machine: Machine, total_devices: int
) -> tuple[Profile, PlanRequest]:
    """Replicas on a machine: the profile with its links and memory, and a request whose pipelines are each on one host."""
    profile, per_host = on_alike_hosts(profile, machine, total_devices=total_devices)
    if isinstance(request.num_devices, int) and request.num_devices > 0 and per_host % request.num_devices:
        raise UsageError(
            f"--k {request.num_devices} with --devices and --machine: each replica is on one host, and {request.num_devices} does not divide "
            f"its {counted(per_host, 'device')}; a pipeline over several hosts is planned without --devices"
        )

    def fills_hosts(x: PipelineSetting) -> bool:
        num_ranks = x.num_devices * x.num_replicas
        is_whole = total_devices == per_host or (num_ranks > per_host and num_ranks % per_host == 0)
        return is_whole and per_host % x.num_devices == 0 and request.allows(x)

    return profile, replace(request, machine=None, allows=fills_hosts)


def _limits(profile: Profile, request: PlanRequest) -> tuple[int | None, int | None]:
    """The memory of every device, and what of it tensors have at most; None where a machine has those of its devices."""
    if request.machine is not None:
        return request.memory_bytes, request.memory_bytes
    limit, beside = request.memory_bytes, beside_bytes(profile)
    limit = profile.device.memory_bytes if limit is None else limit
    if limit and beside >= limit:
        raise NoPlanError(
            f"a device of {bytes_text(limit)} has no memory left for tensors: CUDA and NCCL take {bytes_text(beside)}; give each "
            "device more memory (--memory)"
        )
    return limit, limit - beside if limit and beside else limit


def _of_whole_device(error: Exception, within: int | None, limit: int | None) -> Exception:
    """The error of planning within what tensors have of the limit, with what to add to its numbers."""
    if within is None or limit is None or within == limit or not isinstance(error, NoPlanError):
        return error
    return NoPlanError(
        f"{error}; these are bytes of tensors: CUDA, NCCL and what the allocator reserves but tensors do not use take {bytes_text(limit - within)} "
        "beside them, so add as much to each --memory"
    )


def _finished(found: Plan, profile: Profile, limit: int | None, options: OptionNames) -> Plan:
    """The plan with what its devices reserve, and notes where that is over the limit or one device would be faster."""
    found = with_reserved_memory(replace(found, memory_limit_bytes=limit), profile, limit)
    return replace(found, notes=(*found.notes, *one_device_notes(found, profile, options)))


def balance(profile: Profile, *, progress: Progress = no_progress, **dials: Any) -> Plan:
    """The best plan for the dials of a `PlanRequest`, given by name.

    Examples:
        >>> balance(profile, num_devices=4, num_microbatches=16, schedule="1f1b")  # doctest: +SKIP
        >>> balance(profile, total_devices=64, schedule="auto", recompute="auto")  # doctest: +SKIP
    """
    return plan(profile, PlanRequest(**dials), progress=progress)


def with_counts(request: PlanRequest) -> PlanRequest:
    """The request with the numbers of devices and micro-batches that a custom order has; without open dials by default
    four micro-batches a device."""
    num_devices, num_microbatches, schedule = request.num_devices, request.num_microbatches, request.schedule
    if schedule != "auto":
        num_devices, num_microbatches = custom_counts(
            schedule, num_devices=num_devices, num_microbatches=num_microbatches
        )
    if num_devices is None:
        if request.total_devices is None:
            raise UsageError("how many devices? give --k 4, --k auto, or the devices in all: --devices 8")
        num_devices = "auto"
    if request.sharding not in ("none", "auto") and request.total_devices is None and request.num_replicas == 1:
        raise UsageError(
            f"--shard {request.sharding} divides stages among replicas, and one pipeline has none; give the devices in all, "
            "such as --devices 8"
        )
    request = replace(request, num_devices=num_devices, num_microbatches=num_microbatches)
    if not request.is_open and isinstance(num_devices, int) and num_microbatches is None:
        return replace(request, num_microbatches=default_num_microbatches(num_devices))
    return request


def _with_microbatch_size(profile: Profile, request: PlanRequest) -> PlanRequest:
    """A request without open dials, with the micro-batch size that its batch has."""
    count = request.num_microbatches
    assert isinstance(count, int), "no dial is open"
    for option, value in (("--microbatch-size", request.microbatch_size), ("--batch-size", request.batch_size)):
        if value is not None and value < 1:
            raise UsageError(f"{option} {value}: expected at least 1 sample")
    if request.batch_size is None:
        return request
    if request.microbatch_size is not None:
        raise UsageError(
            f"got --batch-size {request.batch_size} and --microbatch-size {request.microbatch_size}; give one of them"
        )
    num_samples = request.batch_size // request.num_replicas
    if count < 1 or request.batch_size % (count * request.num_replicas):
        raise UsageError(
            f"a batch of {request.batch_size} cannot be cut into {count} equal micro-batches; "
            f"try {_other_cuts(profile, request, count)}"
        )
    return replace(request, microbatch_size=num_samples // count)


def _other_cuts(profile: Profile, request: PlanRequest, count: int) -> str:
    """The option that works: numbers of micro-batches near `count` of sizes that were profiled, else the nearest batch."""
    sizes, num_replicas = profile.microbatch_sizes, max(1, request.num_replicas)

    def can_run(num_microbatches: int) -> bool:
        try:
            check_counts(
                profile,
                request.schedule,
                num_devices=cast(int, request.num_devices),
                num_microbatches=num_microbatches,
                num_replicas=num_replicas,
            )
        except UsageError:
            return False
        return True

    assert request.batch_size is not None
    num_samples, rest = divmod(request.batch_size, num_replicas)
    fitting = {num_samples // n for n in range(sizes[0], sizes[-1] + 1) if n <= num_samples and num_samples % n == 0}
    nearest = sorted(fitting if not rest else (), key=lambda m: (abs(m - count), m))
    if found := sorted(islice(filter(can_run, nearest), 6)):
        return f"--microbatches {' or '.join(map(str, found))}"
    batches = (max(1, count) * num_replicas * n for n in range(sizes[0], sizes[-1] + 1))
    asked = num_replicas * num_samples + rest
    return f"--batch-size {min(batches, key=lambda x: abs(x - asked))}"


def _check_searchable(request: PlanRequest) -> None:
    """Raise UsageError for what a search does not have."""
    check_choice("minimize", request.minimize, OBJECTIVES)
    clashes = {
        f"--minimize {request.minimize}": request.minimize != "step-time",
        f"--solver {request.solver}": request.solver not in ("auto", "dp"),
    }
    if request.machine is not None:
        clashes["--for with --machine"] = request.allows is not any_setting
    for option, is_given in clashes.items():
        if is_given:
            raise UsageError(
                f"{option} cannot be used in a search: give --k and --microbatches as numbers, --schedule and --recompute "
                "by name, --shard none, and no --devices"
            )


TIME_LIMIT_S = 18.0
_SHARE_OF_BEST = 0.9  # of the time, for the best plan; the rest is for the frontier
_NUM_TRIED = 24  # settings whose smallest memory is computed where nothing fits
_CLOSEST_S = 4.0  # for that
_NUM_POINTS = 8  # of the frontier
_LESS_MEMORY = 0.8  # the memory limit for the next point, as a share of the last point's peak
_LEAST_POINT_S = 0.5  # for a point
_SHARE_OF_POINT = 1 / 3  # of the time left
_MIN_SAVING = 0.01  # share of the memory that a point of the frontier must save


def search(profile: Profile, request: PlanRequest, *, progress: Progress = no_progress) -> Plan:
    """The plan with the shortest step for a batch, with plans that need less memory in `Plan.frontier`.

    `total_devices` limits the devices of all replicas together; without it, devices on "auto" maximise samples per second
    and device. By default the batch is that of the plan made without a search, and the memory that of the profile's
    device. Micro-batches have profiled sizes where the batch can be cut so. On a machine there is one replica, and the next
    best settings are in `Plan.rivals` in place of a frontier. An interrupt or the time limit ends the search with the best
    plan so far and a note; `Plan.proof` covers all settings.

    Raises UsageError for an impossible request, NoPlanError where nothing fits or nothing was found in time.
    """
    started_s = time.perf_counter()
    machine = request.machine
    time_limit_s = TIME_LIMIT_S if request.time_limit_s is None else request.time_limit_s
    check_limits(memory_bytes=request.memory_bytes, time_limit_s=time_limit_s)
    _check_constraints(request.constraints, profile, request)
    space = search_space(profile, request)
    limit, within = _limits(profile, request)
    notes: tuple[str, ...] = ()
    try:
        downsets = where_to_cut(profile, in_order=request.constraints.profile_order)
    except TooManyDownSets:
        downsets = Prefixes(len(profile.layers))
        notes = ("with this many branches the search keeps the layers in the profile's order; others may be better",)
    found = SettingSearch(profile=profile, space=space, request=request, downsets=downsets, progress=progress)
    if limit and within != limit:
        found.over = partial(bytes_over, profile=profile, limit=limit)
    share = _SHARE_OF_BEST if machine is None else 1.0
    found.run(within, deadline_s=started_s + share * time_limit_s, share=(0.0, share))
    if found.best is None:
        error = _no_plan_error(found, within, time_limit_s)
        raise error if found.num_left else _of_whole_device(error, found.least_within(within), limit)
    plan, lower_bound = found.best, found.lower_bound
    notes = (*space.notes, *notes, *_notes(found, plan))
    if machine is None and not found.is_interrupted and not _explore(found, deadline_s=started_s + time_limit_s):
        notes = (*notes, "the search for plans with less memory was interrupted")
    lower_bound_s = min(lower_bound / found.weight(plan.num_ranks), plan.prediction.step_s)
    solver, solve_s = f"search/{plan.proof.solver}", time.perf_counter() - started_s
    whole = _finished(plan, profile, limit, request.options)
    return replace(
        whole,
        proof=replace(plan.proof, solver=solver, lower_bound_s=lower_bound_s, solve_s=solve_s),
        notes=(*whole.notes, *notes),
        frontier=tuple(map(alternative_of, _pareto_frontier(plan, found))) if machine is None else (),
        rivals=tuple(_rivals(plan, found)) if machine is not None else (),
    )


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


def _notes(found: SettingSearch, plan: Plan) -> Iterator[str]:
    """How much was searched, and which devices are not used."""
    if found.is_interrupted or found.num_left:
        stopped = "the search was interrupted" if found.is_interrupted else "the time was up"
        yield (
            f"{stopped}: {found.open_text}, the bound is of all"
            if found.num_left
            else f"{stopped}: the bound is of all settings"
        )
    else:
        yield (
            f"the best of {found.num_settings_text}; bounds ruled out what was not among {found.num_solved} partitions solved"
        )
    num_undecided = len(found.undecided)
    if num_undecided:
        ways = "1 way to recompute has" if num_undecided == 1 else f"{num_undecided} ways to recompute have"
        yield f"whether {ways} a plan that fits was not found in time"
    used, num_there = plan.num_ranks, found.request.total_devices
    if num_there is not None and used < num_there:
        k, num_idle = found.request.num_devices, num_there - used
        reason = "no plan that uses more was found to be faster"
        if isinstance(k, int) and num_idle < k:
            reason = f"another pipeline needs {k}, {num_idle} {'is' if num_idle == 1 else 'are'} left; --k auto tries other numbers"
        yield f"{used} of {num_there} devices are used; {reason}"


def _explore(found: SettingSearch, *, deadline_s: float) -> bool:
    """Repeat the search with less and less memory than the best plan needs; returns False if it was interrupted."""
    part = (1 - _SHARE_OF_BEST) / (_NUM_POINTS - 1)
    for index in range(_NUM_POINTS - 1):
        now_s, low = time.perf_counter(), _SHARE_OF_BEST + index * part
        if found.best is None or found.is_interrupted or deadline_s - now_s < _LEAST_POINT_S:
            break
        until_s = now_s + _SHARE_OF_POINT * (deadline_s - now_s)
        try:
            found.run(int(_LESS_MEMORY * found.best.peak_bytes), deadline_s=until_s, share=(low, low + part))
        except KeyboardInterrupt:
            return False
    return not found.is_interrupted


def _pareto_frontier(plan: Plan, found: SettingSearch) -> Iterator[Plan]:
    """The plan, then slower plans that each need at least 1 % less memory than the one before; by rising step."""
    last = plan
    yield plan
    plans = [x for x in found.plans.values() if not found.space.per_device or x.num_ranks == plan.num_ranks]
    for other in sorted(plans, key=lambda x: (x.prediction.step_s, x.peak_bytes)):
        is_smaller = other.peak_bytes <= (1 - _MIN_SAVING) * last.peak_bytes
        if is_smaller and other.prediction.step_s > last.prediction.step_s:
            yield other
            last = other


def _rivals(plan: Plan, found: SettingSearch) -> Iterator[Alternative]:
    """The plan's setting without constraints, if there are any, then the next best settings."""
    if found.request.constraints:
        fixed = replace(
            found.request,
            num_devices=plan.num_devices,
            num_microbatches=plan.num_microbatches,
            microbatch_size=plan.microbatch_size,
            schedule=plan.schedule,
            recompute=plan.recompute,
            constraints=Constraints(),
        )
        yield alternative_of(balance_fixed(found.profile, fixed), label="without constraints")
    others = [x for x in found.plans.values() if x is not plan]
    for x in sorted(others, key=lambda x: (x.prediction.step_s, x.peak_bytes))[:NUM_RIVALS]:
        title = schedule_info(x.schedule).title
        yield alternative_of(x, label=f"{title}, {x.num_microbatches} × {x.microbatch_size}, recompute {x.recompute}")


def _no_plan_error(found: SettingSearch, memory_bytes: int | None, time_limit_s: float) -> Exception:
    """What to raise; of several settings that do not fit it names the one that needs the least memory."""
    if found.num_left:
        return NoPlanError(
            f"no plan was found in {seconds_text(time_limit_s)}; {found.open_text}; "
            "allow more time (--time-limit), or leave less open"
        )
    settings, modes, machine = found.space.settings, found.space.recompute, found.request.machine
    if memory_bytes is None or machine or found.request.constraints or len(settings) * len(modes) == 1:
        of_setting = partial(found.problem, recompute=modes[0], memory_bytes=memory_bytes)
        most_telling = sorted(settings, key=lambda x: (x.num_stages > x.num_devices, -x.num_devices))
        only = next((x for x in most_telling if not conflicting_constraints(of_setting(x))), settings[0])
        smaller = smaller_microbatches(found.profile, of_setting(only))
        return no_plan_error(
            of_setting(only), machine, smaller=lambda: [of_setting(replace(only, **x)) for x in smaller]
        )
    at_all = f"no plan of {found.num_settings_text} fits {bytes_text(memory_bytes)} per device"
    try:
        setting, problem, peak_bytes = _closest(found, memory_bytes)
        size, smallest = setting.microbatch_size, ""
        for dials in islice(smaller_microbatches(found.profile, problem), 1):
            other = found.problem(replace(setting, **dials), problem.recompute, memory_bytes)
            size, need_bytes = dials["microbatch_size"], tightest_device(other).peak_bytes
            smallest = (
                f"; in {dials['num_microbatches']} of --microbatch-size {size} it needs {memory_text(need_bytes)}"
            )
    except TooManyCandidates:
        return NoPlanError(f"{at_all}; give each device more memory")
    tries_one_k = len({x.num_devices for x in settings}) == 1
    with suppress(TooManyCandidates):
        at_all += f"; {stages_that_fit(problem)[1]}" if tries_one_k and not problem.has_chunks else ""
    return NoPlanError(
        f"{at_all}; the closest that was found needs {memory_text(peak_bytes)}: "
        f"{counted(problem.num_devices, 'device')}, {counted(problem.num_microbatches, 'micro-batch')} of "
        f"{setting.microbatch_size}, {schedule_info(problem.schedule).title}, recompute {problem.recompute}{smallest}"
        f"{size_to_profile_text(problem, size)}"
    )


def _closest(found: SettingSearch, memory_bytes: int) -> tuple[Setting, Problem, int]:
    """The setting that needs the least memory, and how much, among those that can be computed in a few seconds."""
    deadline_s = time.perf_counter() + _CLOSEST_S
    single = [x for x in found.space.settings if x.num_stages == x.num_devices]  # fast to compute
    every = sorted(
        single or found.space.settings, key=lambda x: (x.schedule == "gpipe", x.num_stages * x.num_microbatches)
    )
    modes = sorted(found.space.recompute, key=lambda mode: mode not in ("selected", "always"))
    modes = [x for x in modes if x != "selected" or not all(why_not_selected(y.schedule) for y in every)]
    tried: list[tuple[Setting, Problem, int]] = []
    for setting, mode in product(every[:: max(1, len(every) // _NUM_TRIED)], modes[:2]):
        if tried and time.perf_counter() > deadline_s:
            break
        if mode == "selected" and why_not_selected(setting.schedule):
            continue
        problem = found.problem(setting, mode, memory_bytes)
        tried.append((setting, problem, tightest_device(problem).peak_bytes))
    return min(tried, key=lambda x: x[2])
