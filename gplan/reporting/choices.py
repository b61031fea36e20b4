"""The step time for other numbers of micro-batches M and devices K, with the plan's micro-batch size and schedule.

From a plan alone: its own stages with other M. With the profile that it was made from: the best plan for each K and M.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from gplan.core import Plan, Profile
from gplan.core.errors import NoPlanError, UsageError
from gplan.core.progress import Progress, no_progress
from gplan.core.units import counted
from gplan.evaluate.replanning import replan, setting_of
from gplan.schedules.custom import is_custom_order
from gplan.schedules.registry import num_stages_of
from gplan.simulation.simulator import simulate

_FACTORS = (1.0, 2.0, 0.5, 4.0, 0.25)  # of the plan's own numbers, the nearest first
_TIME_LIMIT_S = 8.0  # no other choice is tried after it


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPoint:
    """One number of devices (per replica) and micro-batches, with the predicted step."""

    num_devices: int
    num_microbatches: int
    batch_size: int
    step_s: float
    bubble: float
    is_plan: bool

    @property
    def sample_s(self) -> float:
        """Seconds of the step per sample."""
        return self.step_s / self.batch_size


def choices_of(plan: Plan) -> tuple[ScalingPoint, ...]:
    """The plan's own stages with fewer and more micro-batches, in ascending order."""
    return _in_order(_same_stages(plan))


def planned_choices(plan: Plan, profile: Profile, *, progress: Progress = no_progress) -> tuple[ScalingPoint, ...]:
    """The best plan for each number of devices and micro-batches, without those that are infeasible or out of time."""
    setting, deadline_s = setting_of(plan), time.perf_counter() + _TIME_LIMIT_S
    found = [_choice(plan, plan)]
    wanted = list(_wanted(plan, most_devices=len(profile.layers)))
    for index, (num_devices, num_microbatches) in enumerate(wanted):
        if time.perf_counter() > deadline_s:
            break
        which = f"{counted(num_devices, 'device')}, {counted(num_microbatches, 'micro-batch')}"
        progress(f"step with {which}", index / len(wanted))
        num_stages = num_stages_of(plan.schedule, num_devices)
        other = replace(setting, num_stages=num_stages, num_microbatches=num_microbatches)
        try:
            found.append(_choice(replan(profile, other), plan))
        except (UsageError, NoPlanError):
            continue
    return _in_order(found)


def _same_stages(plan: Plan) -> Iterator[ScalingPoint]:
    for num_microbatches in dict.fromkeys(_times(plan.num_microbatches)):
        other = replace(plan, num_microbatches=num_microbatches)
        try:
            timeline = simulate(other)
        except UsageError:  # the schedule has no order for that many
            continue
        prediction = replace(plan.prediction, step_s=timeline.step_s, bubble=timeline.bubble)
        yield _choice(replace(other, prediction=prediction), plan)


def _choice(found: Plan, plan: Plan) -> ScalingPoint:
    return ScalingPoint(
        num_devices=found.num_devices,
        num_microbatches=found.num_microbatches,
        batch_size=found.batch_size,
        step_s=found.prediction.step_s,
        bubble=found.prediction.bubble,
        is_plan=(found.num_devices, found.num_microbatches) == (plan.num_devices, plan.num_microbatches),
    )


def _wanted(plan: Plan, *, most_devices: int) -> Iterator[tuple[int, int]]:
    """Pairs of devices and micro-batches other than the plan's own, the nearest first."""
    own = plan.num_devices, plan.num_microbatches
    devices = [own[0]] if is_custom_order(plan.schedule) else _times(own[0])
    numbers = _times(own[1])
    pairs = [(i + j, x, y) for i, x in enumerate(devices) for j, y in enumerate(numbers)]
    for _, x, y in sorted(pairs):
        if (x, y) != own and num_stages_of(plan.schedule, x) <= most_devices:
            yield x, y


def _times(number: int) -> list[int]:
    """The number times each factor, if that is a whole number."""
    return [int(factor * number) for factor in _FACTORS if factor * number >= 1 and factor * number % 1 == 0]


def _in_order(found: Iterator[ScalingPoint] | list[ScalingPoint]) -> tuple[ScalingPoint, ...]:
    return tuple(sorted(found, key=lambda x: (x.num_devices, x.num_microbatches)))
