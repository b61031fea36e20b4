"""The planner: one function from a profile and a request to a plan.

A request whose dials are all values is one partition problem; open dials are searched together (`search.py`).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from gplan.core import OBJECTIVES, Plan, Profile
from gplan.core.errors import UsageError
from gplan.core.progress import Progress, no_progress
from gplan.partition.balance import balance_fixed
from gplan.partition.validation import check_choice
from gplan.schedules.registry import check_custom_counts, default_num_microbatches, schedule_info
from gplan.schedules.request import PlanRequest, any_setting
from gplan.strategy_search.search import search


def plan(profile: Profile, request: PlanRequest, *, progress: Progress = no_progress) -> Plan:
    """The best plan for a request, with a lower bound and the gap in `Plan.proof`.

    Raises UsageError for an impossible request, NoPlanError where no plan fits the memory or none was found in time.
    """
    request = with_counts(request)
    if not request.is_open:
        return balance_fixed(profile, _with_microbatch_size(request))
    _check_searchable(request)
    return search(profile, request, progress=progress)


def balance(profile: Profile, *, progress: Progress = no_progress, **dials: Any) -> Plan:
    """The best plan for the dials of a `PlanRequest`, given by name.

    >>> balance(profile, num_devices=4, num_microbatches=16, schedule="1f1b")  # doctest: +SKIP
    >>> balance(profile, total_devices=64, schedule="auto", recompute="auto")  # doctest: +SKIP
    """
    return plan(profile, PlanRequest(**dials), progress=progress)


def with_counts(request: PlanRequest) -> PlanRequest:
    """The request with the numbers of devices and micro-batches that a custom order has; without open dials by default
    four micro-batches a device."""
    num_devices, num_microbatches, schedule = request.num_devices, request.num_microbatches, request.schedule
    if schedule != "auto":
        check_custom_counts(schedule, num_devices=num_devices, num_microbatches=num_microbatches)
        info = schedule_info(schedule)
        num_devices = info.num_devices if num_devices is None else num_devices
        num_microbatches = info.num_microbatches if num_microbatches is None else num_microbatches
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


def _with_microbatch_size(request: PlanRequest) -> PlanRequest:
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
        small = [m for m in range(1, math.isqrt(num_samples) + 1) if num_samples % m == 0]
        fitting = sorted({*small, *(num_samples // m for m in small)}, key=lambda m: abs(m - count))
        raise UsageError(
            f"a batch of {request.batch_size} cannot be cut into {count} equal micro-batches; "
            f"try --microbatches {' or '.join(map(str, sorted(fitting[:6])))}"
        )
    return replace(request, microbatch_size=num_samples // count)


def _check_searchable(request: PlanRequest) -> None:
    """Raise UsageError for what a search does not have."""
    check_choice("minimize", request.minimize, OBJECTIVES)
    clashes = {
        f"--minimize {request.minimize}": request.minimize != "step-time",
        f"--solver {request.solver}": request.solver not in ("auto", "dp"),
    }
    if request.machine is not None:
        clashes |= {
            "--devices with --machine": request.total_devices is not None,
            "--for with --machine": request.allows is not any_setting,
            "--shard with --machine": request.sharding != "none",
        }
    for option, is_given in clashes.items():
        if is_given:
            raise UsageError(
                f"{option} cannot be used in a search: give --k and --microbatches as numbers, --schedule and --recompute "
                "by name, --shard none, and no --devices"
            )
