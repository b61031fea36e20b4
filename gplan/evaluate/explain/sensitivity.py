"""By how much a layer must become slower or faster for the best plan to move layers.

All times of one layer are scaled and the model is planned again; the cuts change where another plan's objective is
below that of the present cuts by more than rounding, so ties are no change. The factors 1.6, 2.5 and 4 (and their
inverses) are tried, then the turning point is bisected to half a percent. A change that comes and goes between two of
these factors is not found.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gplan.core import Plan, Profile, Stage
from gplan.core.progress import Progress
from gplan.evaluate.explain.bottleneck import layer_times_s
from gplan.evaluate.explain.explanation import Sensitivities, Sensitivity, TurningPoint
from gplan.evaluate.replanning import PlanSettings, plan_with_cuts, replan, with_layer_times

MOST_FACTOR = 4.0
MOST_LAYERS = 12
_FACTORS = (MOST_FACTOR ** (1 / 3), MOST_FACTOR ** (2 / 3), MOST_FACTOR)
_PRECISION = 1.005
_ROUNDING = 1e-9


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
    trial = _Trial(profile=profile, order=tuple(indices[x] for x in plan.layer_names), setting=setting, plan=plan)
    wanted = relevant_layers(plan, bottleneck)
    found: list[Sensitivity] = []
    for index, layer in enumerate(wanted):
        progress(f"how far {plan.layer_names[layer]} may change", index / len(wanted))
        sensitivity = _sensitivity(trial, layer, deadline_s)
        if sensitivity is None:
            break
        found.append(sensitivity)
    left_out = tuple(plan.layer_names[layer] for layer in wanted[len(found) :])
    return Sensitivities(
        layers=tuple(found), left_out=left_out, most_factor=MOST_FACTOR, is_proven=plan.proof.is_proven
    )


def relevant_layers(plan: Plan, bottleneck: int) -> list[int]:
    """Layers that take time, in this order: beside the cuts of the bottleneck device, its slowest, beside other cuts."""
    times = [x for stage in plan.stages for x in layer_times_s(plan, stage)]
    stages = plan.stages_of(bottleneck)
    own = [i for stage in stages for i in range(stage.first_layer, stage.end_layer)]
    own.sort(key=lambda i: times[i], reverse=True)
    ends = [end for stage in stages for end in (stage.first_layer, stage.end_layer)]
    ordered = dict.fromkeys([*_beside(ends, plan), *own[: MOST_LAYERS // 2], *_beside(plan.cuts, plan)])
    return [i for i in ordered if times[i] > 0][:MOST_LAYERS]


def _beside(cuts: Sequence[int], plan: Plan) -> list[int]:
    """The layers before and after each cut that is not an end of the model."""
    return [i for cut in cuts if 0 < cut < plan.stages[-1].end_layer for i in (cut - 1, cut)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """The best plan of the unchanged profile, and the indices of the profile's layers in the plan's order."""

    profile: Profile
    order: tuple[int, ...]
    setting: PlanSettings
    plan: Plan

    def better(self, layer: int, factor: float) -> Plan | None:
        """A plan that is better than the present cuts with the layer's times scaled; None where there is none."""
        scaled = with_layer_times(self.profile, self.order[layer], factor)
        present_s = plan_with_cuts(scaled.reordered(self.order), self.setting, self.plan.cuts).proof.objective_s
        other = replan(scaled, self.setting)
        return other if other.proof.objective_s < present_s * (1 - _ROUNDING) else None

    def moved(self, other: Plan) -> tuple[str, ...]:
        """The layers that are on another stage of the other plan."""
        stages = {name: stage.index for stage in other.stages for name in stage.layer_names}
        return tuple(name for stage in self.plan.stages for name in stage.layer_names if stages[name] != stage.index)


def _sensitivity(trial: _Trial, layer: int, deadline_s: float) -> Sensitivity | None:
    """One layer, slower and faster; None where the time is over."""
    stage: Stage = next(x for x in trial.plan.stages if x.first_layer <= layer < x.end_layer)
    try:
        slower = _turning_point(trial, layer, _FACTORS, deadline_s)
        faster = _turning_point(trial, layer, [1 / x for x in _FACTORS], deadline_s)
    except TimeoutError:
        return None
    return Sensitivity(
        layer=trial.plan.layer_names[layer],
        stage=stage.index,
        time_s=layer_times_s(trial.plan, stage)[layer - stage.first_layer],
        slower=slower,
        faster=faster,
    )


def _turning_point(trial: _Trial, layer: int, factors: Sequence[float], deadline_s: float) -> TurningPoint | None:
    """The factor nearest to 1 beyond which another plan is better; raises TimeoutError where the time is over."""

    def better(factor: float) -> Plan | None:
        if time.perf_counter() > deadline_s:
            raise TimeoutError
        return trial.better(layer, factor)

    same = 1.0
    for factor in factors:
        other = better(factor)
        if other is not None:
            return _bisected(trial, better, same=same, factor=factor, other=other)
        same = factor
    return None


def _bisected(
    trial: _Trial, better: Callable[[float], Plan | None], *, same: float, factor: float, other: Plan
) -> TurningPoint:
    while max(same / factor, factor / same) > _PRECISION:
        middle = (same * factor) ** 0.5
        found = better(middle)
        if found is None:
            same = middle
        else:
            factor, other = middle, found
    return TurningPoint(factor=(same * factor) ** 0.5, moved=trial.moved(other))
