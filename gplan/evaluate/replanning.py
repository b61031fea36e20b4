"""Plans for a changed setting or profile: the best one, found by the balancer, or one with given cuts.

All plans have costs and steps from the same cost model and simulator as the plan that they are compared with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise

from gplan.core import Constraints, Objective, Plan, Profile, RecomputeMode, Sharding
from gplan.core.errors import FileError, NoPlanError
from gplan.core.units import bytes_text, seconds_text
from gplan.corrections import as_run_by
from gplan.partition import balance
from gplan.partition.balance import best_plan
from gplan.partition.plan_evaluation import price
from gplan.partition.problem import Problem, Solution
from gplan.schedules.request import PipelineSetting, PlanRequest

TIME_LIMIT_S = 5.0
"""The default for one plan; a plan that is not proven optimal by then is marked so."""

_REMEDY = "expected the profile that the plan was made from: name it with --profile, or balance again"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings(PipelineSetting):
    """The arguments of `gplan.balance` beside the profile, where no dial is open."""

    recompute: RecomputeMode = "never"
    sharding: Sharding = "none"
    microbatch_size: int
    minimize: Objective = "step-time"
    memory_bytes: int | None = None  # of each device; None: no limit
    constraints: Constraints = field(default_factory=Constraints)


def setting_of(plan: Plan) -> PlanSettings:
    """The arguments that the plan was made with."""
    return PlanSettings(
        num_devices=plan.num_devices,
        num_microbatches=plan.num_microbatches,
        microbatch_size=plan.microbatch_size,
        schedule=plan.schedule,
        recompute=plan.recompute,
        minimize=plan.minimize,
        memory_bytes=plan.memory_limit_bytes,
        num_replicas=plan.num_replicas,
        sharding=plan.sharding,
        constraints=plan.constraints,
    )


def why_not_replannable(plan: Plan) -> str:
    """Why the plan's file does not suffice to plan again; "" where it does."""
    if plan.is_for_machine:
        return "the plan is for a machine of different devices, and its file does not hold their links"
    return ""


def replan(profile: Profile, setting: PlanSettings, *, time_limit_s: float = TIME_LIMIT_S) -> Plan:
    """The best plan of a setting; raises UsageError or NoPlanError, as `balance` does, where there is none."""
    return best_plan(problem_of(profile, setting), time_limit_s=time_limit_s)


def problem_of(profile: Profile, setting: PlanSettings) -> Problem:
    """The problem of a setting. Only the setting limits the memory, not the profile's device."""
    return balance.problem_of(profile, PlanRequest(**{x.name: getattr(setting, x.name) for x in fields(setting)}))


def plan_with_cuts(profile: Profile, setting: PlanSettings, cuts: Sequence[int]) -> Plan:
    """The plan with these cuts, whether it fits the memory limit or not; the layers are in the profile's order."""
    bounds = pairwise((0, *cuts, len(profile.layers)))
    stages = tuple(tuple(range(first, end)) for first, end in bounds)
    solution = Solution(stages=stages, lower_bound_s=0.0, solver="given")
    return price(problem_of(profile, replace(setting, constraints=Constraints())), solution, solve_s=0.0)


def reprice(plan: Plan, profile: Profile, *, engine: str) -> Plan:
    """The plan's stages and setting with costs from a profile, as an engine runs them."""
    ordered = profile_in_plan_order(plan, as_run_by(profile, engine))
    return plan_with_cuts(ordered, setting_of(plan), plan.cuts)


def for_one_process(plan: Plan, profile: Profile | None) -> Plan:
    """The plan with the times that the virtual engine should take, as one process computes alone.

    Only a profile has these; without one the plan is as it was, and a note says what its times are.
    """
    if not plan.shares_host:
        return plan
    if profile is None or why_not_replannable(plan):
        note = (
            "the predicted times are those of devices side by side on one host, while the virtual engine computes alone"
        )
        return replace(plan, notes=(*plan.notes, f"{note}; --profile names the profile that has both"))
    alone = reprice(plan, profile, engine="virtual")
    return replace(
        plan, stages=alone.stages, prediction=alone.prediction, shares_host=False,
        notes=(*plan.notes, "the predicted times are those of one process that computes alone, as the virtual engine does"),
    )  # fmt: skip


def plan_within_memory(profile: Profile, setting: PlanSettings, cuts: Sequence[int]) -> Plan:
    """As `plan_with_cuts`; raises NoPlanError where a stage or device exceeds the memory limit, and by how much."""
    plan = plan_with_cuts(profile, setting, cuts)
    limit, peak_bytes = plan.memory_limit_bytes, plan.peak_bytes
    if limit is None or peak_bytes <= limit:
        return plan
    condition = ", whichever layers it recomputes" if plan.recompute == "selected" else ""
    device = plan.device_peak_bytes.index(peak_bytes)
    where = f"device {device}" if plan.has_chunks else f"stage {plan.stages_of(device)[0].index}"
    raise NoPlanError(f"{where} needs {bytes_text(peak_bytes)}{condition}; expected at most {bytes_text(limit)}")


def with_links_of(plan: Plan, profile: Profile) -> Profile:
    """The profile with the links of the hosts that the plan's replicas are on, where these are not the profile's."""
    is_known = plan.link.replica_link is None or profile.link.replica_link is not None
    return profile if is_known else replace(profile, link=plan.link)


def profile_in_plan_order(plan: Plan, profile: Profile) -> Profile:
    """The profile with its layers in the plan's order; raises FileError where it is not the plan's profile."""
    if plan.model.digest != profile.model.digest:
        raise FileError(
            f"the plan is for {plan.model.name} (digest {plan.model.digest[:12]}), the profile is of {profile.model.name} "
            f"(digest {profile.model.digest[:12]}); {_REMEDY}"
        )
    indices = {layer.name: i for i, layer in enumerate(profile.layers)}
    names = plan.layer_names
    unknown = next((name for name in names if name not in indices), None)
    if unknown is not None:
        raise FileError(f"the plan has a layer {unknown}, which the profile does not have; {_REMEDY}")
    if len(set(names)) != len(profile.layers) or len(names) != len(profile.layers):
        raise FileError(f"the plan has {len(names)} layers, the profile {len(profile.layers)}; {_REMEDY}")
    low, high = profile.microbatch_sizes[0], profile.microbatch_sizes[-1]
    if not low <= plan.microbatch_size <= high:
        raise FileError(
            f"the plan has micro-batches of {plan.microbatch_size}, the profile was made at {low} to {high}; {_REMEDY}"
        )
    return with_links_of(plan, profile).reordered([indices[name] for name in names])


def other_times_notes(plan: Plan, ordered: Profile) -> tuple[str, ...]:
    """A note where the profile, in the plan's order, does not give the plan's predicted step."""
    step_s = plan_with_cuts(ordered, setting_of(plan), plan.cuts).prediction.step_s
    if plan.prediction.gives(step_s):
        return ()
    return (
        f"this profile gives the plan a step of {seconds_text(step_s)}, not {seconds_text(plan.prediction.step_s)}: the profile was "
        "measured again after the plan was made, or the plan's costs come from elsewhere; `gplan balance` makes them agree",
    )
