"""Search over micro-batches, schedule and recompute on a machine whose devices and links differ.

Every setting with one stage on each device and one replica is planned by `balance`, which places its stages; the plan with
the shortest step is taken. Settings that the time does not reach are left out, and a note tells; then nothing is proven.
"""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import product

from gplan.core import Plan, Profile
from gplan.core.errors import NoPlanError, UsageError
from gplan.core.progress import Progress, no_progress
from gplan.core.units import counted, seconds_text
from gplan.partition.balance import alternative_of, balance_fixed
from gplan.partition.validation import why_not_selected
from gplan.schedules.registry import schedule_info
from gplan.schedules.request import PlanRequest
from gplan.strategy_search.search import TIME_LIMIT_S
from gplan.strategy_search.space import search_space


def search_machine(profile: Profile, request: PlanRequest, *, progress: Progress = no_progress) -> Plan:
    """The plan with the shortest step on the request's machine, the next best settings in `Plan.rivals`.

    Raises UsageError for an impossible request, NoPlanError where no setting fits.
    """
    machine = request.machine
    assert machine is not None, "a search on a machine needs one"
    time_limit_s = TIME_LIMIT_S if request.time_limit_s is None else request.time_limit_s
    request = replace(request, total_devices=len(machine.devices) if request.num_devices == "auto" else None)
    space = search_space(profile, request)
    settings = [
        (x, mode)
        for x, mode in product(space.strategies, space.recompute)
        if x.num_stages == x.num_devices <= len(machine.devices)
        if not (mode == "selected" and why_not_selected(x.schedule))
    ]
    if not settings:
        raise UsageError(
            f"no setting has one stage on each of at most {counted(len(machine.devices), 'device')}; name a schedule with one "
            "stage per device, such as --schedule 1f1b, or plan without --machine"
        )
    started_s, plans, num_tried = time.perf_counter(), list[Plan](), 0
    failure: NoPlanError | UsageError | None = None
    stopped = "the time was up"
    for x, mode in settings:
        left_s = time_limit_s - (time.perf_counter() - started_s)
        if plans and left_s <= 0:
            break
        progress(f"{x.num_microbatches} micro-batches, {schedule_info(x.schedule).title}", num_tried / len(settings))
        try:
            plans.append(
                balance_fixed(
                    profile,
                    replace(
                        request,
                        num_devices=x.num_devices,
                        total_devices=None,
                        num_microbatches=x.num_microbatches,
                        microbatch_size=x.microbatch_size,
                        schedule=x.schedule,
                        recompute=mode,
                        time_limit_s=max(1e-3, 2 * left_s / (len(settings) - num_tried)),
                    ),
                )
            )
        except (NoPlanError, UsageError) as error:  # of one setting, such as fewer stages than the cuts need
            if failure is None or isinstance(error, NoPlanError):
                failure = error
        except KeyboardInterrupt:
            if not plans:
                raise
            stopped = "the search was interrupted"
            break
        num_tried += 1
    if not plans:
        raise failure or NoPlanError("no setting was planned in time; allow more time (--time-limit)")
    solve_s, num_left = time.perf_counter() - started_s, len(settings) - num_tried
    is_open = f"{stopped} after {seconds_text(solve_s)}: {counted(num_left, 'setting')} of {len(settings)} are open"
    return _best(plans, is_open if num_left else "", solve_s=solve_s)


def _label(plan: Plan) -> str:
    return f"{schedule_info(plan.schedule).title}, {plan.num_microbatches} × {plan.microbatch_size}, recompute {plan.recompute}"


def _best(plans: list[Plan], is_open: str, *, solve_s: float) -> Plan:
    """The plan with the shortest step; `is_open` says which settings were not planned, if any."""
    plans.sort(key=lambda x: (x.prediction.step_s, x.peak_bytes))
    best = plans[0]
    note = is_open or f"the best of {counted(len(plans), 'setting')} that fit"
    bound_s = 0.0 if is_open else min(x.proof.lower_bound_s for x in plans)
    return replace(
        best,
        proof=replace(best.proof, solver=f"search/{best.proof.solver}", lower_bound_s=bound_s, solve_s=solve_s),
        notes=(*best.notes, note),
        rivals=(*best.rivals, *(alternative_of(x, label=_label(x)) for x in plans[1:6])),
    )
