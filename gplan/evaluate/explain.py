"""Why a plan is as it is: its bottleneck, and what would help.

Everything is computed by the simulator, the balancer and the cost model that made the plan. The result is one value,
`Explanation`; `gplan.reporting.text.explanation` puts it in words.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from gplan.core import HostBound, Plan, Profile
from gplan.core.progress import Progress, no_progress
from gplan.evaluate.bottleneck import Bottleneck, find_bottleneck
from gplan.evaluate.compare import samples_per_s
from gplan.evaluate.options import Option, evaluate_options, memory_gain_s
from gplan.evaluate.replanning import (
    PlanSettings,
    other_times_notes,
    plan_with_cuts,
    profile_in_plan_order,
    setting_of,
    why_not_replannable,
    with_links_of,
)

OPTIONS_S = 20.0
"""Seconds after which no other option is tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A plan and the reasons for it."""

    model: str
    setting: PlanSettings
    step_s: float
    samples_per_s: float
    peak_bytes: int
    host_bound: HostBound | None
    bottleneck: Bottleneck
    options: tuple[Option, ...]
    notes: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()  # warnings of the profile: its times are uncertain


def explain(
    plan: Plan,
    profile: Profile,
    *,
    options_s: float = OPTIONS_S,
    progress: Progress = no_progress,
) -> Explanation:
    """The reasons for a plan, from a profile of its model.

    If the profile was measured again after the plan was made, all figures are from the new profile, and a note states
    this; a plan for a machine keeps its own times. Options that the time does not suffice for are named in the result.
    `progress` is called with a text and the share of the options done. Raises FileError where plan and profile do not
    belong together.
    """
    ordered, setting, why_not = profile_in_plan_order(plan, profile), setting_of(plan), why_not_replannable(plan)
    notes: tuple[str, ...] = ()
    options: tuple[Option, ...] = (
        Option(kind="same", label="as it is, balanced again", setting=setting, outcome=None, reason=why_not),
    )
    if not why_not:
        notes = tuple(f"{x}; all figures here are from this profile" for x in other_times_notes(plan, ordered))
        plan = plan_with_cuts(ordered, setting, plan.cuts) if notes else plan
        deadline_s = time.perf_counter() + options_s
        options = evaluate_options(with_links_of(plan, profile), setting, deadline_s=deadline_s, progress=progress)
    return Explanation(
        model=plan.model.name,
        setting=setting,
        step_s=plan.prediction.step_s,
        samples_per_s=samples_per_s(plan, plan.prediction.step_s),
        peak_bytes=plan.peak_bytes,
        host_bound=plan.prediction.host_bound,
        bottleneck=find_bottleneck(plan, memory_gain_s=memory_gain_s(options)),
        options=options,
        notes=notes,
        doubts=profile.doubts,
    )
