"""What would help: every option is balanced anew and priced by the same functions as the plan itself.

An option that cannot be is kept with its reason. The options share the time that was granted: what one leaves of its
part goes to the others, and those that were not reached when it is over say so. The first option changes nothing: what
others gain is theirs only as far as it is more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

from gplan.core import Constraints, Layer, Link, LinkPoint, Plan, Profile, RecomputeMode, Stage, Value
from gplan.core.errors import NoPlanError, UsageError
from gplan.core.interpolation import cost_at
from gplan.core.machine import FREE_LINK
from gplan.core.plan import peaks_by_device
from gplan.core.units import bytes_text
from gplan.evaluate.explain.explanation import Option, OptionKind, Outcome, RuleOutcome, Setting
from gplan.partition import balance
from gplan.partition.balance import best_plan
from gplan.partition.baselines import RULES
from gplan.partition.plan_evaluation import compute_s, objective_s, stages_of, step_s
from gplan.partition.problem import Problem, device_sums
from gplan.schedules.custom import is_custom_order
from gplan.schedules.registry import num_stages_of, schedule_info
from gplan.simulation.simulator import occupying, simulate
from gplan.strategy_search.space import AUTO_SCHEDULES

# What rules of thumb make of the same layers: priced by the cost model and simulator that priced the plan.
#
# The rules see what their authors let them see: each layer's forward and backward time, or its parameters. A shared
# parameter counts for every layer that uses it, as it does where layers are counted one by one.


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
    return max(device_sums(problem, [compute_s(problem, k, occupying(x.cost)) for k, x in enumerate(stages)]))


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


# Plans for other settings: the best one, by the balancer, and the price of given cuts, by the same cost model.


MOST_SECONDS = 5.0
"""For one plan; those that are not proven by then say so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """Given stages with their costs, the step that they make and what the setting minimises."""

    stages: tuple[Stage, ...]
    step_s: float
    objective_s: float
    misfit: str = ""  # why they do not fit the memory limit

    @property
    def peak_bytes(self) -> int:
        """Of the device that needs most."""
        return max(peaks_by_device(self.stages))


def setting_of(plan: Plan) -> Setting:
    """What the plan was asked for."""
    return Setting(
        num_stages=plan.num_stages,
        num_microbatches=plan.num_microbatches,
        microbatch_size=plan.microbatch_size,
        schedule=plan.schedule,
        recompute=plan.recompute,
        minimize=plan.minimize,
        memory_bytes=plan.memory_limit_bytes,
        num_replicas=plan.num_replicas,
        constraints=plan.constraints,
    )


def obstacle(plan: Plan) -> str:
    """What of a plan its file does not hold, so that it cannot be balanced anew; or ""."""
    if any(stage.machine_device for stage in plan.stages):
        return "the plan is for a machine of different devices, and its file does not hold their links"
    return ""


def best(profile: Profile, setting: Setting, *, time_limit_s: float = MOST_SECONDS) -> Plan:
    """The best plan of a setting; raises UsageError or NoPlanError, as `balance` does, where there is none."""
    return best_plan(_problem(profile, setting), time_limit_s=time_limit_s)


def problem_of(profile: Profile, setting: Setting) -> Problem:
    """What prices given cuts of a profile under a setting; the layers stay in order, and constraints have no say in it."""
    return _problem(profile, replace(setting, constraints=Constraints()))


def _problem(profile: Profile, setting: Setting) -> Problem:
    """The problem that a setting is; only the setting limits the memory."""
    asked = {field.name: getattr(setting, field.name) for field in fields(setting) if field.name != "num_stages"}
    return balance.problem_of(profile, num_devices=setting.num_devices, **asked)


def priced(profile: Profile, setting: Setting, cuts: Sequence[int]) -> Priced:
    """Given cuts under a setting, whether they fit its memory or not."""
    problem = problem_of(profile, setting)
    stages = stages_of(problem, cuts)
    found = Priced(stages=stages, step_s=step_s(problem, stages), objective_s=objective_s(problem, stages))
    return replace(found, misfit=_misfit(found, setting))


def _misfit(found: Priced, setting: Setting) -> str:
    """Why stages do not fit the memory limit; "" where they do."""
    limit, peaks = setting.memory_bytes, peaks_by_device(found.stages)
    if limit is None or found.peak_bytes <= limit:
        return ""
    however = ", whichever layers it recomputes" if setting.recompute == "selected" else ""
    what = "stage" if len(peaks) == len(found.stages) else "device"
    needed = f"{what} {peaks.index(found.peak_bytes)} needs {bytes_text(found.peak_bytes)}{however}"
    return f"{needed}; expected at most {bytes_text(limit)}"


