"""Checks that reject impossible requests before anything is planned: numbers, objectives, recompute, split backwards."""

from __future__ import annotations

from gplan.core import Profile
from gplan.core.checks import SHARDINGS
from gplan.core.errors import UsageError
from gplan.core.units import counted
from gplan.schedules.dependencies import execution_order
from gplan.schedules.registry import make_schedule, num_stages_of, schedule_info


def check_choice(name: str, found: str, choices: tuple[str, ...]) -> None:
    """Raise UsageError if `found` is not one of the choices."""
    if found not in choices:
        raise UsageError(f"{name} {found!r} is not known; expected one of {', '.join(choices)}")


def check_limits(*, memory_bytes: int | None, time_limit_s: float | None) -> None:
    """Raise UsageError for a time limit, or a memory of each device, that is not positive; None sets no limit."""
    if time_limit_s is not None and not time_limit_s > 0:
        raise UsageError(f"the time limit is {time_limit_s:g} s; expected more than 0")
    if memory_bytes is not None and memory_bytes < 1:
        raise UsageError(f"the memory of each device is {memory_bytes} bytes; expected at least 1")


def check_counts(
    profile: Profile, schedule: str, *, num_devices: int, num_microbatches: int, num_replicas: int
) -> None:
    """Raise UsageError for numbers that the model or the schedule does not allow, or a schedule that deadlocks."""
    num_layers, info = len(profile.layers), schedule_info(schedule)
    most = num_layers // info.num_chunks
    if num_devices < 1:
        what = "stages" if info.num_chunks == 1 else f"devices of {info.num_chunks} stages each"
        raise UsageError(f"asked for {num_devices} {what}; expected 1 to {most}, as the model has {num_layers} layers")
    if num_microbatches < 1:
        raise UsageError(f"asked for {num_microbatches} micro-batches; expected at least 1")
    if num_replicas < 1:
        raise UsageError(f"asked for {num_replicas} replicas; expected at least 1")
    num_stages = num_stages_of(schedule, num_devices)
    if num_stages > num_layers:
        raise UsageError(_too_many_stages_text(schedule, num_devices, num_stages, num_layers))
    try:
        execution_order(make_schedule(schedule, num_devices=num_devices, num_microbatches=num_microbatches))
    except ValueError as error:
        raise UsageError(f"{info.title}: {error}") from error


def _too_many_stages_text(schedule: str, num_devices: int, num_stages: int, num_layers: int) -> str:
    info, most = schedule_info(schedule), num_layers // schedule_info(schedule).num_chunks
    if info.num_devices is not None:
        return f"the custom order has {num_stages} stages, the model has {num_layers} layers; {_ONE_LAYER}"
    if info.num_chunks == 1:
        return f"asked for {num_stages} stages of a model with {num_layers} layers; {_ONE_LAYER}: try --k {num_layers} or fewer"
    chunks = f"{counted(num_devices, 'device')} x {info.num_chunks} chunks = {num_stages} stages"
    remedy = f"try --k {most} or fewer, or fewer chunks" if most else "try a schedule with fewer chunks"
    return f"{info.title}: {chunks}, the model has {num_layers} layers; {_ONE_LAYER}: {remedy}"


_ONE_LAYER = "each stage needs at least one layer"


def check_recompute(schedule: str, recompute: str) -> None:
    """Raise UsageError for a recompute mode that the schedule does not allow."""
    reason = why_not_selected(schedule)
    if recompute == "selected" and reason:
        title = schedule_info(schedule).title
        raise UsageError(f"{reason}; expected --recompute never, always or except-last with {title}")


def why_not_selected(schedule: str) -> str:
    """Why recompute "selected" does not work with a schedule; "" if it does."""
    info = schedule_info(schedule)
    if info.num_chunks > 1:
        return "with several stages on a device, the best layers to recompute on one depend on the others"
    if info.splits_backward:
        return (
            "the memory between the halves of a backward is known only for stages that recompute everything or nothing"
        )
    return ""


def can_shard(schedule: str, sharding: str) -> bool:
    """Whether replicas can divide this much of stages: the second half of a backward needs weights that are freed by then."""
    return sharding != "weights" or not schedule_info(schedule).splits_backward


def check_sharding(schedule: str, sharding: str) -> None:
    """Raise UsageError for a way of sharding that there is not, or that the schedule cannot run."""
    check_choice("sharding", sharding, SHARDINGS)
    if not can_shard(schedule, sharding):
        raise UsageError(
            f"{schedule_info(schedule).title} splits backwards, whose second half needs weights that sharded replicas have freed by then; use "
            "--shard optimizer, or a schedule of whole backwards, such as 1f1b"
        )


def check_split_backward(schedule: str, *, has_halves: bool) -> None:
    """Raise UsageError for a schedule that splits the backward if the profile has no times of the halves."""
    if schedule_info(schedule).splits_backward and not has_halves:
        raise UsageError(
            f"{schedule_info(schedule).title} splits backwards into two halves, and the profile has no times of the "
            "halves; profile again (a note in the profile names layers whose backward cannot be split)"
        )
