"""Whether a plan fits its schedule: number of stages, their devices, and times of split backwards where it splits them.

And whether a timeline has the actions of a step.
"""

from __future__ import annotations

from dataclasses import dataclass

from gplan.core import ActionKind, Plan, Timeline
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


def action_mismatch(timeline: Timeline, *, num_stages: int) -> str:
    """Which micro-batch has not one forward and one backward, whole or in halves, on a stage; "" if each has. O(actions)."""
    kinds: dict[tuple[int, int], list[ActionKind]] = {}
    for span in timeline.loop_spans:
        kinds.setdefault((span.action.stage, span.action.microbatch), []).append(span.action.kind)
    expected = {(stage, m) for stage in range(num_stages) for m in range(timeline.num_microbatches)}
    for stage, m in sorted(expected ^ kinds.keys()):
        found = "no action" if (stage, m) in expected else "actions"
        return (
            f"there are {found} of micro-batch {m} on stage {stage}; expected micro-batches 0 to "
            f"{timeline.num_microbatches - 1} on stages 0 to {num_stages - 1}"
        )
    whole = [ActionKind.FORWARD, ActionKind.BACKWARD]
    halves = [ActionKind.FORWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT]
    for (stage, m), own in kinds.items():
        if sorted(own) not in (sorted(whole), sorted(halves)):
            names = ", ".join(x.name.lower().replace("_", " ") for x in own)
            return f"micro-batch {m} has {names} on stage {stage}; expected one forward and one backward, whole or in halves"
    return ""
