"""Many steps at once are what the simulator says of each."""

from __future__ import annotations

import numpy as np
import pytest

from gplan.explain.laying import steps_s
from gplan.nouns import Action, ActionKind
from gplan.schedules import make_schedule
from gplan.simulator import action_s, simulate, timeline_of
from tests.explain.settings import plan_of, uneven


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_with_nothing_added_it_is_the_simulator_to_the_last_bit(schedule: str) -> None:
    plan = plan_of(uneven(), schedule=schedule, recompute="except-last", num_stages=4)
    assert steps_s(plan, num_steps=3).tolist() == [simulate(plan).step_s] * 3


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_every_step_is_the_timeline_of_its_own_durations(schedule: str) -> None:
    plan, chance = plan_of(uneven(), schedule=schedule, num_stages=4), np.random.default_rng(1)
    order = make_schedule(schedule, num_devices=plan.num_stages, num_microbatches=plan.num_microbatches)
    actions = [x for device in order.orders for x in device]
    actions += [Action(stage, ActionKind.OPTIMIZER, 0) for stage in range(plan.num_stages)]
    added = {action: chance.uniform(0.0, 3.0, 4) for action in actions}
    found = steps_s(plan, num_steps=4, added_s=lambda action: added[action])
    costs = [stage.cost for stage in plan.stages]
    for n in range(4):

        def duration_s(action: Action, n: int = n) -> float:
            usual_s = action_s(action, costs[action.stage], num_microbatches=plan.num_microbatches, recompute="never")
            return float(usual_s + added[action][n])

        assert found[n] == timeline_of(order, costs, duration_s=duration_s, origin="computed").step_s


def test_no_action_takes_less_than_no_time() -> None:
    plan = plan_of(uneven(), num_stages=4)
    transfers_only_s = steps_s(plan, num_steps=1, added_s=lambda _: -1e3)[0]
    assert transfers_only_s == pytest.approx(sum(x.cost.activation_s + x.cost.gradient_s for x in plan.stages))
