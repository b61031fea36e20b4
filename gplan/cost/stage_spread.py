"""By how much the actions of a stage vary, from the spread of its layers in the profile.

The samples of a profile are brought to one speed of the host, so a layer's quartiles are its own variation. Layers that
run one after the other vary together as far as a round of the profile did (`Profile.common_variance`, c): with s the
standard deviations of the layers of a stage, that of the stage is

    sqrt( (1 - c) * sum s^2  +  c * (sum s)^2 )
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from gplan.core import LayerCost, Plan, Profile, Stage, Timing
from gplan.corrections.microbatch_size import cost_at
from gplan.cost.layer_sums import first_half


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpread:
    """The standard deviation of each kind of action of a stage, as a share of its time."""

    forward: float = 0.0
    backward: float = 0.0
    recompute: float = 0.0
    input_gradient: float = 0.0
    weight_gradient: float = 0.0
    optimizer: float = 0.0


def stage_spreads(plan: Plan, profile: Profile) -> tuple[StageSpread, ...]:
    """The spread of every stage at the plan's micro-batch size; the profile is in the plan's order."""
    return tuple(_stage_spread(plan, stage, profile) for stage in plan.stages)


def _stage_spread(plan: Plan, stage: Stage, profile: Profile) -> StageSpread:
    size, common = plan.microbatch_size, profile.common_variance or 0.0
    layers = profile.layers[stage.first_layer : stage.end_layer]
    costs = [cost_at(layer.costs, size) for layer in layers]
    loss = [cost_at(profile.loss, size)] if profile.loss and stage is plan.stages[-1] else []
    every: list[LayerCost] = [*costs, *loss]
    recomputed = stage.recompute_layers if plan.recompute == "selected" else stage.layer_names
    again = [x for x, y in zip(costs, layers, strict=True) if y.name in recomputed]
    return StageSpread(
        forward=_spread_of_sum((x.forward for x in every), common),
        backward=_spread_of_sum((x.backward for x in every), common),
        recompute=_spread_of_sum((x.known_recompute for x in again), common),
        input_gradient=_spread_of_sum(map(first_half, every), common),
        weight_gradient=_spread_of_sum((x.weight_gradient for x in every), common),
        optimizer=_spread_of_sum((profile.step.optimizer, profile.step.zero_grad), 0.0),
    )


def _spread_of_sum(timings: Iterable[Timing | None], common: float) -> float:
    """The standard deviation of the sum of what is known, as a share of it."""
    known = [x for x in timings if x is not None]
    total_s = sum(x.median_s for x in known)
    variance = (1 - common) * sum(x.deviation_s**2 for x in known) + common * sum(x.deviation_s for x in known) ** 2
    return math.sqrt(variance) / total_s if total_s else 0.0
