"""A plan as one process carries it out that has the host to itself, such as the virtual engine: without contention.

A profile too, for plans to be held against such a one.
"""

from __future__ import annotations

from dataclasses import replace

from gplan.core import Layer, Plan, Profile, Stage, StageCost
from gplan.simulation.simulator import simulate

NOTE = "one process computes alone: the prediction leaves out the contention of processes that share a host"

_SHARED = ("forward_s", "backward_s", "recompute_s", "input_gradient_s", "weight_gradient_s")


def plan_without_contention(plan: Plan) -> Plan:
    """The same plan with the seconds of a host of its own; the same object where nothing was added for company."""
    if all(x.cost.contention == x.cost.optimizer_contention == 1.0 for x in plan.stages):
        return plan
    alone = replace(plan, stages=tuple(map(_stage_alone, plan.stages)), notes=(*plan.notes, NOTE))
    timeline = simulate(alone)
    prediction = replace(plan.prediction, step_s=timeline.step_s, bubble=timeline.bubble)
    return replace(alone, prediction=prediction)


def profile_without_contention(profile: Profile) -> Profile:
    """The same profile with the seconds of a host of its own, however many devices compute."""
    return replace(
        profile,
        layers=tuple(map(_layer_alone, profile.layers)),
        loss=tuple(replace(x, contention=1.0) for x in profile.loss),
        step=replace(profile.step, contention=1.0),
    )


def _layer_alone(layer: Layer) -> Layer:
    return replace(layer, costs=tuple(replace(x, contention=1.0) for x in layer.costs))


def _stage_alone(stage: Stage) -> Stage:
    factor = stage.cost.contention
    return replace(
        stage,
        cost=_cost_alone(stage.cost),
        layer_forward_s=tuple(x / factor for x in stage.layer_forward_s),
        layer_backward_s=tuple(x / factor for x in stage.layer_backward_s),
    )


def _cost_alone(cost: StageCost) -> StageCost:
    """The halves of a backward that are not known stay so."""
    seconds = {name: getattr(cost, name) for name in _SHARED}
    return replace(
        cost,
        **{name: x / cost.contention for name, x in seconds.items() if x is not None},
        optimizer_s=cost.optimizer_s / cost.optimizer_contention,
        contention=1.0,
        optimizer_contention=1.0,
    )
