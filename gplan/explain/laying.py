"""A plan laid out with many sets of times at once: the simulator's recurrence on arrays.

An action starts when its device is free and its input has arrived; the step ends with each device's optimizers. Entry n
of every array is one step: with nothing added and every transfer charged it is the simulator's, to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from gplan.nouns import Action, ActionKind, Plan
from gplan.schedules import make_schedule
from gplan.simulator import action_s, dependency_order, needed_action

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
    """[num_steps]: seconds of each step, in O(K M) operations on arrays.

    `added_s` of an action is what it takes beyond the plan's time, or below it where negative; `charged` of a stage is
    what share of the plan's time the transfers over the cut after it take.
    """
    schedule = make_schedule(plan.schedule, num_stages=plan.num_stages, num_microbatches=plan.num_microbatches)
    device = {action: i for i, order in enumerate(schedule.orders) for action in order}
    free: list[Amount] = [0.0] * len(schedule.orders)
    arrived: dict[Action, Amount] = {}
    for action in dependency_order(schedule):
        i, needed = device[action], needed_action(action, plan.num_stages)
        start = free[i] if needed is None else np.maximum(free[i], arrived.pop(needed))
        free[i] = start + _duration_s(plan, action, added_s)
        arrived[action] = free[i] + _transfer_s(plan, action, charged)
    for i, order in enumerate(schedule.orders):
        for stage in sorted({action.stage for action in order}):
            free[i] = free[i] + _duration_s(plan, Action(stage, ActionKind.OPTIMIZER, 0), added_s)
    ends: Floats = np.maximum.reduce([np.broadcast_to(end, (num_steps,)) for end in free])
    return ends


def _duration_s(plan: Plan, action: Action, added_s: Callable[[Action], Amount]) -> Amount:
    cost, num_microbatches = plan.stages[action.stage].cost, plan.num_microbatches
    usual_s = action_s(action, cost, num_microbatches=num_microbatches, recompute=plan.recompute)
    return np.maximum(usual_s + added_s(action), 0.0)


def _transfer_s(plan: Plan, action: Action, charged: Callable[[int], Amount]) -> Amount:
    """Seconds from the end of an action until its output is with the neighbouring stage."""
    forward = action.kind is ActionKind.FORWARD
    cut = action.stage if forward else action.stage - 1
    if not 0 <= cut < plan.num_stages - 1:
        return 0.0
    cost = plan.stages[cut].cost
    return charged(cut) * (cost.activation_s if forward else cost.gradient_s)
