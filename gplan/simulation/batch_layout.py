"""A plan laid out with many sets of times at once: the simulator's recurrence on arrays.

An action starts when its device is free and what it needs of another device has arrived; the step ends with each
device's optimizers, one after the other. Entry n of every array is one step: with nothing added and every transfer
charged it is the simulator's, to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np

from gplan.core import Action, ActionKind, Floats, Plan
from gplan.cost.action_seconds import occupied
from gplan.simulation.kernel import NONE, Entry, action_times, whole_program
from gplan.simulation.simulator import gap_s, schedule_of, update_times

Amount: TypeAlias = Floats | float
"""One number for all steps, or one for each."""


class Steps(NamedTuple):
    """The seconds of each step, and of its micro-batch loop, which ends with the last backward."""

    step_s: Floats
    loop_s: Floats


def lay_out_steps(
    plan: Plan,
    *,
    num_steps: int,
    added_s: Callable[[Action], Amount] = lambda _: 0.0,
    charged: Callable[[int], Amount] = lambda _: 1.0,
) -> Steps:
    """Arrays [num_steps], in O(K M) operations on arrays, K being the stages.

    `added_s` of an action is what it takes beyond the plan's time, or below it where negative; `charged` of a stage is
    what share of the plan's time the transfers over the cut after it take.
    """
    schedule, zero, costs = schedule_of(plan), np.zeros(num_steps), plan.stage_costs
    program, times = whole_program(schedule, plan.recompute), [occupied(x) for x in costs]
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
    free, ends = [zero] * schedule.num_devices, [zero] * schedule.num_devices
    last = set(program.last)
    for i, (_, free_s, _) in enumerate(rows):
        if i in last:
            device, action = program.entries[i].device, program.actions[i]
            free[device], ends[device] = free_s, free_s - gap_s(action, costs[action.stage])
    updates = update_times(schedule, costs, free, lambda x: lasting_s(costs[x.stage].optimizer_s, x))
    return Steps(step_s=np.maximum.reduce([end_s for _, _, _, end_s in updates]), loop_s=np.maximum.reduce(ends))
