"""Many steps at once are what the simulator says of each."""

from __future__ import annotations

import numpy as np
import pytest

from gplan.core import Action, ActionKind
from gplan.simulation.batch_layout import lay_out_steps
from gplan.simulation.simulator import planned_s, schedule_of, simulate, timeline_of
from tests.scheduled import EVERY_SCHEDULE, scheduled_plan


@pytest.mark.parametrize("schedule", EVERY_SCHEDULE)
@pytest.mark.parametrize("recompute", ["never", "always", "except-last"])
def test_with_nothing_added_it_is_the_simulator_to_the_last_bit(schedule: str, recompute: str) -> None:
    plan = scheduled_plan(schedule, recompute=recompute)  # type: ignore[arg-type]
    found, timeline = lay_out_steps(plan, num_steps=3), simulate(plan)
    assert found.step_s.tolist() == [timeline.step_s] * 3
    assert found.loop_s == pytest.approx(timeline.loop_end_s)


@pytest.mark.parametrize("schedule", EVERY_SCHEDULE)
def test_steps_equal_their_timelines(schedule: str) -> None:
    plan, chance = scheduled_plan(schedule), np.random.default_rng(1)
    order, costs = schedule_of(plan), [stage.cost for stage in plan.stages]
    actions = [x for device in order.orders for x in device]
    actions += [Action(stage, ActionKind.OPTIMIZER, 0) for stage in range(plan.num_stages)]
    added = {action: chance.uniform(0.0, 3.0, 4) for action in actions}
    found = lay_out_steps(plan, num_steps=4, added_s=lambda action: added[action])
    usual_s = planned_s(order, costs, "never")
    for n in range(4):

        def duration_s(action: Action, n: int = n) -> float:
            return float(usual_s(action) + added[action][n])

        timeline = timeline_of(order, costs, duration_s=duration_s, origin="computed")
        assert found.step_s[n] == timeline.step_s
        assert found.loop_s[n] == pytest.approx(timeline.loop_end_s)


@pytest.mark.parametrize("schedule", ["1f1b", "looped-bfs:2", "zb-v"])
def test_no_action_takes_less_than_no_time(schedule: str) -> None:
    plan = scheduled_plan(schedule)
    order, costs = schedule_of(plan), plan.stage_costs
    transfers_only_s = lay_out_steps(plan, num_steps=1, added_s=lambda _: -1e3).step_s[0]
    assert transfers_only_s == timeline_of(order, costs, duration_s=lambda _: 0.0, origin="computed").step_s
