"""Plans and profiles without the contention of processes that share a host.

One process that computes alone, such as the virtual engine, is compared with these.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from gplan.core import Contention, LayerCost, Plan, Profile
from gplan.simulation.simulator import simulate

NOTE = "one process computes alone: the prediction leaves out the contention of processes that share a host"


def plan_without_contention(plan: Plan) -> Plan:
    """The same plan for devices that do not share a host; the same object where no stage has contention."""
    if not plan.shares_host or all(x.contention == Contention() for x in plan.stages):
        return plan
    alone = replace(plan, shares_host=False, notes=(*plan.notes, NOTE))
    timeline = simulate(alone)
    prediction = replace(plan.prediction, step_s=timeline.step_s, bubble=timeline.bubble)
    return replace(alone, prediction=prediction)


def profile_without_contention(profile: Profile) -> Profile:
    """The same profile for devices that do not share a host, however many compute."""
    return replace(
        profile,
        layers=tuple(replace(x, costs=_alone(x.costs)) for x in profile.layers),
        loss=_alone(profile.loss),
        step=replace(profile.step, contention=1.0, update_contention=1.0),
    )


def _alone(costs: Iterable[LayerCost]) -> tuple[LayerCost, ...]:
    return tuple(replace(x, contention=1.0) for x in costs)