def with_layer_times(profile: Profile, index: int, factor: float) -> Profile:
    """The profile with all times of one layer `factor` times as long."""
    layer = profile.layers[index]
    costs = tuple(x.corrected(forward=factor, backward=factor, recompute=factor) for x in layer.costs)
    return replace(profile, layers=_with(profile.layers, index, replace(layer, costs=costs, same_as=None)))


def with_link_times(profile: Profile, factor: float) -> Profile:
    """The profile with every transfer `factor` times as long; 0: transfers take no time."""
    return replace(
        profile, link=_link_times(profile.link, factor), values=tuple(_value_times(x, factor) for x in profile.values)
    )


def _link_times(link: Link, factor: float) -> Link:
    if factor == 0:
        return FREE_LINK
    return replace(
        link,
        latency_s=link.latency_s * factor,
        bytes_per_s=link.bytes_per_s / factor,
        points=tuple(LinkPoint(num_bytes=x.num_bytes, seconds=x.seconds * factor) for x in link.points),
    )


def _value_times(value: Value, factor: float) -> Value:
    return value if value.transfer_s is None else replace(value, transfer_s=value.transfer_s * factor)


def _with(layers: tuple[Layer, ...], index: int, layer: Layer) -> tuple[Layer, ...]:
    return (*layers[:index], layer, *layers[index + 1 :])


MORE_MEMORY_BYTES = 2**30
TIME_IS_OVER = "not tried: the time for options was over"
_RECOMPUTE: tuple[RecomputeMode, ...] = ("never", "always", "except-last")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A setting and a profile to balance, or why there is nothing to balance."""

    kind: OptionKind
    setting: Setting
    profile: Profile
    reason: str = ""


def options_of(
    profile: Profile, setting: Setting, *, deadline_s: float, progress: Callable[[str, float], None]
) -> tuple[Option, ...]:
    """Every option with its outcome or its reason; the first, which changes nothing, is tried whatever the time."""
    changes = list(_changes(profile, setting))
    found: list[Option] = []
    for index, change in enumerate(changes):
        progress(f"what if: {change.kind}", index / len(changes))
        num_left = sum(not x.reason for x in changes[index:])
        share_s = (deadline_s - time.perf_counter()) / max(1, num_left)
        found.append(_tried(change, MOST_SECONDS if not found else min(MOST_SECONDS, share_s)))
    return tuple(found)


def not_tried(setting: Setting, reason: str) -> tuple[Option, ...]:
    """The one option of a plan that cannot be balanced anew."""
    return (Option(kind="same", setting=setting, outcome=None, reason=reason),)


def memory_gain_s(options: Sequence[Option]) -> float | None:
    """By how much the best plan's step is shorter without a memory limit; None where that is not known.

    Without the limit nothing need be recomputed; what a plan without recompute gains within the limit is not counted.
    """
    if options[0].setting.memory_bytes is None:
        return 0.0
    within, without = (_least_step_s(options, is_limited=x) for x in (True, False))
    return None if within is None or without is None else max(0.0, within - without)


def _least_step_s(options: Sequence[Option], *, is_limited: bool) -> float | None:
    """The least step of the plan's own setting, recomputing as it does or not at all, with its memory limit or none."""
    same = options[0].setting
    limit = same.memory_bytes if is_limited else None
    settings = [replace(same, memory_bytes=limit, recompute=x) for x in (same.recompute, "never")]
    kinds = ("same", "no memory limit", "recompute")
    found = [x.outcome.step_s for x in options if x.outcome and x.kind in kinds and x.setting in settings]
    return min(found, default=None)


def outcome_of(plan: Plan) -> Outcome:
    """A plan's step, throughput and largest peak."""
    return Outcome(
        step_s=plan.prediction.step_s,
        samples_per_s=plan.batch_size / plan.prediction.step_s,
        peak_bytes=plan.peak_bytes,
        is_proven=plan.proof.is_proven,
    )


def _tried(change: Change, time_limit_s: float) -> Option:
    """The option with the best plan of its setting, or with the reason why there is none."""
    reason, outcome = change.reason or (TIME_IS_OVER if time_limit_s <= 0 else ""), None
    if not reason:
        try:
            outcome = outcome_of(best(change.profile, change.setting, time_limit_s=time_limit_s))
        except (UsageError, NoPlanError) as error:
            reason = str(error)
    size = change.setting.microbatch_size
    return Option(
        kind=change.kind,
        setting=change.setting,
        outcome=outcome,
        reason=reason,
        is_interpolated=outcome is not None and size not in change.profile.microbatch_sizes,
    )


