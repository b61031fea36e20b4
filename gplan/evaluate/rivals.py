"""Rivals: plans to run beside a plan, each of which differs from it in one thing.

Equal layer counts, the plan's own runner-up, one cut moved by a layer, the other schedule, half and double the number
of micro-batches. With another number of micro-batches the batch stays the same where the profile has the micro-batch
size for it; otherwise the size stays, and only the seconds per sample are comparable. A rival that exceeds the memory
limit, or equals the plan or another rival, is left out. All rivals have costs from the plan's cost model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from gplan.core import Alternative, LeftOut, Plan, Profile
from gplan.core.errors import GplanError, UsageError
from gplan.core.units import counted
from gplan.evaluate.replanning import (
    PlanSettings,
    other_times_notes,
    plan_with_cuts,
    plan_within_memory,
    profile_in_plan_order,
    replan,
    setting_of,
    why_not_replannable,
)
from gplan.schedules.custom import is_custom_order

THIS_PLAN = "this plan"

_NUM_MOVED = 2  # rivals with a moved cut: the best by prediction
_OTHER = {"1f1b": "gpipe", "looped-bfs": "interleaved-1f1b", "interleaved-1f1b": "looped-bfs"}
_DEFAULT_OTHER = "1f1b"


def equal_counts(num_layers: int, *, num_stages: int) -> tuple[int, ...]:
    """Cuts with equal numbers of layers; the first stages have one more if the division has a remainder.

    DeepSpeed's `partition_method="uniform"` (deepspeed/runtime/utils.py, partition_uniform).

    >>> equal_counts(7, num_stages=3)
    (3, 5)
    """
    quotient, rest = divmod(num_layers, num_stages)
    return tuple(k * quotient + min(k, rest) for k in range(1, num_stages))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rivals:
    """The plans to run by their labels, the chosen one first, and those left out with the reason."""

    plans: Mapping[str, Plan]
    left_out: tuple[LeftOut, ...] = ()
    notes: tuple[str, ...] = ()


_Proposal = tuple[str, Callable[[], Plan]]
"""The label of a rival and a function that makes its plan, or raises GplanError."""


def rivals_of(plan: Plan, profile: Profile, *, num_rivals: int | None = None) -> Rivals:
    """The plan and at most `num_rivals` others (None: all), the most informative first.

    Raises FileError where plan and profile do not belong together.
    """
    ordered = profile_in_plan_order(plan, profile)
    if reason := why_not_replannable(plan):
        return Rivals(plans={THIS_PLAN: plan}, left_out=(LeftOut(label="all rivals", reason=reason),))
    notes = other_times_notes(plan, ordered)
    found, left_out, labels = {THIS_PLAN: plan}, list[LeftOut](), {_identity(plan): THIS_PLAN}
    for label, make in _proposals(plan, profile, ordered, has_other_times=bool(notes)):
        if num_rivals is not None and len(found) > num_rivals:
            break
        try:
            rival = make()
        except GplanError as error:
            left_out.append(LeftOut(label=label, reason=str(error)))
            continue
        same = labels.setdefault(_identity(rival), label)
        if same == label:
            found[label if label not in found else f"{label}, {len(found)}"] = rival  # runners-up may have no names
        else:
            left_out.append(LeftOut(label=label, reason=f"the same as {same}"))
    return Rivals(plans=found, left_out=tuple(left_out), notes=notes)


def _identity(plan: Plan) -> tuple[object, ...]:
    """The parts of a plan that determine how it runs."""
    layers = tuple(stage.layer_names for stage in plan.stages)
    return layers, plan.schedule, plan.num_microbatches, plan.microbatch_size, plan.recompute


def _proposals(plan: Plan, profile: Profile, ordered: Profile, *, has_other_times: bool) -> Iterator[_Proposal]:
    """The rivals, the most informative first; those that only change cuts keep the plan's order of layers."""
    setting, num_layers = setting_of(plan), len(ordered.layers)
    with_cuts = partial(plan_within_memory, ordered, setting)
    yield "equal layer counts", partial(with_cuts, equal_counts(num_layers, num_stages=setting.num_stages))
    for rival in plan.rivals:
        make = partial(_runner_up, rival, ordered, setting, has_other_times=has_other_times)
        yield rival.label or "runner-up", make
    bounds, moved = (0, *plan.cuts, num_layers), []
    for i, cut in enumerate(plan.cuts):
        which = f"cut {i + 1}" if len(plan.cuts) > 1 else "the cut"
        for other, direction in ((cut - 1, "earlier"), (cut + 1, "later")):
            if bounds[i] < other < bounds[i + 2]:
                cuts = (*plan.cuts[:i], other, *plan.cuts[i + 1 :])
                step_s = plan_with_cuts(ordered, setting, cuts).prediction.step_s
                moved.append((step_s, f"{which} a layer {direction}", cuts))
    best = [(label, partial(with_cuts, cuts)) for _, label, cuts in sorted(moved)[:_NUM_MOVED]]
    yield from best[:1]
    name, colon, number = plan.schedule.partition(":")
    schedule = _DEFAULT_OTHER if is_custom_order(plan.schedule) else _OTHER.get(name, _DEFAULT_OTHER) + colon + number
    yield f"schedule {schedule}", partial(replan, profile, replace(setting, schedule=schedule))
    for factor in (0.5, 2.0):
        num_microbatches, wanted_size = factor * setting.num_microbatches, setting.microbatch_size / factor
        if not num_microbatches.is_integer():
            yield "half the micro-batches", partial(_refuse, f"{setting.num_microbatches} have no half")
            continue
        size = int(wanted_size) if wanted_size in profile.microbatch_sizes else setting.microbatch_size
        changed = replace(setting, num_microbatches=int(num_microbatches), microbatch_size=size)
        yield f"{counted(int(num_microbatches), 'micro-batch')} of {size}", partial(replan, profile, changed)
    yield from best[1:]


def _runner_up(rival: Alternative, ordered: Profile, setting: PlanSettings, *, has_other_times: bool) -> Plan:
    """The plan of an entry of `Plan.rivals`, which has cuts but no order of layers; its step shows whether it is this."""
    if (rival.num_stages, rival.num_replicas) != (setting.num_stages, setting.num_replicas):
        raise UsageError(f"it is for {rival.num_replicas} x {counted(rival.num_stages, 'stage')}")
    own = replace(
        setting,
        num_microbatches=rival.num_microbatches,
        microbatch_size=rival.microbatch_size,
        schedule=rival.schedule,
        recompute=rival.recompute,
    )
    plan = plan_within_memory(ordered, own, rival.cuts)
    if not plan.prediction.gives(rival.step_s):
        if has_other_times:
            raise UsageError("the plan was not made with this profile's times, so its order of layers is not known")
        raise UsageError("it has its layers in an order that the plan's file does not hold")
    return plan


def _refuse(reason: str) -> Plan:
    raise UsageError(reason)
