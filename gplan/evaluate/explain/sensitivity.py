"""By how much a layer must become slower or faster for the best plan to move layers.

All times of one layer are scaled and the model is planned again; the cuts change where another plan's objective is
below that of the present cuts by more than rounding, so ties are no change. The factors 1.6, 2.5 and 4 (and their
inverses) are tried, then the turning point is bisected to half a percent. A change that comes and goes between two of
these factors is not found.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

from gplan.core import Plan, Profile
from gplan.core.progress import Progress
from gplan.evaluate.replanning import PlanSettings, plan_with_cuts, replan

MOST_FACTOR = 4.0
MOST_LAYERS = 12
_FACTORS = (MOST_FACTOR ** (1 / 3), MOST_FACTOR ** (2 / 3), MOST_FACTOR)
_PRECISION = 1.005
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class TurningPoint:
    """The factor on a layer's times beyond which other cuts are better."""

    factor: float
    moved: tuple[str, ...]  # layers that are then on another stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """How much slower or faster one layer must be for the best plan to change; None: no change within the range."""

    layer: str
    stage: int
    time_s: float  # forward and backward of one micro-batch
    slower: TurningPoint | None
    faster: TurningPoint | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivities:
    """The sensitivities of the relevant layers."""

    layers: tuple[Sensitivity, ...]
    left_out: tuple[str, ...]  # relevant layers that the time did not suffice for
    most_factor: float  # the range is 1 / most_factor to most_factor
    is_proven: bool = True  # the best plan is; else a change may come sooner
    reason: str = ""  # why there are none


def layer_sensitivities(
    profile: Profile,
    setting: PlanSettings,
    *,
    bottleneck: int,
    deadline_s: float,
    progress: Progress,
) -> Sensitivities:
    """The sensitivities of the relevant layers for the best plan of a setting, until the deadline (`time.perf_counter`).

    `bottleneck` is the device whose layers come first. Raises UsageError or NoPlanError where there is no plan.
    """
    plan = replan(profile, setting)
    indices = {layer.name: i for i, layer in enumerate(profile.layers)}
    order = [indices[name] for name in plan.layer_names]
    times_s = [sum(x) for stage in plan.stages for x in stage.layer_times_s]
    wanted, found = relevant_layers(plan, bottleneck), list[Sensitivity]()

    def better(layer: int, factor: float) -> Plan | None:
        """A plan that is better than the present cuts with the layer's times scaled; None where there is none."""
        if time.perf_counter() > deadline_s:
            raise TimeoutError
        scaled = _with_layer_times(profile, order[layer], factor)
        present_s = plan_with_cuts(scaled.reordered(order), setting, plan.cuts).proof.objective_s
        other = replan(scaled, setting)
        return other if other.proof.objective_s < present_s * (1 - _ROUNDING) else None

    for number, layer in enumerate(wanted):
        name = plan.layer_names[layer]
        progress(f"how far {name} may change", number / len(wanted))
        try:
            slower, faster = (
                _turning_point(plan, partial(better, layer), factors)
                for factors in (_FACTORS, [1 / x for x in _FACTORS])
            )
        except TimeoutError:
            break
        stage = next(x.index for x in plan.stages if x.first_layer <= layer < x.end_layer)
        found.append(Sensitivity(layer=name, stage=stage, time_s=times_s[layer], slower=slower, faster=faster))
    left_out = tuple(plan.layer_names[layer] for layer in wanted[len(found) :])
    return Sensitivities(
        layers=tuple(found), left_out=left_out, most_factor=MOST_FACTOR, is_proven=plan.proof.is_proven
    )


def relevant_layers(plan: Plan, bottleneck: int) -> list[int]:
    """Layers that take time, in this order: beside the cuts of the bottleneck device, its slowest, beside other cuts."""
    times_s = [sum(x) for stage in plan.stages for x in stage.layer_times_s]
    stages = plan.stages_of(bottleneck)
    own = [i for stage in stages for i in range(stage.first_layer, stage.end_layer)]
    own.sort(key=lambda i: times_s[i], reverse=True)
    ends = [end for stage in stages for end in (stage.first_layer, stage.end_layer)]
    beside, beside_others = (
        [i for cut in cuts if 0 < cut < plan.stages[-1].end_layer for i in (cut - 1, cut)] for cuts in (ends, plan.cuts)
    )
    ordered = dict.fromkeys([*beside, *own[: MOST_LAYERS // 2], *beside_others])
    return [i for i in ordered if times_s[i] > 0][:MOST_LAYERS]


def _with_layer_times(profile: Profile, index: int, factor: float) -> Profile:
    """The profile with all times of one layer multiplied by `factor`."""
    layer = profile.layers[index]
    costs = tuple(x.corrected(forward=factor, backward=factor, recompute=factor) for x in layer.costs)
    scaled = replace(layer, costs=costs, same_as=None)
    return replace(profile, layers=(*profile.layers[:index], scaled, *profile.layers[index + 1 :]))


def _turning_point(plan: Plan, better: Callable[[float], Plan | None], factors: Sequence[float]) -> TurningPoint | None:
    """The factor nearest to 1 beyond which another plan is better: the first of `factors` that has one, then bisected."""
    tried = ((same, factor, better(factor)) for same, factor in pairwise((1.0, *factors)))
    same, factor, other = next((x for x in tried if x[2] is not None), (1.0, 1.0, None))
    if other is None:
        return None
    while max(same / factor, factor / same) > _PRECISION:
        middle = (same * factor) ** 0.5
        if (found := better(middle)) is None:
            same = middle
        else:
            factor, other = middle, found
    stages = {name: stage.index for stage in other.stages for name in stage.layer_names}
    moved = tuple(name for stage in plan.stages for name in stage.layer_names if stages[name] != stage.index)
    return TurningPoint(factor=(same * factor) ** 0.5, moved=moved)
