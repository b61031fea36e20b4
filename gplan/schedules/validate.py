"""Whether a plan fits its schedule: number of stages, their devices, and times of split backwards where it splits them."""

from __future__ import annotations

from dataclasses import dataclass

from gplan.core import ActionKind, Plan
from gplan.core.errors import UsageError
from gplan.schedules.dependencies import execution_order
from gplan.schedules.registry import make_schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleMismatch:
    """Why a plan cannot be executed with its schedule, and the field of the plan, such as `.stages[2].device`."""

    reason: str
    path: str


def schedule_mismatch(plan: Plan) -> ScheduleMismatch | None:
    """The first contradiction between a plan and its schedule; None if there is none. O(actions)."""
    try:
        schedule = make_schedule(plan.schedule, num_devices=plan.num_devices, num_microbatches=plan.num_microbatches)
        execution_order(schedule)
    except (UsageError, ValueError) as error:
        return ScheduleMismatch(reason=str(error), path=".schedule")
    if schedule.num_stages != plan.num_stages:
        expected = f"expected {schedule.num_stages} for {schedule.name} on {plan.num_devices} devices"
        return ScheduleMismatch(reason=f"there are {plan.num_stages} stages; {expected}", path=".stages")
    for stage, (expected_device, device) in enumerate(zip(schedule.devices, plan.devices, strict=True)):
        if device != expected_device:
            reason = f"stage {stage} is on device {device}; expected device {expected_device} for {schedule.name}"
            return ScheduleMismatch(reason=reason, path=f".stages[{stage}].device")
    split = {x.stage for order in schedule.orders for x in order if x.kind is ActionKind.WEIGHT_GRADIENT}
    for stage in sorted(split - {0}):  # stage 0 computes no input gradient
        cost = plan.stages[stage].cost
        if cost.input_gradient_s is None or cost.weight_gradient_s is None:
            reason = f"{schedule.name} splits the backward of stage {stage}, but the seconds of its halves are missing"
            return ScheduleMismatch(reason=reason, path=f".stages[{stage}].cost")
    return None
