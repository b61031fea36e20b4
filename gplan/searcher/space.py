"""Which ways to run a model a search looks at: stages, replicas, micro-batches, schedule and recompute for one batch.

The batch is the same for all, so that their steps can be compared. Given N devices, K stages have as many replicas as
fit and share the batch evenly, at most N / K. The micro-batches of a replica are its samples cut evenly into sizes
within the profiled ones; where any of these was profiled, only such, as the costs of others are interpolated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from gplan.errors import UsageError
from gplan.nouns import Profile, RecomputeMode

Auto: TypeAlias = Literal["auto"]

MOST_STAGES = 16
"""The most stages that are tried where neither they nor the devices are given."""

AUTO_SCHEDULES = ("gpipe", "1f1b")
AUTO_RECOMPUTE: tuple[RecomputeMode, ...] = ("never", "selected", "except-last", "always")
_MICROBATCHES_PER_STAGE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is given and what is to be found ("auto"); None: as said in each comment."""

    num_stages: int | Auto
    num_microbatches: int | Auto | None  # None: four a stage, or "auto" where the stages are
    schedule: str
    recompute: str
    num_devices: int | None  # None: no replicas, and a device for each stage
    batch_size: int | None  # None: that of the plan that would be made without a search
    microbatch_size: int | None  # None: any


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Setting:
    """One way to run the model, but for what is recomputed."""

    num_stages: int
    num_replicas: int
    num_microbatches: int
    microbatch_size: int
    schedule: str

    @property
    def num_devices(self) -> int:
        """Of all replicas together."""
        return self.num_stages * self.num_replicas


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
    every, notes = _numbers_of_stages(profile, asked), list[str]()
    batch_size = asked.batch_size
    if batch_size is None:
        batch_size = _usual_batch_size(profile, asked, max(every))
        notes.append(
            f"the batch is {batch_size} samples, as in the plan that is made without a search; --batch-size sets it"
        )
    schedules = AUTO_SCHEDULES if asked.schedule == "auto" else (asked.schedule,)
    settings = tuple(
        Setting(num_stages=k, num_replicas=r, num_microbatches=m, microbatch_size=size, schedule=name)
        for k in every
        for r, m, size in _shares(profile, asked, k, batch_size)
        for name in schedules
    )
    if not settings:
        raise UsageError(_no_setting_text(profile, asked, every, batch_size))
    per_device = asked.num_stages == "auto" and asked.num_devices is None
    if per_device:
        notes.append(
            f"of {every[0]} to {every[-1]} stages this trains the most samples a second and device; "
            "--devices N asks for the shortest step on N devices"
        )
    recompute = AUTO_RECOMPUTE if asked.recompute == "auto" else (_mode(asked.recompute),)
    return Space(settings=settings, recompute=recompute, per_device=per_device, notes=tuple(notes))


def check_asked(profile: Profile, asked: Asked) -> None:
    """Raise UsageError for what cannot be searched."""
    num_layers = len(profile.layers)
    counts = {
        "stages": asked.num_stages,
        "micro-batches": asked.num_microbatches,
        "devices": asked.num_devices,
        "samples a batch": asked.batch_size,
        "samples a micro-batch": asked.microbatch_size,
    }
    for name, count in counts.items():
        if isinstance(count, int) and count < 1:
            raise UsageError(f"asked for {count} {name}; expected at least 1")
    for name, found, known in (
        ("schedule", asked.schedule, (*AUTO_SCHEDULES, "auto")),
        ("recompute", asked.recompute, (*AUTO_RECOMPUTE, "auto")),
    ):
        if found not in known:
            raise UsageError(f"{name} {found!r} is not known; expected one of {', '.join(known)}")
    if isinstance(asked.num_stages, int) and asked.num_stages > num_layers:
        raise UsageError(
            f"asked for {asked.num_stages} stages of a model with {num_layers} layers; a stage holds at least one layer, "
            f"so try --k {num_layers} or fewer"
        )
    if asked.num_devices is not None and isinstance(asked.num_stages, int) and asked.num_stages > asked.num_devices:
        raise UsageError(
            f"{asked.num_stages} stages need as many devices, but --devices is {asked.num_devices}; "
            f"try --k {asked.num_devices} or fewer, or --k auto"
        )


def _numbers_of_stages(profile: Profile, asked: Asked) -> tuple[int, ...]:
    if asked.num_stages != "auto":
        return (asked.num_stages,)
    return tuple(range(1, min(len(profile.layers), asked.num_devices or MOST_STAGES) + 1))


def _usual_batch_size(profile: Profile, asked: Asked, most_stages: int) -> int:
    """Samples a step of the plan with the most stages, four micro-batches for each, of the largest profiled size."""
    size = asked.microbatch_size or profile.microbatch_sizes[-1]
    given = asked.num_microbatches if isinstance(asked.num_microbatches, int) else None
    num_replicas = (asked.num_devices or most_stages) // most_stages
    return num_replicas * (given or _MICROBATCHES_PER_STAGE * most_stages) * size


def _shares(profile: Profile, asked: Asked, num_stages: int, batch_size: int) -> Iterator[tuple[int, int, int]]:
    """How a batch can be shared out: replicas, micro-batches of each, samples in one."""
    most = 1 if asked.num_devices is None else asked.num_devices // num_stages
    for num_replicas in range(most, 0, -1):
        if batch_size % num_replicas == 0:
            found = _cuts(profile, asked, num_stages, batch_size // num_replicas)
            if found:
                yield from ((num_replicas, num_microbatches, size) for num_microbatches, size in found)
                return


def _cuts(profile: Profile, asked: Asked, num_stages: int, num_samples: int) -> list[tuple[int, int]]:
    """The micro-batches, and the samples in each, that a replica's samples can be cut into."""
    sizes = profile.microbatch_sizes
    wanted = asked.num_microbatches
    if wanted is None and asked.num_stages != "auto":
        wanted = _MICROBATCHES_PER_STAGE * num_stages
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
    into = f"{asked.num_microbatches} micro-batches" if isinstance(asked.num_microbatches, int) else "micro-batches"
    within = f"{sizes[0]} to {sizes[-1]} samples" if len(sizes) > 1 else f"{sizes[0]} samples"
    stages = f"{every[0]} stages" if len(every) == 1 else f"{every[0]} to {every[-1]} stages"
    given = f" (--microbatch-size {asked.microbatch_size})" if asked.microbatch_size else ""
    return (
        f"a batch of {batch_size} samples cannot be cut evenly into {into} of {within}, which were profiled{given}, for "
        f"{stages}; try another --batch-size, or --microbatches auto"
    )


def _mode(name: str) -> RecomputeMode:
    return next(mode for mode in AUTO_RECOMPUTE if mode == name)
