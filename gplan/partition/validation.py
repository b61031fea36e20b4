"""What can be asked of a schedule and a profile together: counts, halves of a backward, objectives, recompute."""

from __future__ import annotations

from gplan.core import Profile
from gplan.core.errors import UsageError
from gplan.core.units import counted
from gplan.cost.stage_costs import Costs
from gplan.schedules.dependencies import execution_order
from gplan.schedules.registry import make_schedule, num_stages_of, schedule_info


def check_choice(name: str, found: str, choices: tuple[str, ...]) -> None:
    """Raise UsageError for what is not one of the choices."""
    if found not in choices:
        raise UsageError(f"{name} {found!r} is not known; expected one of {', '.join(choices)}")


def check_counts(
    profile: Profile, schedule: str, *, num_devices: int, num_microbatches: int, num_replicas: int
) -> None:
    """Raise UsageError for numbers that the model or the schedule cannot have,
    or a schedule that cannot be carried out."""
    num_layers, said = len(profile.layers), schedule_info(schedule)
    most = num_layers // said.num_chunks
    if num_devices < 1:
        what = "stages" if said.num_chunks == 1 else f"devices of {said.num_chunks} stages each"
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
        raise UsageError(f"{said.title}: {error}") from error


def _too_many_stages_text(schedule: str, num_devices: int, num_stages: int, num_layers: int) -> str:
    said = schedule_info(schedule)
    if said.num_devices is not None:
        return (
            f"the custom order has {num_stages} stages, the model has {num_layers} layers; a stage holds at least one"
        )
    if said.num_chunks == 1:
        return (
            f"asked for {num_stages} stages of a model with {num_layers} layers; a stage holds at least one layer, so "
            f"try --k {num_layers} or fewer"
        )
    chunks = f"{counted(num_devices, 'device')} x {said.num_chunks} chunks = {num_stages} stages"
    most = num_layers // said.num_chunks
    remedy = f"try --k {most} or fewer, or fewer chunks" if most else "try a schedule with fewer chunks"
    return f"{said.title}: {chunks}, the model has {num_layers} layers; a stage holds at least one layer, so {remedy}"


def check_means(schedule: str, *, recompute: str, minimize: str) -> None:
    """Raise UsageError for an objective or a way to recompute that does not go with a schedule, or with each other."""
    said = schedule_info(schedule)
    if recompute == "selected" and minimize == "max-device-load":
        raise UsageError(
            "max-device-load counts weights as the only memory; expected another --recompute than selected"
        )
    reason = why_not_selected(schedule)
    if recompute == "selected" and reason:
        raise UsageError(f"{reason}; expected --recompute never, always or except-last with {said.title}")
    if minimize == "max-device-load" and said.num_chunks > 1:
        raise UsageError(
            f"max-device-load has one stage on each device, {said.title} has several; expected --minimize step-time, "
            "max-stage or max-compute, or another schedule"
        )


def why_not_selected(schedule: str) -> str:
    """Why layers to recompute cannot be selected with a schedule; "" where they can."""
    said = schedule_info(schedule)
    if said.num_chunks > 1:
        return "which layers a stage should recompute depends on what the other stages of its device do"
    if said.splits_backward:
        return "what a backward in halves keeps of layers that are recomputed is known of whole stages only"
    return ""


def check_halves(schedule: str, costs: Costs) -> None:
    """Raise UsageError for a schedule that splits the backward where the profile does not know its halves."""
    if schedule_info(schedule).splits_backward and not costs.has_halves:
        raise UsageError(
            f"{schedule_info(schedule).title} runs backwards in two halves, and the profile does not say how long each takes; "
            "profile again (a note of the profile says where a backward cannot be split)"
        )
