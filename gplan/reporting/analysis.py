"""What a plan is compared with in a report: other numbers of micro-batches and devices, and its explanation.

The choices are the best plan for each K and M, with the plan's micro-batch size and schedule.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from gplan.core import Plan, Profile, Run
from gplan.core.errors import NoPlanError, UsageError
from gplan.core.progress import Progress, no_progress
from gplan.core.units import counted
from gplan.corrections import as_run_by
from gplan.evaluate.explain import Explanation, explain
from gplan.evaluate.replanning import replan, reprice, setting_of, with_links_of
from gplan.reporting.memory_snapshot import memory_snapshot
from gplan.reporting.subject import Subject, plan_of
from gplan.schedules.custom import is_custom_order
from gplan.schedules.registry import num_stages_of

_FACTORS = (1.0, 2.0, 0.5, 4.0, 0.25)  # of the plan's own numbers, the nearest first
_TIME_LIMIT_S = 8.0  # of the choices, and of the explanation's options


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAnalysis:
    """Other choices than the plan, and with its profile the explanation of the plan and what the allocators do."""

    choices: tuple[Plan, ...] = ()  # for each number of devices and micro-batches, the plan itself among them
    explanation: Explanation | None = None  # None: there was no profile
    memory_snapshot: bytes | None = None  # None: the profile has no tensors of layers


def analysis_of(subject: Subject, profile: Profile | None, *, progress: Progress = no_progress) -> PlanAnalysis:
    """Nothing without a profile; raises FileError if the plan was not made from it.

    A run's plan is compared with plans for the engine that ran it.
    """
    plan = plan_of(subject)
    if profile is None:
        return PlanAnalysis()
    engine = subject.engine if isinstance(subject, Run) else "torch"
    known = with_links_of(plan, as_run_by(profile, engine))
    reasons = explain(plan, known, options_s=_TIME_LIMIT_S, progress=progress)
    if reasons.notes and plan.prediction.gives(reprice(plan, profile, engine=engine).prediction.step_s):
        reasons = replace(reasons, notes=())
    tried = reasons.options[0].outcome is not None
    choices = planned_choices(plan, known, progress=progress) if tried else ()
    return PlanAnalysis(choices=choices, explanation=reasons, memory_snapshot=memory_snapshot(plan, known))


def planned_choices(plan: Plan, profile: Profile, *, progress: Progress = no_progress) -> tuple[Plan, ...]:
    """The best plan for each number of devices and micro-batches, without those that are infeasible or out of time."""
    setting, deadline_s = setting_of(plan), time.perf_counter() + _TIME_LIMIT_S
    found = [plan]
    own = plan.num_devices, plan.num_microbatches
    devices = [own[0]] if is_custom_order(plan.schedule) else _times(own[0])
    pairs = [(i + j, x, y) for i, x in enumerate(devices) for j, y in enumerate(_times(own[1]))]  # the nearest first
    most = len(profile.layers)
    wanted = [(x, y) for _, x, y in sorted(pairs) if (x, y) != own and num_stages_of(plan.schedule, x) <= most]
    for index, (num_devices, num_microbatches) in enumerate(wanted):
        if time.perf_counter() > deadline_s:
            break
        which = f"{counted(num_devices, 'device')}, {counted(num_microbatches, 'micro-batch')}"
        progress(f"step with {which}", index / len(wanted))
        other = replace(setting, num_devices=num_devices, num_microbatches=num_microbatches)
        try:
            found.append(replan(profile, other))
        except (UsageError, NoPlanError):
            continue
    return tuple(sorted(found, key=lambda x: (x.num_devices, x.num_microbatches)))


def _times(number: int) -> list[int]:
    """The number times each factor, if that is a whole number."""
    return [int(factor * number) for factor in _FACTORS if factor * number >= 1 and factor * number % 1 == 0]
