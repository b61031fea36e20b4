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
from gplan.core.units import bytes_text, counted
from gplan.corrections.links import with_link_times
from gplan.evaluate.compare import samples_per_s
from gplan.evaluate.replanning import TIME_LIMIT_S, PlanSettings, replan
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
    label: str  # what it changes, in words
    setting: PlanSettings
    outcome: OptionResult | None
    reason: str = ""  # why there is no outcome
    is_interpolated: bool = False  # its micro-batch size was not profiled


class _Change(NamedTuple):
    """A setting and a profile to plan for, or the reason against it."""

    kind: OptionKind
    label: str
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
                label=change.label,
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
    yield _Change("same", "as it is, balanced again", setting, profile)
    if setting.constraints:
        free = replace(setting, constraints=Constraints())
        yield _Change("no constraints", "without the constraints", free, profile)
    limit, mode = setting.memory_bytes, setting.recompute
    if limit is None:
        yield _Change("more memory", "more memory", setting, profile, "the plan has no memory limit")
    else:  # with the plan's recompute mode and, where that is a fixed one, with none
        modes: tuple[RecomputeMode, ...] = (mode,) if mode in ("never", "selected") else (mode, "never")
        more = limit + MORE_MEMORY_BYTES
        more_text = f"{bytes_text(more)} a device ({bytes_text(MORE_MEMORY_BYTES)} more)"
        limits: dict[OptionKind, tuple[int | None, str]] = {
            "more memory": (more, more_text),
            "no memory limit": (None, "no memory limit"),
        }
        for kind, (memory_bytes, label) in limits.items():
            for other in modes:
                changed = replace(setting, memory_bytes=memory_bytes, recompute=other)
                yield _Change(kind, label if other == mode else f"{label}, no recompute", changed, profile)
    size, twice = setting.microbatch_size, 2 * setting.num_microbatches
    counts = counted(twice, "micro-batch")
    if size % 2:
        reason = f"a micro-batch of {size} has no half"
        yield _Change("smaller microbatches", "micro-batches of half the size", setting, profile, reason)
    else:
        smaller = replace(setting, num_microbatches=twice, microbatch_size=size // 2)
        yield _Change("smaller microbatches", f"{counts} of {size // 2} (the same batch)", smaller, profile)
    larger = replace(setting, num_microbatches=twice)
    yield _Change("more microbatches", f"{counts} of {size} (twice the batch)", larger, profile)
    has_halves = any(cost.has_halves for layer in profile.layers for cost in layer.costs)
    for name in AUTO_SCHEDULES:
        changed = replace(setting, schedule=name)
        is_possible = has_halves or not schedule_info(name).splits_backward
        if name != setting.schedule and is_possible and changed.num_stages <= len(profile.layers):
            yield _Change("schedule", f"schedule {schedule_info(name).title}", changed, profile)
    for other in RECOMPUTE_MODES:
        can_change = other != "selected" or limit is not None  # layers are selected for a memory limit
        if can_change and other != mode:
            yield _Change("recompute", f"recompute {other}", replace(setting, recompute=other), profile)
    yield from _device_changes(profile, setting)
    reason = "" if setting.num_devices * setting.num_replicas > 1 else "one device sends nothing"
    faster, free_link = (with_link_times(profile, factor) for factor in (1.0 / FASTER_LINK, 0.0))
    yield _Change("faster link", f"a link {FASTER_LINK:g} times as fast", setting, faster, reason)
    yield _Change("free link", "free transfers and sums of gradients", setting, free_link, reason)


def _device_changes(profile: Profile, setting: PlanSettings) -> Iterator[_Change]:
    """One device more and one fewer, each device with as many stages as before."""
    num_devices = setting.num_devices
    kinds: dict[OptionKind, tuple[int, str]] = {
        "more devices": (num_devices + 1, "one more"),
        "fewer devices": (num_devices - 1, "one fewer"),
    }
    on_hosts = profile.link.replica_link is not None
    for kind, (count, change) in kinds.items():
        if not count or is_custom_order(setting.schedule) or on_hosts:
            on_host = "replicas fill their hosts; balance with another --k"
            fixed = on_host if on_hosts else f"the custom order has {num_devices} devices"
            reason = fixed if count else "there is only one device"
            yield _Change(kind, change.replace("one", "one device"), setting, profile, reason)
            continue
        named = LEAST_MEMORY_SCHEDULE if count == 1 else setting.schedule  # on one device all take equally long
        label = counted(count, "device") + (" a replica" if setting.num_replicas > 1 else "") + f" ({change})"
        label += f", schedule {schedule_info(named).title}" if named != setting.schedule else ""
        yield _Change(kind, label, replace(setting, schedule=named, num_devices=count), profile)
