"""Which ways to run a model a search looks at: devices, replicas, micro-batches, schedule and recompute for one batch.

The batch is the same for all, so that their steps can be compared. Given N devices, pipelines of K of them are as many
as fit and share the batch evenly, at most N / K. Each device has as many stages as the schedule has chunks. The
micro-batches of a replica are its samples cut evenly into sizes within the profiled ones; where any of these was
profiled, only such, as the costs of others are interpolated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from gplan.core import Profile, RecomputeMode
from gplan.core.errors import UsageError
from gplan.core.units import counted
from gplan.cost.stage_costs import Costs
from gplan.partition.validation import (
    check_choice,
    check_counts,
    check_recompute,
    check_split_backward,
    why_not_selected,
)
from gplan.schedules.registry import canonical, check_custom_counts, num_stages_of, schedule_info

Auto: TypeAlias = Literal["auto"]

MOST_DEVICES = 16
"""The most devices that are tried where their number is not given."""

AUTO_SCHEDULES = (
    "gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b:2", "interleaved-1f1b:3", "interleaved-1f1b:4", "looped-bfs:2",
    "zb-h1", "zb-v",
)  # fmt: skip
"""The simpler ones first: of plans that are as good in all else, the first is taken."""

SIMPLEST = ("gpipe", "1f1b")
"""All that there is to choose on one device, where nobody waits for anybody."""

AUTO_RECOMPUTE: tuple[RecomputeMode, ...] = ("never", "selected", "except-last", "always")
_MICROBATCHES_PER_DEVICE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is given and what is to be found ("auto"); None: as said in each comment."""

    num_devices: int | Auto  # K, the devices of a pipeline
    num_microbatches: int | Auto | None  # None: those of a custom order, four a device, or "auto" where the devices are
    schedule: str
    recompute: str
    most_devices: int | None  # of all replicas together; None: no replicas
    batch_size: int | None  # None: that of the plan that would be made without a search
    microbatch_size: int | None  # None: any


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Setting:
    """One way to run the model, but for what is recomputed."""

    num_devices: int  # K, of one replica
    num_replicas: int
    num_microbatches: int
    microbatch_size: int
    schedule: str

    @property
    def num_stages(self) -> int:
        """On all devices of a replica together."""
        return num_stages_of(self.schedule, self.num_devices)

    @property
    def num_used(self) -> int:
        """Devices of all replicas together."""
        return self.num_devices * self.num_replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Everything that is looked at, and what a reader of the result must know of it."""

    settings: tuple[Setting, ...]
    recompute: tuple[RecomputeMode, ...]
    per_device: bool  # the most samples a second and device is sought, not the shortest step
    notes: tuple[str, ...]


def space_of(profile: Profile, asked: Asked) -> Space:
    """All settings that what was asked for leaves open; raises UsageError where there is none."""
    check_asked(profile, asked)
    every, notes = _numbers_of_devices(profile, asked), list[str]()
    batch_size = asked.batch_size
    if batch_size is None:
        batch_size = _usual_batch_size(profile, asked, max(every))
        notes.append(
            f"the batch is {batch_size} samples, as in the plan that is made without a search; --batch-size sets it"
        )
    schedules, left_out = _schedules(profile, asked, every)
    settings = tuple(
        Setting(num_devices=k, num_replicas=r, num_microbatches=m, microbatch_size=size, schedule=name)
        for k in every
        for r, m, size in _shares(profile, asked, k, batch_size)
        for name in schedules[k]
        if m <= (schedule_info(name).num_microbatches or m)
    )
    if not settings:
        raise UsageError(_no_setting_text(profile, asked, every, batch_size))
    per_device = asked.num_devices == "auto" and asked.most_devices is None
    if per_device:
        notes.append(
            f"of {every[0]} to {every[-1]} devices this trains the most samples a second and device; "
            "--devices N asks for the shortest step on N devices"
        )
    notes += left_out
    recompute = AUTO_RECOMPUTE if asked.recompute == "auto" else (_mode(asked.recompute),)
    return Space(settings=settings, recompute=recompute, per_device=per_device, notes=tuple(notes))


def check_asked(profile: Profile, asked: Asked) -> None:
    """Raise UsageError for what cannot be searched."""
    counts = {
        "micro-batches": asked.num_microbatches,
        "devices": asked.most_devices,
        "samples a batch": asked.batch_size,
        "samples a micro-batch": asked.microbatch_size,
    }
    for name, count in counts.items():
        if isinstance(count, int) and count < 1:
            raise UsageError(f"asked for {count} {name}; expected at least 1")
    check_choice("recompute", asked.recompute, (*AUTO_RECOMPUTE, "auto"))
    schedule = "gpipe" if asked.schedule == "auto" else asked.schedule
    check_custom_counts(schedule, num_microbatches=None if asked.num_microbatches == "auto" else asked.num_microbatches)
    check_recompute(schedule, asked.recompute)
    num_devices = asked.num_devices if isinstance(asked.num_devices, int) else schedule_info(schedule).num_devices or 1
    check_counts(profile, schedule, num_devices=num_devices, num_microbatches=1, num_replicas=1)
    if asked.most_devices is not None and isinstance(asked.num_devices, int) and asked.num_devices > asked.most_devices:
        raise UsageError(
            f"a pipeline of {asked.num_devices} devices was asked for, but --devices is {asked.most_devices}; "
            f"try --k {asked.most_devices} or fewer, or --k auto"
        )


def _numbers_of_devices(profile: Profile, asked: Asked) -> tuple[int, ...]:
    """Every K."""
    if asked.num_devices != "auto":
        return (asked.num_devices,)
    said = schedule_info("gpipe" if asked.schedule == "auto" else asked.schedule)
    most = min(len(profile.layers) // said.num_chunks, asked.most_devices or MOST_DEVICES)
    return tuple(k for k in range(1, most + 1) if said.num_devices in (None, k))


def _schedules(
    profile: Profile, asked: Asked, every: Sequence[int]
) -> tuple[dict[int, tuple[str, ...]], tuple[str, ...]]:
    """The schedules to look at for each K, and notes on what was left out and why."""
    if asked.schedule != "auto":
        check_split_backward(asked.schedule, Costs(profile, profile.microbatch_sizes[0], 1))
        return {k: (canonical(asked.schedule),) for k in every}, ()
    has_halves = all(Costs(profile, size, 1).has_halves for size in profile.microbatch_sizes)
    possible = [x for x in AUTO_SCHEDULES if has_halves or not schedule_info(x).splits_backward]
    if asked.recompute == "selected":
        possible = [x for x in possible if not why_not_selected(x)]
    found = {
        k: SIMPLEST if k == 1 else tuple(x for x in possible if num_stages_of(x, k) <= len(profile.layers))
        for k in every
    }
    return found, tuple(_left_out(profile, asked, found, has_halves=has_halves))


def _left_out(profile: Profile, asked: Asked, found: dict[int, tuple[str, ...]], *, has_halves: bool) -> Iterator[str]:
    num_layers, most = len(profile.layers), max(found)
    if most == 1:
        return
    if asked.recompute == "selected":
        yield "schedules with several stages a device, or with a split backward, were left out: they select no layers"
        return
    if not has_halves:
        split = " and ".join(x for x in AUTO_SCHEDULES if schedule_info(x).splits_backward)
        yield f"{split} were left out: the profile does not say how long the halves of a backward take"
    large = [x for x in AUTO_SCHEDULES if num_stages_of(x, most) > max(most, num_layers)]
    where = [f"{x} on more than {counted(num_layers // schedule_info(x).num_chunks, 'device')}" for x in large]
    if where:
        yield f"{', '.join(where)}: left out, as the model has {counted(num_layers, 'layer')}"


def _usual_batch_size(profile: Profile, asked: Asked, most: int) -> int:
    """Samples a step of the plan for the most devices with its usual micro-batches, of the largest profiled size."""
    size = asked.microbatch_size or profile.microbatch_sizes[-1]
    given = asked.num_microbatches if isinstance(asked.num_microbatches, int) else None
    num_replicas = (asked.most_devices or most) // most
    return num_replicas * (given or _usual_microbatches(asked, most)) * size


def _usual_microbatches(asked: Asked, num_devices: int) -> int:
    """As many as a custom order has, or four for each device."""
    return _most_microbatches(asked) or _MICROBATCHES_PER_DEVICE * num_devices


def _most_microbatches(asked: Asked) -> int | None:
    """Those of a custom order; None: no limit."""
    return None if asked.schedule == "auto" else schedule_info(asked.schedule).num_microbatches


def _shares(profile: Profile, asked: Asked, num_devices: int, batch_size: int) -> Iterator[tuple[int, int, int]]:
    """How a batch can be shared out: replicas, micro-batches of each, samples in one."""
    most = 1 if asked.most_devices is None else asked.most_devices // num_devices
    for num_replicas in range(most, 0, -1):
        if batch_size % num_replicas == 0:
            found = _cuts(profile, asked, num_devices, batch_size // num_replicas)
            if found:
                yield from ((num_replicas, num_microbatches, size) for num_microbatches, size in found)
                return


def _cuts(profile: Profile, asked: Asked, num_devices: int, num_samples: int) -> list[tuple[int, int]]:
    """The micro-batches, and the samples in each, that a replica's samples can be cut into."""
    sizes = profile.microbatch_sizes
    wanted = asked.num_microbatches
    if wanted is None and asked.num_devices != "auto":
        wanted = _usual_microbatches(asked, num_devices)
    found = [
        (num_samples // size, size)
        for size in range(sizes[0], sizes[-1] + 1)
        if num_samples % size == 0
        and asked.microbatch_size in (None, size)
        and (not isinstance(wanted, int) or wanted == num_samples // size)
    ]
    return [pair for pair in found if pair[1] in sizes] or found


def _no_setting_text(profile: Profile, asked: Asked, every: Sequence[int], batch_size: int) -> str:
    sizes = profile.microbatch_sizes
    most = _most_microbatches(asked)
    into = f"{asked.num_microbatches} micro-batches" if isinstance(asked.num_microbatches, int) else "micro-batches"
    into += "" if most is None else f" (at most {most}, which the custom order has)"
    within = f"{sizes[0]} to {sizes[-1]} samples" if len(sizes) > 1 else f"{sizes[0]} samples"
    devices = counted(every[0], "device") if len(every) == 1 else f"{every[0]} to {every[-1]} devices"
    given = f" (--microbatch-size {asked.microbatch_size})" if asked.microbatch_size else ""
    return (
        f"a batch of {batch_size} samples cannot be cut evenly into {into} of {within}, which were profiled{given}, for "
        f"{devices}; try another --batch-size, or --microbatches auto"
    )


def _mode(name: str) -> RecomputeMode:
    return next(mode for mode in AUTO_RECOMPUTE if mode == name)
