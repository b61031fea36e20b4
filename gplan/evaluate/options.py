"""What would help: the best plan for each change of the setting, the devices or the link.

An option without a plan is kept with its reason. The options share the given time: what one leaves over goes to the
rest, and options that are not reached are marked. The first option changes nothing; another option gains what it is
better than that.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

from gplan.core import RECOMPUTE_MODES, Constraints, Profile, RecomputeMode
from gplan.core.errors import NoPlanError, UsageError
from gplan.core.progress import Progress
from gplan.evaluate.compare import samples_per_s
from gplan.evaluate.replanning import TIME_LIMIT_S, PlanSettings, replan, with_link_times
from gplan.partition.diagnosis import LEAST_MEMORY_SCHEDULE
from gplan.schedules.custom import is_custom_order
from gplan.schedules.registry import schedule_info
from gplan.strategy_search.space import AUTO_SCHEDULES

MORE_MEMORY_BYTES = 2**30
FASTER_LINK = 2.0  # times as fast
OUT_OF_TIME = "not tried: the time for options was over"


OptionKind: TypeAlias = Literal[
    "same", "no constraints", "more memory", "no memory limit", "more devices", "fewer devices", "smaller microbatches",
    "more microbatches", "schedule", "recompute", "faster link", "free link",
]  # fmt: skip
"""What an option changes; "same" is the best plan for the plan's own setting. Other memory may give two options: with
the plan's recompute mode, and without recompute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionResult:
    """The best plan of an option."""

    step_s: float
    samples_per_s: float
    peak_bytes: int  # of the device that needs most
    is_proven: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A change with its best plan, or the reason why there is none."""

    kind: OptionKind
    setting: PlanSettings
    outcome: OptionResult | None
    reason: str = ""  # why there is no outcome
    is_interpolated: bool = False  # its micro-batch size was not profiled


class _Change(NamedTuple):
    """A setting and a profile to plan for, or the reason against it."""

    kind: OptionKind
    setting: PlanSettings
    profile: Profile
    reason: str = ""


def evaluate_options(
    profile: Profile, setting: PlanSettings, *, deadline_s: float, progress: Progress
) -> tuple[Option, ...]:
    """Every option with its outcome or its reason; the first one, which changes nothing, ignores the deadline."""
    changes = list(_changes(profile, setting))
    found: list[Option] = []
    for index, change in enumerate(changes):
        progress(f"what if: {change.kind}", index / len(changes))
        num_left = sum(not x.reason for x in changes[index:])
        share_s = (deadline_s - time.perf_counter()) / max(1, num_left)
        time_limit_s = TIME_LIMIT_S if index == 0 else min(TIME_LIMIT_S, share_s)
        reason, outcome = change.reason or (OUT_OF_TIME if time_limit_s <= 0 else ""), None
        if not reason:
            try:
                plan = replan(change.profile, change.setting, time_limit_s=time_limit_s)
            except (UsageError, NoPlanError) as error:
                reason = str(error)
            else:
                outcome = OptionResult(
                    step_s=plan.prediction.step_s,
                    samples_per_s=samples_per_s(plan, plan.prediction.step_s),
                    peak_bytes=plan.peak_bytes,
                    is_proven=plan.proof.is_proven,
                )
        is_profiled = change.setting.microbatch_size in change.profile.microbatch_sizes
        found.append(
            Option(
                kind=change.kind,
                setting=change.setting,
                outcome=outcome,
                reason=reason,
                is_interpolated=outcome is not None and not is_profiled,
            )
        )
    return tuple(found)


def memory_gain_s(options: Sequence[Option]) -> float | None:
    """By how much the best plan's step is shorter without a memory limit; None where that is not known.

    Without the limit nothing need be recomputed; what a plan without recompute gains within the limit is not counted.
    """
    same = options[0].setting
    if same.memory_bytes is None:
        return 0.0
    least_s = []
    for limit in (same.memory_bytes, None):
        settings = [replace(same, memory_bytes=limit, recompute=x) for x in (same.recompute, "never")]
        kinds = ("same", "no memory limit", "recompute")
        steps_s = [x.outcome.step_s for x in options if x.outcome and x.kind in kinds and x.setting in settings]
        if not steps_s:
            return None
        least_s.append(min(steps_s))
    return max(0.0, least_s[0] - least_s[1])


def _changes(profile: Profile, setting: PlanSettings) -> Iterator[_Change]:
    yield _Change("same", setting, profile)
    if setting.constraints:
        yield _Change("no constraints", replace(setting, constraints=Constraints()), profile)
    limit, mode = setting.memory_bytes, setting.recompute
    if limit is None:
        yield _Change("more memory", setting, profile, "the plan has no memory limit")
    else:  # with the plan's recompute mode and, where that is a fixed one, with none
        modes: tuple[RecomputeMode, ...] = (mode,) if mode in ("never", "selected") else (mode, "never")
        limits: dict[OptionKind, int | None] = {"more memory": limit + MORE_MEMORY_BYTES, "no memory limit": None}
        for kind, memory_bytes in limits.items():
            for other in modes:
                yield _Change(kind, replace(setting, memory_bytes=memory_bytes, recompute=other), profile)
    size, twice = setting.microbatch_size, 2 * setting.num_microbatches
    smaller = replace(setting, num_microbatches=twice, microbatch_size=max(1, size // 2))
    yield _Change("smaller microbatches", smaller, profile, f"a micro-batch of {size} has no half" if size % 2 else "")
    yield _Change("more microbatches", replace(setting, num_microbatches=twice), profile)
    has_halves = any(cost.has_halves for layer in profile.layers for cost in layer.costs)
    for name in AUTO_SCHEDULES:
        changed = replace(setting, schedule=name)
        is_possible = has_halves or not schedule_info(name).splits_backward
        if name != setting.schedule and is_possible and changed.num_stages <= len(profile.layers):
            yield _Change("schedule", changed, profile)
    for other in RECOMPUTE_MODES:
        can_change = other != "selected" or limit is not None  # layers are selected for a memory limit
        if can_change and other != mode:
            yield _Change("recompute", replace(setting, recompute=other), profile)
    yield from _device_changes(profile, setting)
    reason = "" if setting.num_devices > 1 else "one device sends nothing"
    yield _Change("faster link", setting, with_link_times(profile, 1.0 / FASTER_LINK), reason)
    yield _Change("free link", setting, with_link_times(profile, 0.0), reason)


def _device_changes(profile: Profile, setting: PlanSettings) -> Iterator[_Change]:
    """One device more and one fewer, each device with as many stages as before."""
    num_devices, schedule = setting.num_devices, setting.schedule
    kinds: dict[OptionKind, int] = {"more devices": num_devices + 1, "fewer devices": num_devices - 1}
    for kind, count in kinds.items():
        if is_custom_order(schedule):
            reason = f"the custom order has {num_devices} devices" if count else "there is only one device"
            yield _Change(kind, setting, profile, reason)
        else:
            named = LEAST_MEMORY_SCHEDULE if count == 1 else schedule  # on one device all take equally long
            changed = replace(setting, schedule=named, num_devices=max(1, count))
            yield _Change(kind, changed, profile, "" if count else "there is only one device")
