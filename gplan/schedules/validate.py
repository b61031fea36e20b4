"""Whether the stages of a plan can carry out its schedule: as many as it has, on its devices,
with the halves that it splits."""

from __future__ import annotations

from dataclasses import dataclass

from gplan.core import ActionKind, Plan, Schedule
from gplan.core.errors import UsageError
from gplan.schedules.dependencies import execution_order
from gplan.schedules.registry import make_schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleMismatch:
    """What a plan and its schedule disagree on."""

    reason: str
    place: str  # in the plan, such as ".stages[2].device"


def schedule_mismatch(plan: Plan) -> ScheduleMismatch | None:
    """Why a plan cannot be carried out as its schedule says; None where it can. O(actions)."""
    try:
        schedule = make_schedule(plan.schedule, num_devices=plan.num_devices, num_microbatches=plan.num_microbatches)
        execution_order(schedule)
    except (UsageError, ValueError) as error:
        return ScheduleMismatch(reason=str(error), place=".schedule")
    if schedule.num_stages != plan.num_stages:
        expected = f"expected {schedule.num_stages} for {schedule.name} on {plan.num_devices} devices"
        return ScheduleMismatch(reason=f"there are {plan.num_stages} stages; {expected}", place=".stages")
    pairs = zip(schedule.devices, plan.devices, strict=True)
    moved = next((stage for stage, (device, found) in enumerate(pairs) if device != found), None)
    if moved is not None:
        found, expected = plan.devices[moved], f"expected device {schedule.devices[moved]} for {schedule.name}"
        return ScheduleMismatch(
            reason=f"stage {moved} is on device {found}; {expected}", place=f".stages[{moved}].device"
        )
    return _unsplit(plan, schedule)


def _unsplit(plan: Plan, schedule: Schedule) -> ScheduleMismatch | None:
    """A stage whose backward is split and that has no times for the halves; the first stage needs none."""
    split = {x.stage for order in schedule.orders for x in order if x.kind is ActionKind.WEIGHT_GRADIENT and x.stage}
    for stage in sorted(split):
        cost = plan.stages[stage].cost
        if cost.input_gradient_s is None or cost.weight_gradient_s is None:
            reason = f"{schedule.name} splits the backward of stage {stage}, and the halves' seconds are missing"
            return ScheduleMismatch(reason=reason, place=f".stages[{stage}].cost")
    return None
