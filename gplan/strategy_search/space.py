"""The settings of a search: devices, replicas, micro-batches, schedule and recompute mode for one batch.

All settings have the same batch, so their steps can be compared. Of N devices, the number of replicas of K devices is
the largest one, at most N / K, that divides the batch. Micro-batches cut a replica's samples evenly, in profiled sizes
where possible and else in sizes between them, whose costs are interpolated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

from gplan.core import Profile, RecomputeMode, Sharding
from gplan.core.checks import SHARDINGS
from gplan.core.errors import UsageError
from gplan.core.units import counted
from gplan.corrections.sharding import division_gains
from gplan.partition.validation import (
    can_shard,
    check_choice,
    check_counts,
    check_recompute,
    check_sharding,
    check_split_backward,
    why_not_selected,
)
from gplan.schedules.registry import (
    canonical,
    default_num_microbatches,
    num_stages_of,
    schedule_info,
)
from gplan.schedules.request import PipelineSetting, PlanRequest

MOST_DEVICES = 16
"""The largest number of devices where none is given."""

AUTO_SCHEDULES = (
    "gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b:2", "interleaved-1f1b:3", "interleaved-1f1b:4", "looped-bfs:2",
    "zb-h1", "zb-v",
)  # fmt: skip
"""The simpler ones first: of plans that are otherwise equal, the first is taken."""

SIMPLEST = ("gpipe", "1f1b")
"""The schedules for one device, and those in which the first plan is searched."""

AUTO_RECOMPUTE: tuple[RecomputeMode, ...] = ("never", "selected", "except-last", "always")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting(PipelineSetting):
    """One way to run the model; its recompute mode is open."""

    microbatch_size: int
    sharding: Sharding = "none"

    @property
    def total_devices(self) -> int:
        """Devices of all replicas together."""
        return self.num_devices * self.num_replicas


def base_schedule(request: PlanRequest) -> str:
    """The schedule whose limits on stages and micro-batches count: the given one, or GPipe for "auto"."""
    return "gpipe" if request.schedule == "auto" else request.schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """All settings and recompute modes of a search, and notes for the result."""

    settings: tuple[Setting, ...]
    recompute: tuple[RecomputeMode, ...]
    per_device: bool  # maximise samples per second and device, instead of minimising the step
    notes: tuple[str, ...]


def search_space(profile: Profile, request: PlanRequest) -> Space:
    """All settings that meet the request; raises UsageError where there is none."""
    if request.machine is not None:
        most = len(request.machine.devices)
        request = replace(request, total_devices=most if request.num_devices == "auto" else None)
    check_request(profile, request)
    device_counts, notes = _device_counts(profile, request), list[str]()
    batch_size = request.batch_size
    if batch_size is None:
        batch_size = _default_batch_size(profile, request, max(device_counts))
        notes.append(
            f"the batch is {batch_size} samples, as in the plan that is made without a search; --batch-size sets it"
        )
    schedules, left_out = _schedules(profile, request, device_counts)
    recompute = AUTO_RECOMPUTE if request.recompute == "auto" else (cast(RecomputeMode, request.recompute),)
    batch_cuts = {k: _batch_cuts(profile, request, k, batch_size) for k in device_counts}
    shardings = {r: _shardings(profile, request, r) for r, _ in batch_cuts.values()}
    every = tuple(
        Setting(
            num_devices=k, num_replicas=r, num_microbatches=m, microbatch_size=size, schedule=name, sharding=sharding
        )
        for k, (r, cuts) in batch_cuts.items()
        for m, size in cuts
        for sharding in shardings[r]
        for name in schedules[k]
        if can_shard(name, sharding) and m <= (schedule_info(name).num_microbatches or m)
    )
    if not every:
        raise UsageError(_no_setting_text(profile, request, device_counts, batch_size))
    allowed = {x: [mode for mode in recompute if request.allows(replace(x, recompute=mode))] for x in every}
    settings = tuple(x for x, modes in allowed.items() if modes)
    if not settings:
        schedule = "auto" if request.schedule == "auto" else schedule_info(request.schedule).title
        raise UsageError(
            f"none of {counted(len(every), 'setting')} is allowed with schedule {schedule} and recompute {request.recompute}; leave "
            "more open: --schedule auto, --recompute auto, --k auto or --microbatches auto"
        )
    settings, pinned = _with_single_stages(settings, request)
    per_device = request.num_devices == "auto" and request.total_devices is None
    if per_device:
        notes.append(
            f"of {device_counts[0]} to {device_counts[-1]} devices this trains the most samples a second and device; "
            "--devices N asks for the shortest step on N devices"
        )
    notes += (*left_out, *pinned)
    possible = tuple(mode for mode in recompute if any(mode in allowed[x] for x in settings))
    return Space(settings=settings, recompute=possible, per_device=per_device, notes=tuple(notes))


def _with_single_stages(
    settings: tuple[Setting, ...], request: PlanRequest
) -> tuple[tuple[Setting, ...], tuple[str, ...]]:
    """On a machine, and with pins, only settings with one stage per device; with a note for pins.

    Of schedules with chunks a stage's number is another part of the model.
    """
    single = tuple(x for x in settings if x.num_stages == x.num_devices)
    if request.machine is None:
        if not request.constraints.pins or len(single) in (0, len(settings)):
            return settings, ()
        return single, ("--pin names stages, so schedules with several stages a device were left out",)
    most = len(request.machine.devices)
    single = tuple(x for x in single if x.num_devices <= most)
    if not single:
        raise UsageError(
            f"no setting has one stage on each of at most {counted(most, 'device')}; name a schedule with one "
            "stage per device, such as --schedule 1f1b, or plan without --machine"
        )
    return single, ()


def check_request(profile: Profile, request: PlanRequest) -> None:
    """Raise UsageError for an impossible request."""
    counts = {
        "micro-batches": request.num_microbatches,
        "devices": request.total_devices,
        "samples a batch": request.batch_size,
        "samples a micro-batch": request.microbatch_size,
    }
    for name, count in counts.items():
        if isinstance(count, int) and count < 1:
            raise UsageError(f"asked for {count} {name}; expected at least 1")
    check_choice("recompute", request.recompute, (*AUTO_RECOMPUTE, "auto"))
    schedule = base_schedule(request)
    check_recompute(schedule, request.recompute)
    check_choice("sharding", request.sharding, (*SHARDINGS, "auto"))
    if request.sharding != "auto":
        check_sharding(schedule, request.sharding)
    num_devices = (
        request.num_devices if isinstance(request.num_devices, int) else schedule_info(schedule).num_devices or 1
    )
    check_counts(profile, schedule, num_devices=num_devices, num_microbatches=1, num_replicas=1)
    if request.total_devices is not None and num_devices > request.total_devices:
        remedy = f"try --k {request.total_devices} or fewer, or --k auto"
        if schedule_info(schedule).num_devices is not None:
            remedy = f"use --devices {num_devices} or more, or an order of fewer devices"
        raise UsageError(
            f"a pipeline of {num_devices} devices was asked for, but --devices is {request.total_devices}; {remedy}"
        )


def _device_counts(profile: Profile, request: PlanRequest) -> tuple[int, ...]:
    """Every K to search."""
    if isinstance(request.num_devices, int):
        return (request.num_devices,)
    info = schedule_info(base_schedule(request))
    if info.num_devices is not None:
        return (info.num_devices,)
    return tuple(range(1, min(len(profile.layers) // info.num_chunks, request.total_devices or MOST_DEVICES) + 1))


def _shardings(profile: Profile, request: PlanRequest, num_replicas: int) -> tuple[Sharding, ...]:
    """What R replicas may divide; one has nothing to divide. Whole stages are left out where they gain nothing."""
    if request.sharding != "auto" or num_replicas == 1:
        return ("none" if num_replicas == 1 else cast(Sharding, request.sharding),)
    return SHARDINGS[1:] if division_gains(profile, num_replicas=num_replicas) else SHARDINGS


def _schedules(
    profile: Profile, request: PlanRequest, device_counts: Sequence[int]
) -> tuple[dict[int, tuple[str, ...]], tuple[str, ...]]:
    """The schedules for each K, and notes on those left out."""
    if request.schedule != "auto":
        check_split_backward(request.schedule, has_halves=profile.has_halves)
        return {k: (canonical(request.schedule),) for k in device_counts}, ()
    has_halves = profile.has_halves
    possible = [x for x in AUTO_SCHEDULES if has_halves or not schedule_info(x).splits_backward]
    if request.recompute == "selected":
        possible = [x for x in possible if not why_not_selected(x)]
    found = {
        k: SIMPLEST if k == 1 else tuple(x for x in possible if num_stages_of(x, k) <= len(profile.layers))
        for k in device_counts
    }
    return found, tuple(_left_out(profile, request, found, has_halves=has_halves))


def _left_out(
    profile: Profile, request: PlanRequest, found: dict[int, tuple[str, ...]], *, has_halves: bool
) -> Iterator[str]:
    num_layers, most = len(profile.layers), max(found)
    if most == 1:
        return
    if request.recompute == "selected":
        yield "schedules with several stages a device, or with a split backward, were left out: they select no layers"
        return
    if not has_halves:
        split = " and ".join(x for x in AUTO_SCHEDULES if schedule_info(x).splits_backward)
        yield f"{split} were left out: the profile does not say how long the halves of a backward take"
    large = [x for x in AUTO_SCHEDULES if num_stages_of(x, most) > max(most, num_layers)]
    where = [f"{x} on more than {counted(num_layers // schedule_info(x).num_chunks, 'device')}" for x in large]
    if where:
        yield f"{', '.join(where)}: left out, as the model has {counted(num_layers, 'layer')}"


def _default_batch_size(profile: Profile, request: PlanRequest, most: int) -> int:
    """The batch of the plan for the most devices with default micro-batches of the largest profiled size."""
    size = request.microbatch_size or profile.microbatch_sizes[-1]
    given = request.num_microbatches if isinstance(request.num_microbatches, int) else None
    num_replicas = (request.total_devices or most) // most if request.machine is None else 1
    return num_replicas * (given or _default_microbatches(request, most)) * size


def _default_microbatches(request: PlanRequest, num_devices: int) -> int:
    """The micro-batches of a custom order, or four for each device."""
    return _most_microbatches(request) or default_num_microbatches(num_devices)


def _most_microbatches(request: PlanRequest) -> int | None:
    """Those of a custom order; None: no limit."""
    return None if request.schedule == "auto" else schedule_info(request.schedule).num_microbatches


def _batch_cuts(
    profile: Profile, request: PlanRequest, num_devices: int, batch_size: int
) -> tuple[int, list[tuple[int, int]]]:
    """The most replicas that can share the batch, and the micro-batches of each and their size, for every way to cut it."""
    most = 1
    if request.machine is None and request.total_devices is not None:
        most = request.total_devices // num_devices
    for num_replicas in range(most, 0, -1):
        if batch_size % num_replicas == 0:
            found = _microbatch_cuts(profile, request, num_devices, batch_size // num_replicas)
            if found:
                return num_replicas, found
    return 1, []


def _microbatch_cuts(
    profile: Profile, request: PlanRequest, num_devices: int, num_samples: int
) -> list[tuple[int, int]]:
    """The micro-batches and their size, for every way to cut a replica's samples."""
    sizes = profile.microbatch_sizes
    wanted = request.num_microbatches
    if wanted is None and request.num_devices != "auto":
        wanted = _default_microbatches(request, num_devices)
    found = [
        (num_samples // size, size)
        for size in range(sizes[0], sizes[-1] + 1)
        if num_samples % size == 0
        and request.microbatch_size in (None, size)
        and (not isinstance(wanted, int) or wanted == num_samples // size)
    ]
    return [pair for pair in found if pair[1] in sizes] or found


def _no_setting_text(profile: Profile, request: PlanRequest, device_counts: Sequence[int], batch_size: int) -> str:
    sizes = profile.microbatch_sizes
    most = _most_microbatches(request)
    into = f"{request.num_microbatches} micro-batches" if isinstance(request.num_microbatches, int) else "micro-batches"
    into += "" if most is None else f" (at most {most}, which the custom order has)"
    within = f"{sizes[0]} to {sizes[-1]} samples" if len(sizes) > 1 else f"{sizes[0]} samples"
    devices = (
        counted(device_counts[0], "device")
        if len(device_counts) == 1
        else f"{device_counts[0]} to {device_counts[-1]} devices"
    )
    given = f" (--microbatch-size {request.microbatch_size})" if request.microbatch_size else ""
    return (
        f"a batch of {batch_size} samples cannot be cut evenly into {into} of {within}, which were profiled{given}, for "
        f"{devices}; try another --batch-size, or --microbatches auto"
    )
