"""Plans for other settings: the best one, by the balancer, and the price of given cuts, by the same cost model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from gplan import balancer
from gplan.balancer import best_plan
from gplan.balancer.price import objective_s, stages_of, step_s
from gplan.balancer.problem import Problem
from gplan.explain.explanation import Setting
from gplan.nouns import Layer, Link, LinkPoint, Plan, Profile, Stage, Value, Wishes
from gplan.nouns.plan import peaks_by_device
from gplan.units import bytes_text

MOST_SECONDS = 5.0
"""For one plan; those that are not proven by then say so."""

FREE_LINK = Link(latency_s=0.0, bytes_per_s=1e30)


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
        wishes=plan.wishes,
    )


def obstacle(plan: Plan) -> str:
    """What of a plan its file does not hold, so that it cannot be balanced anew; or ""."""
    if any(stage.place for stage in plan.stages):
        return "the plan is for a machine of different devices, and its file does not hold their links"
    return ""


def best(profile: Profile, setting: Setting, *, time_limit_s: float = MOST_SECONDS) -> Plan:
    """The best plan of a setting; raises UsageError or NoPlanError, as `balance` does, where there is none."""
    return best_plan(_problem(profile, setting), time_limit_s=time_limit_s)


def problem_of(profile: Profile, setting: Setting) -> Problem:
    """What prices given cuts of a profile under a setting; the layers stay in order, and wishes have no say in it."""
    return _problem(profile, replace(setting, wishes=Wishes()))


def _problem(profile: Profile, setting: Setting) -> Problem:
    """The problem that a setting is; only the setting limits the memory."""
    asked = {field.name: getattr(setting, field.name) for field in fields(setting) if field.name != "num_stages"}
    return balancer.problem_of(profile, num_devices=setting.num_devices, **asked)


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
