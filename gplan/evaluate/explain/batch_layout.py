"""A plan laid out with many sets of times at once: the simulator's recurrence on arrays.

An action starts when its device is free and what it needs of another device has arrived; the step ends with each
device's optimizers, one after the other. Entry n of every array is one step: with nothing added and every transfer
charged it is the simulator's, to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from gplan.core import Action, ActionKind, Plan, Schedule
from gplan.schedules.dependencies import INPUT_GRADIENT_KINDS, execution_order
from gplan.simulation.simulator import occupying, planned_s, schedule_of

Floats: TypeAlias = NDArray[np.float64]
Amount: TypeAlias = Floats | float
"""One number for all steps, or one for each."""


def steps_s(
    plan: Plan,
    *,
    num_steps: int,
    added_s: Callable[[Action], Amount] = lambda _: 0.0,
    charged: Callable[[int], Amount] = lambda _: 1.0,
) -> Floats:
    """[num_steps]: seconds of each step, in O(K M) operations on arrays, K being the stages.

    `added_s` of an action is what it takes beyond the plan's time, or below it where negative; `charged` of a stage is
    what share of the plan's time the transfers over the cut after it take.
    """
    schedule = schedule_of(plan)
    flow, usual_s = (
        execution_order(schedule),
        planned_s(schedule, [occupying(x.cost) for x in plan.stages], plan.recompute),
    )

    def duration_s(action: Action) -> Amount:
        return np.maximum(usual_s(action) + added_s(action), 0.0)

    free: list[Amount] = [0.0] * schedule.num_devices
    arrivals: list[Amount] = []
    for action, i, need in zip(flow.actions, flow.devices, flow.dependencies, strict=True):
        is_awaited = need >= 0 and flow.devices[need] != i
        start = np.maximum(free[i], arrivals[need]) if is_awaited else free[i]
        free[i] = start + duration_s(action)
        arrivals.append(free[i] + _transfer_s(plan, schedule, action, charged))
    for i in range(schedule.num_devices):
        for stage in schedule.stages_of(i):
            free[i] = free[i] + (
                duration_s(Action(stage, ActionKind.OPTIMIZER, 0)) + plan.stages[stage].cost.before_update_s
            )
    ends: Floats = np.maximum.reduce([np.broadcast_to(end, (num_steps,)) for end in free])
    return ends


def _transfer_s(plan: Plan, schedule: Schedule, action: Action, charged: Callable[[int], Amount]) -> Amount:
    """Seconds from the end of an action until its output is with the neighbouring stage."""
    forward = action.kind is ActionKind.FORWARD
    cut = action.stage if forward else action.stage - 1
    if not (forward or action.kind in INPUT_GRADIENT_KINDS) or not 0 <= cut < plan.num_stages - 1:
        return 0.0
    if schedule.devices[cut] == schedule.devices[cut + 1]:
        return 0.0
    cost = plan.stages[cut].cost
    return charged(cut) * (cost.activation_s if forward else cost.gradient_s)
