"""What rules of thumb make of the same layers: priced by the cost model and simulator that priced the plan.

The rules see what their authors let them see: each layer's forward and backward time, or its parameters. A shared
parameter counts for every layer that uses it, as it does where layers are counted one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from gplan.balancer.price import device_loads_s
from gplan.balancer.problem import Problem
from gplan.errors import NoPlanError
from gplan.explain.explanation import RuleOutcome, Setting
from gplan.explain.whatif import priced, problem_of
from gplan.interpolation import cost_at
from gplan.nouns import Plan, Profile, Stage
from gplan.rules import RULES
from gplan.simulator import simulate

THIS_PLAN = "this plan"


def rule_outcomes(plan: Plan, profile: Profile, setting: Setting) -> Iterator[RuleOutcome]:
    """This plan, then every rule; the profile is in the plan's order."""
    timeline = simulate(plan)
    yield RuleOutcome(
        rule=THIS_PLAN,
        cuts=plan.cuts,
        step_s=timeline.step_s,
        largest_s=largest_load_s(plan.stages, problem_of(profile, setting)),
        peak_bytes=plan.peak_bytes,
    )
    costs = [cost_at(layer.costs, setting.microbatch_size) for layer in profile.layers]
    times = [cost.forward.median_s + cost.backward.median_s for cost in costs]
    for name, rule in RULES.items():
        try:
            cuts = rule(times, num_parameters=num_parameters(profile), num_stages=setting.num_stages)
        except NoPlanError as error:
            yield RuleOutcome(rule=name, cuts=None, reason=str(error))
        else:
            yield _priced_rule(name, cuts, profile, setting)


def num_parameters(profile: Profile) -> list[int]:
    """Parameters of each layer, those that it shares included."""
    counts = [layer.num_parameters for layer in profile.layers]
    for shared in profile.shared_weights:
        for layer in set(shared.layers):
            counts[layer] += shared.num_parameters
    return counts


def largest_load_s(stages: Sequence[Stage], problem: Problem) -> float:
    """Compute seconds of one micro-batch on the device that computes longest, recompute averaged over the step."""
    return max(device_loads_s(replace(problem, minimize="max-compute"), stages))


def _priced_rule(name: str, cuts: Sequence[int], profile: Profile, setting: Setting) -> RuleOutcome:
    found = priced(profile, setting, cuts)
    return RuleOutcome(
        rule=name,
        cuts=tuple(cuts),
        step_s=found.step_s,
        largest_s=largest_load_s(found.stages, problem_of(profile, setting)),
        peak_bytes=found.peak_bytes,
        fits=not found.misfit,
        reason=found.misfit,
    )
