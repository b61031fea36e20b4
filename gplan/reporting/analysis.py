"""What a plan is compared with in a report: other numbers of micro-batches and devices, and its explanation.

The choices have the plan's micro-batch size and schedule. From a plan alone: its own stages with other M. With the
profile that it was made from: the best plan for each K and M.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from gplan.core import Plan, Profile, Run
from gplan.core.errors import NoPlanError, UsageError
from gplan.core.progress import Progress, no_progress
from gplan.core.units import counted
from gplan.corrections.contention import without_contention
from gplan.evaluate.explain import Explanation, explain
from gplan.evaluate.replanning import replan, reprice, setting_of
from gplan.reporting.subject import Subject, plan_of
from gplan.schedules.custom import is_custom_order
from gplan.schedules.registry import num_stages_of
from gplan.simulation.simulator import simulate

_FACTORS = (1.0, 2.0, 0.5, 4.0, 0.25)  # of the plan's own numbers, the nearest first
_TIME_LIMIT_S = 8.0  # of the choices, and of the explanation's options


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAnalysis:
    """Other choices than the plan, and with its profile the explanation of the plan."""

    choices: tuple[ScalingPoint, ...]
    explanation: Explanation | None = None  # None: there was no profile
    has_plans: bool = False  # whether the choices are plans of their own, or else the plan's stages


def analysis_of(subject: Subject, profile: Profile | None, *, progress: Progress = no_progress) -> PlanAnalysis:
    """The choices, and the explanation if there is a profile; raises FileError if the plan was not made from it.

    The plan of a run by the virtual engine has no contention, so the plans that it is compared with have none either.
    """
    plan = plan_of(subject)
    if profile is None:
        return PlanAnalysis(choices=choices_of(plan))
    is_alone = isinstance(subject, Run) and subject.engine == "virtual"
    known = without_contention(profile) if is_alone else profile
    reasons = explain(plan, known, options_s=_TIME_LIMIT_S, progress=progress)
    if is_alone and reasons.notes and plan.prediction.gives(reprice(plan, profile, engine="virtual").prediction.step_s):
        reasons = replace(reasons, notes=())
    tried = reasons.options[0].outcome is not None
    choices = planned_choices(plan, known, progress=progress) if tried else choices_of(plan)
    return PlanAnalysis(choices=choices, explanation=reasons, has_plans=tried)


def choices_of(plan: Plan) -> tuple[ScalingPoint, ...]:
    """The plan's own stages with fewer and more micro-batches, in ascending order."""
    found = []
    for num_microbatches in dict.fromkeys(_times(plan.num_microbatches)):
        other = replace(plan, num_microbatches=num_microbatches)
        try:
            timeline = simulate(other)
        except UsageError:  # the schedule has no order for that many
            continue
        prediction = replace(plan.prediction, step_s=timeline.step_s, bubble=timeline.bubble)
        found.append(_choice(replace(other, prediction=prediction), plan))
    return tuple(sorted(found, key=lambda x: x.num_microbatches))


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
        other = replace(setting, num_devices=num_devices, num_microbatches=num_microbatches)
        try:
            found.append(_choice(replan(profile, other), plan))
        except (UsageError, NoPlanError):
            continue
    return tuple(sorted(found, key=lambda x: (x.num_devices, x.num_microbatches)))


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
    pairs = [(i + j, x, y) for i, x in enumerate(devices) for j, y in enumerate(_times(own[1]))]
    for _, x, y in sorted(pairs):
        if (x, y) != own and num_stages_of(plan.schedule, x) <= most_devices:
            yield x, y


def _times(number: int) -> list[int]:
    """The number times each factor, if that is a whole number."""
    return [int(factor * number) for factor in _FACTORS if factor * number >= 1 and factor * number % 1 == 0]
