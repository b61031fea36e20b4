"""By how much a layer must become slower or faster before the best plan puts layers elsewhere.

All times of one layer are scaled and the model is balanced anew: the cuts change where another plan's objective is
below that of the present cuts by more than rounding, so that ties are no change. The factor is found by bisection to
half a percent between the last factor tried without a change and the first one with. Three factors a side are tried
before (1.6, 2.5 and 4, and their inverses): a change that comes and goes between two of them is not seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gplan.core import Plan, Profile, Stage
from gplan.evaluate.explain.alternatives import best, priced, with_layer_times
from gplan.evaluate.explain.bottleneck import layer_times_s
from gplan.evaluate.explain.explanation import Sensitivities, Sensitivity, Setting, TurningPoint

MOST_FACTOR = 4.0
MOST_LAYERS = 12
_FACTORS = (MOST_FACTOR ** (1 / 3), MOST_FACTOR ** (2 / 3), MOST_FACTOR)
_PRECISION = 1.005
_ROUNDING = 1e-9


def sensitivities_of(
    profile: Profile, setting: Setting, *, bottleneck: int, deadline_s: float, progress: Callable[[str, float], None]
) -> Sensitivities:
    """The layers that matter for the best plan of a setting, until the deadline (`time.perf_counter`) is over.

    `bottleneck` is the device whose layers come first. Raises UsageError or NoPlanError where there is no plan.
    """
    plan = best(profile, setting)
    places = {layer.name: i for i, layer in enumerate(profile.layers)}
    trial = _Trial(profile=profile, order=tuple(places[x] for x in plan.layer_names), setting=setting, plan=plan)
    wanted = layers_that_matter(plan, bottleneck)
    found: list[Sensitivity] = []
    for index, layer in enumerate(wanted):
        progress(f"how far {plan.layer_names[layer]} may change", index / len(wanted))
        one = _sensitivity(trial, layer, deadline_s)
        if one is None:
            break
        found.append(one)
    left_out = tuple(plan.layer_names[layer] for layer in wanted[len(found) :])
    return Sensitivities(
        layers=tuple(found), left_out=left_out, most_factor=MOST_FACTOR, is_proven=plan.proof.is_proven
    )


def layers_that_matter(plan: Plan, bottleneck: int) -> list[int]:
    """Layers that take time, in this order: beside the bottleneck's cuts, its dearest, beside the other cuts.

    `bottleneck` is a device; its cuts are those of all its stages.
    """
    times = [x for stage in plan.stages for x in layer_times_s(stage)]
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
    """The plan that is held against others, and the layers of the profile in its order."""

    profile: Profile
    order: tuple[int, ...]
    setting: Setting
    plan: Plan

    def better(self, layer: int, factor: float) -> Plan | None:
        """A better plan than the present cuts where the layer's times are scaled; None where there is none."""
        scaled = with_layer_times(self.profile, self.order[layer], factor)
        present_s = priced(scaled.reordered(self.order), self.setting, self.plan.cuts).objective_s
        other = best(scaled, self.setting)
        return other if other.proof.objective_s < present_s * (1 - _ROUNDING) else None

    def moved(self, other: Plan) -> tuple[str, ...]:
        """The layers that are on another stage, in the present order."""
        stages = {name: stage.index for stage in other.stages for name in stage.layer_names}
        return tuple(name for stage in self.plan.stages for name in stage.layer_names if stages[name] != stage.index)


def _sensitivity(trial: _Trial, layer: int, deadline_s: float) -> Sensitivity | None:
    """One layer both ways; None where the time is over before."""
    stage: Stage = next(x for x in trial.plan.stages if x.first_layer <= layer < x.end_layer)
    try:
        slower = _turning_point(trial, layer, _FACTORS, deadline_s)
        faster = _turning_point(trial, layer, [1 / x for x in _FACTORS], deadline_s)
    except TimeoutError:
        return None
    return Sensitivity(
        layer=trial.plan.layer_names[layer],
        stage=stage.index,
        time_s=layer_times_s(stage)[layer - stage.first_layer],
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