def _changes(profile: Profile, setting: Setting) -> Iterator[Change]:
    yield Change(kind="same", setting=setting, profile=profile)
    if setting.constraints:
        yield Change(kind="no constraints", setting=replace(setting, constraints=Constraints()), profile=profile)
    yield from _memories(profile, setting)
    yield from _microbatches(profile, setting)
    yield from _schedules(profile, setting)
    for mode in (*_RECOMPUTE, *_selected(setting)):
        if mode != setting.recompute:
            yield Change(kind="recompute", setting=replace(setting, recompute=mode), profile=profile)
    yield from _devices(profile, setting)
    yield from _links(profile, setting)


def _selected(setting: Setting) -> tuple[RecomputeMode, ...]:
    """Selecting layers to recompute, where there is a memory limit to do it for."""
    return () if setting.memory_bytes is None else ("selected",)


def _memories(profile: Profile, setting: Setting) -> Iterator[Change]:
    """More memory and no limit, each recomputing as the plan does and, where it does, not at all.

    Selected layers are no more than the memory asks for, so that not at all is no other option then.
    """
    limit = setting.memory_bytes
    if limit is None:
        yield Change(kind="more memory", setting=setting, profile=profile, reason="the plan has no memory limit")
        return
    own = setting.recompute
    modes: tuple[RecomputeMode, ...] = (own,) if own in ("never", "selected") else (own, "never")
    kinds: dict[OptionKind, int | None] = {"more memory": limit + MORE_MEMORY_BYTES, "no memory limit": None}
    for kind, memory_bytes in kinds.items():
        for mode in modes:
            other = replace(setting, memory_bytes=memory_bytes, recompute=mode)
            yield Change(kind=kind, setting=other, profile=profile)


def _microbatches(profile: Profile, setting: Setting) -> Iterator[Change]:
    size, twice = setting.microbatch_size, 2 * setting.num_microbatches
    smaller = replace(setting, num_microbatches=twice, microbatch_size=max(1, size // 2))
    reason = f"a micro-batch of {size} has no half" if size % 2 else ""
    yield Change(kind="smaller microbatches", setting=smaller, profile=profile, reason=reason)
    yield Change(kind="more microbatches", setting=replace(setting, num_microbatches=twice), profile=profile)


def _schedules(profile: Profile, setting: Setting) -> Iterator[Change]:
    """Other schedules on the same devices that have a layer for every stage,
    and halves of backwards where they split them."""
    has_halves = any(cost.has_halves for layer in profile.layers for cost in layer.costs)
    for name in AUTO_SCHEDULES:
        other = replace(setting, schedule=name, num_stages=num_stages_of(name, setting.num_devices))
        is_possible = other.num_stages <= len(profile.layers) and (
            has_halves or not schedule_info(name).splits_backward
        )
        if name != setting.schedule and is_possible:
            yield Change(kind="schedule", setting=other, profile=profile)


def _devices(profile: Profile, setting: Setting) -> Iterator[Change]:
    """One more and one fewer, each with as many stages as the others."""
    more, fewer = setting.num_devices + 1, setting.num_devices - 1
    yield _on(profile, setting, more, kind="more devices", reason="")
    reason = "" if fewer else "there is only one device"
    yield _on(profile, setting, max(1, fewer), kind="fewer devices", reason=reason)


def _on(profile: Profile, setting: Setting, num_devices: int, *, kind: OptionKind, reason: str) -> Change:
    if is_custom_order(setting.schedule):
        reason = reason or f"the custom order has {setting.num_devices} devices"
        return Change(kind=kind, setting=setting, profile=profile, reason=reason)
    num_stages = num_stages_of(setting.schedule, num_devices)
    return Change(kind=kind, setting=replace(setting, num_stages=num_stages), profile=profile, reason=reason)


def _links(profile: Profile, setting: Setting) -> Iterator[Change]:
    reason = "" if setting.num_devices > 1 else "one device sends nothing"
    yield Change(kind="faster link", setting=setting, profile=with_link_times(profile, 0.5), reason=reason)
    yield Change(kind="free link", setting=setting, profile=with_link_times(profile, 0.0), reason=reason)
