"""Whom a plan is held against: plans that differ from it in one thing, each priced by the cost model that made it.

Equal layer counts, the plan's own runner-up, one cut moved by a layer, the other schedule, half and double the number
of micro-batches. With another number of micro-batches the batch stays the same where the profile has micro-batches of
that size; otherwise the size stays, the batch is another one, and only the seconds a sample compare. A rival that does
not fit the memory, or is the plan itself, is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

from gplan.core import Alternative, LeftOut, Plan, Profile
from gplan.core.errors import GplanError, NoPlanError, UsageError
from gplan.core.units import counted
from gplan.evaluate.explain.alternatives import best, obstacle, priced, problem_of, setting_of
from gplan.evaluate.explain.bottleneck import notes_on, profile_in_plan_order
from gplan.evaluate.explain.explanation import Setting
from gplan.partition.baselines import equal_counts
from gplan.partition.plan_evaluation import price
from gplan.partition.problem import Solution
from gplan.schedules.custom import is_custom_order
from gplan.schedules.registry import num_stages_of

THIS_PLAN = "this plan"

_NUM_MOVED = 2  # cuts moved, the best by prediction
_ALIKE = 1e-6  # share by which the steps of one plan, priced twice, may differ
_OTHER = {"1f1b": "gpipe", "looped-bfs": "interleaved-1f1b", "interleaved-1f1b": "looped-bfs"}
_USUAL_OTHER = "1f1b"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """A plan to run beside the chosen one."""

    label: str
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """The plans to run, the chosen one first, those that there cannot be, and what to know of all of them."""

    rivals: tuple[Rival, ...]
    left_out: tuple[LeftOut, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Offer:
    """A rival that may turn out to be none."""

    label: str
    make: Callable[[], Plan]


def field_of(plan: Plan, profile: Profile, *, num_rivals: int | None = None) -> Field:
    """The plan and at most `num_rivals` others (None: all there are), the most telling first.

    Raises FileError where plan and profile do not belong together.
    """
    ordered, setting = profile_in_plan_order(plan, profile), setting_of(plan)
    itself = Rival(label=THIS_PLAN, plan=plan)
    if reason := obstacle(plan):
        return Field(rivals=(itself,), left_out=(LeftOut(label="all rivals", reason=reason),))
    found, left_out, known = [itself], list[LeftOut](), {_identity(plan): THIS_PLAN}
    for offer in _offers(plan, profile, ordered, setting):
        if num_rivals is not None and len(found) > num_rivals:
            break
        try:
            rival = offer.make()
        except GplanError as error:
            left_out.append(LeftOut(label=offer.label, reason=str(error)))
            continue
        twin = known.setdefault(_identity(rival), offer.label)
        if twin == offer.label:
            found.append(Rival(label=offer.label, plan=rival))
        else:
            left_out.append(LeftOut(label=offer.label, reason=f"the same as {twin}"))
    return Field(rivals=tuple(found), left_out=tuple(left_out), notes=notes_on(plan, ordered, setting))


def _identity(plan: Plan) -> tuple[object, ...]:
    """What of a plan decides how it runs."""
    layers = tuple(stage.layer_names for stage in plan.stages)
    return layers, plan.schedule, plan.num_microbatches, plan.microbatch_size, plan.recompute


def _offers(plan: Plan, profile: Profile, ordered: Profile, setting: Setting) -> Iterator[_Offer]:
    """The rivals by how much they tell; those with other cuts alone keep the plan's order of layers."""
    yield _Offer("equal layer counts", partial(_equally_cut, ordered, setting))
    for rival in plan.rivals:
        yield _Offer(rival.label or "runner-up", partial(_runner_up, rival, plan, ordered, setting))
    moved, other = _moved(plan, ordered, setting), _other_schedule(plan)
    yield from moved[:1]
    yield _Offer(f"schedule {other}", partial(_rescheduled, profile, setting, other))
    yield _half_as_many(profile, setting)
    yield _twice_as_many(profile, setting)
    yield from moved[1:]


def _equally_cut(ordered: Profile, setting: Setting) -> Plan:
    return _cut_at(ordered, setting, equal_counts(len(ordered.layers), num_stages=setting.num_stages))


