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

from gplan.core import Action, ActionKind, Plan
from gplan.cost.stage_seconds import occupied
from gplan.simulation.kernel import NONE, Entry, action_times, whole_program
from gplan.simulation.simulator import schedule_of

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
    schedule, zero = schedule_of(plan), np.zeros(num_steps)
    program, times = whole_program(schedule, plan.recompute), [occupied(x) for x in plan.stage_costs]
    usual_s, hops_s = program.durations_s(times), program.hops_s(times)

    def lasting_s(usual: float, action: Action) -> Floats:
        return np.maximum(usual + added_s(action), zero)

    def hop_s(entry: Entry) -> Floats:
        if entry.hop == NONE:
            return zero
        key = program.hops[entry.hop]
        return zero + charged(key.stage if key.kind is ActionKind.FORWARD else key.stage - 1) * hops_s[entry.hop]

    rows = action_times(
        program.individual,
        [lasting_s(usual_s[x.duration], action) for x, action in zip(program.entries, program.actions, strict=True)],
        [hop_s(x) for x in program.entries],
        zero=zero,
    )
    free = [zero] * schedule.num_devices
    for entry, (_, free_s) in zip(program.entries, rows, strict=True):
        free[entry.device] = free_s
    for i in range(schedule.num_devices):
        for stage in schedule.stages_of(i):
            cost = plan.stage_costs[stage]
            update_s = lasting_s(cost.optimizer_s, Action(stage, ActionKind.OPTIMIZER, 0))
            free[i] = free[i] + (update_s + cost.before_update_s)
    ends: Floats = np.maximum.reduce(free)
    return ends
