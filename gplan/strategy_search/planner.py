"""The planner: one function from a profile and a request to a plan.

A request whose dials are all values is one partition problem; open dials are searched together (`search.py`).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any, cast

from gplan.core import OBJECTIVES, Plan, Profile
from gplan.core.errors import UsageError
from gplan.core.progress import Progress, no_progress
from gplan.partition.balance import balance_fixed
from gplan.partition.validation import check_choice, check_counts
from gplan.schedules.registry import check_custom_counts, default_num_microbatches, schedule_info
from gplan.schedules.request import PlanRequest, any_setting
from gplan.strategy_search.search import search


def plan(profile: Profile, request: PlanRequest, *, progress: Progress = no_progress) -> Plan:
    """The best plan for a request, with a lower bound and the gap in `Plan.proof`.

    Raises UsageError for an impossible request, NoPlanError where no plan fits the memory or none was found in time.
    """
    request = with_counts(request)
    if not request.is_open:
        return balance_fixed(profile, _with_microbatch_size(profile, request))
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