def _runner_up(rival: Alternative, chosen: Plan, ordered: Profile, setting: Setting) -> Plan:
    """The plan of a line of `Plan.rivals`, which holds its cuts and not its order of layers: its step tells that."""
    if (rival.num_stages, rival.num_replicas) != (setting.num_stages, setting.num_replicas):
        raise UsageError(f"it is for {rival.num_replicas} x {counted(rival.num_stages, 'stage')}")
    its_own = replace(
        setting,
        num_microbatches=rival.num_microbatches,
        microbatch_size=rival.microbatch_size,
        schedule=rival.schedule,
        recompute=rival.recompute,
    )
    plan = _cut_at(ordered, its_own, rival.cuts)
    if abs(plan.prediction.step_s - rival.step_s) > _ALIKE * rival.step_s:
        if notes_on(chosen, ordered, setting):
            raise UsageError("the plan was not made with this profile's times, so nothing tells its layers' order")
        raise UsageError("it has its layers in an order that the plan's file does not hold")
    return plan


def _moved(plan: Plan, ordered: Profile, setting: Setting) -> list[_Offer]:
    """The best two plans, by prediction, with one cut moved by a layer."""
    bounds, found = (0, *plan.cuts, len(ordered.layers)), []
    for i, cut in enumerate(plan.cuts):
        for moved, way in ((cut - 1, "earlier"), (cut + 1, "later")):
            if bounds[i] < moved < bounds[i + 2]:
                cuts = (*plan.cuts[:i], moved, *plan.cuts[i + 1 :])
                which = f"cut {i + 1}" if len(plan.cuts) > 1 else "the cut"
                found.append((priced(ordered, setting, cuts).step_s, f"{which} a layer {way}", cuts))
    return [_Offer(label, partial(_cut_at, ordered, setting, cuts)) for _, label, cuts in sorted(found)[:_NUM_MOVED]]


def _other_schedule(plan: Plan) -> str:
    """The usual alternative, with as many chunks."""
    word, colon, number = plan.schedule.partition(":")
    return _USUAL_OTHER if is_custom_order(plan.schedule) else _OTHER.get(word, _USUAL_OTHER) + colon + number


def _rescheduled(profile: Profile, setting: Setting, schedule: str) -> Plan:
    num_stages = num_stages_of(schedule, setting.num_devices)
    return best(profile, replace(setting, schedule=schedule, num_stages=num_stages))


def _half_as_many(profile: Profile, setting: Setting) -> _Offer:
    """Half as many micro-batches, of twice the size where that was profiled."""
    num_microbatches, rest = divmod(setting.num_microbatches, 2)
    if rest:
        return _Offer("half the micro-batches", partial(_refuse, f"{setting.num_microbatches} have no half"))
    return _rebatched(profile, setting, num_microbatches, wanted_size=2 * setting.microbatch_size)


def _twice_as_many(profile: Profile, setting: Setting) -> _Offer:
    """Twice as many micro-batches, of half the size where that was profiled."""
    size, rest = divmod(setting.microbatch_size, 2)
    return _rebatched(profile, setting, 2 * setting.num_microbatches, wanted_size=0 if rest else size)


def _rebatched(profile: Profile, setting: Setting, num_microbatches: int, *, wanted_size: int) -> _Offer:
    size = wanted_size if wanted_size in profile.microbatch_sizes else setting.microbatch_size
    label = f"{counted(num_microbatches, 'micro-batch')} of {size}"
    return _Offer(
        label, partial(best, profile, replace(setting, num_microbatches=num_microbatches, microbatch_size=size))
    )


def _refuse(reason: str) -> Plan:
    raise UsageError(reason)


def _cut_at(ordered: Profile, setting: Setting, cuts: Sequence[int]) -> Plan:
    """The plan with these cuts; raises NoPlanError where it does not fit the memory limit."""
    if misfit := priced(ordered, setting, cuts).misfit:
        raise NoPlanError(misfit)
    bounds = pairwise((0, *cuts, len(ordered.layers)))
    stages = tuple(tuple(range(first, end)) for first, end in bounds)
    problem = problem_of(ordered, setting)
    return price(problem, Solution(stages=stages, lower_bound_s=0.0, solver="given"), solve_s=0.0)
