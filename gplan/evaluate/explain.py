"""Why a plan is as it is: its bottleneck, what would help, and what baselines would do.

Everything is computed by the simulator, the balancer and the cost model that made the plan. The result is one value,
`Explanation`; `gplan.reporting.text.explanation` puts it in words.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from gplan.core import Plan, Profile
from gplan.core.errors import NoPlanError
from gplan.core.progress import Progress, no_progress
from gplan.corrections.microbatch_size import cost_at
from gplan.cost.action_seconds import occupied
from gplan.evaluate.bottleneck import Bottleneck, find_bottleneck
from gplan.evaluate.compare import samples_per_s
from gplan.evaluate.options import Option, evaluate_options, memory_gain_s
from gplan.evaluate.replanning import (
    PlanSettings,
    memory_excess,
    other_times_notes,
    plan_with_cuts,
    problem_of,
    profile_in_plan_order,
    setting_of,
    why_not_replannable,
)
from gplan.evaluate.rivals import THIS_PLAN
from gplan.partition.baselines import RULES
from gplan.partition.plan_evaluation import compute_s
from gplan.partition.problem import device_sums
from gplan.simulation.simulator import simulate

OPTIONS_S = 20.0
"""Seconds after which no other option is tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineOutcome:
    """The partition of a published rule of thumb for the same layers."""

    rule: str
    cuts: tuple[int, ...] | None  # in the plan's order of layers; None: the rule finds none
    step_s: float | None = None
    largest_s: float | None = None  # compute seconds of one micro-batch on the device with most
    peak_bytes: int | None = None  # of the device that needs most
    fits: bool = True  # within the memory limit
    reason: str = ""  # why there are no cuts, or why they do not fit


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A plan and the reasons for it."""

    model: str
    setting: PlanSettings
    step_s: float
    samples_per_s: float
    peak_bytes: int
    bottleneck: Bottleneck
    options: tuple[Option, ...]
    rules: tuple[BaselineOutcome, ...]  # the plan itself first
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
    options: tuple[Option, ...] = (Option(kind="same", setting=setting, outcome=None, reason=why_not),)
    if not why_not:
        notes = tuple(f"{x}; all figures here are from this profile" for x in other_times_notes(plan, ordered))
        plan = plan_with_cuts(ordered, setting, plan.cuts) if notes else plan
        deadline_s = time.perf_counter() + options_s
        options = evaluate_options(profile, setting, deadline_s=deadline_s, progress=progress)
    return Explanation(
        model=plan.model.name,
        setting=setting,
        step_s=plan.prediction.step_s,
        samples_per_s=samples_per_s(plan, plan.prediction.step_s),
        peak_bytes=plan.peak_bytes,
        bottleneck=find_bottleneck(plan, memory_gain_s=memory_gain_s(options)),
        options=options,
        rules=() if why_not else tuple(baseline_outcomes(plan, ordered)),
        notes=notes,
        doubts=profile.doubts,
    )


def baseline_outcomes(plan: Plan, ordered: Profile) -> Iterator[BaselineOutcome]:
    """This plan, then every baseline rule of `gplan.partition.baselines`; the profile is in the plan's order.

    A rule sees each layer's forward and backward time, or its parameters, as its authors intended; a shared parameter
    counts for every layer that uses it.
    """
    setting = setting_of(plan)
    problem = problem_of(ordered, setting)

    def outcome(name: str, plan: Plan) -> BaselineOutcome:
        loads_s = [compute_s(problem, k, occupied(cost)) for k, cost in enumerate(plan.stage_costs)]
        reason = memory_excess(plan)
        return BaselineOutcome(
            rule=name,
            cuts=plan.cuts,
            step_s=simulate(plan).step_s,
            largest_s=max(device_sums(problem, loads_s)),
            peak_bytes=plan.peak_bytes,
            fits=not reason,
            reason=reason,
        )

    yield outcome(THIS_PLAN, plan)
    costs = [cost_at(layer.costs, setting.microbatch_size) for layer in ordered.layers]
    times = [cost.forward.median_s + cost.backward.median_s for cost in costs]
    num_parameters = [layer.num_parameters for layer in ordered.layers]
    for shared in ordered.shared_weights:
        for layer in shared.layers:
            num_parameters[layer] += shared.num_parameters
    for name, rule in RULES.items():
        try:
            cuts = rule(times, num_parameters=num_parameters, num_stages=setting.num_stages)
        except NoPlanError as error:
            yield BaselineOutcome(rule=name, cuts=None, reason=str(error))
        else:
            yield outcome(name, plan_with_cuts(ordered, setting, cuts))
