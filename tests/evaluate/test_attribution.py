"""Attribution of errors: made timelines that differ from the prediction in one thing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gplan.core import Action, ActionKind, Plan, RecomputeMode, StageCost, Timeline
from gplan.evaluate.attribution import ErrorCause, attribute_error
from gplan.simulation.simulator import planned_s, schedule_of, simulate, timeline_of
from tests.evaluate.hosts import at_moments, measured_run
from tests.reporting.subjects import make_plan, make_scheduled_plan, measured_timeline
from tests.scheduled import EVERY_SCHEDULE, scheduled_plan

Parts = dict[tuple[ErrorCause, int | None], float]


def parts_of(plan: Plan, timeline: Timeline) -> Parts:
    """The parts that are of any size; their sum is the error."""
    found = attribute_error(measured_run(plan, timeline))
    assert found is not None and found.error_s == pytest.approx(timeline.step_s - simulate(plan).step_s, abs=1e-15)
    assert math.fsum(x.seconds for x in found.parts) == pytest.approx(found.error_s, rel=1e-12, abs=1e-15)
    return {(x.cause, x.stage): x.seconds for x in found.parts if abs(x.seconds) > 1e-12 * found.measured_s}


def with_costs(plan: Plan, change: Callable[[int, StageCost], dict[str, Any]]) -> Plan:
    stages = tuple(replace(x, cost=replace(x.cost, **change(x.index, x.cost))) for x in plan.stages)
    return replace(plan, stages=stages)


EVERY_RECOMPUTE: tuple[RecomputeMode, ...] = ("never", "always", "except-last")


@pytest.mark.parametrize("schedule", EVERY_SCHEDULE)
def test_perfect_step_has_no_parts(schedule: str) -> None:
    plan = scheduled_plan(schedule)
    assert parts_of(plan, simulate(plan)) == {}


@pytest.mark.parametrize("recompute", EVERY_RECOMPUTE)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved-1f1b:2", "zb-h1", "zb-v"])
def test_parts_add_up_to_the_error(schedule: str, recompute: RecomputeMode) -> None:
    plan = make_scheduled_plan(schedule, num_devices=3, num_microbatches=6, recompute=recompute)
    assert (ErrorCause.COMPUTE, 0) in parts_of(plan, measured_timeline(plan, seed=3))


@pytest.mark.parametrize("recompute", EVERY_RECOMPUTE)
def test_slow_stage_is_the_whole_error(recompute: RecomputeMode) -> None:
    plan = make_plan(num_stages=2, recompute=recompute)
    slower = with_costs(
        plan, lambda i, cost: {"forward_s": 1.3 * cost.forward_s, "recompute_s": 1.1 * cost.recompute_s} if i else {}
    )
    assert set(parts_of(plan, simulate(slower))) == {(ErrorCause.COMPUTE, 1)}


def test_equal_stages_share_the_error() -> None:
    plan = scheduled_plan("gpipe", num_microbatches=4, times_s=(1.0,), transfer_s=0.0)
    slower = with_costs(plan, lambda _, cost: {"forward_s": 1.5, "backward_s": 3.0})
    found = parts_of(plan, simulate(slower))
    assert found[ErrorCause.COMPUTE, 0] == pytest.approx(found[ErrorCause.COMPUTE, 1])


def test_communication_part() -> None:
    plan = scheduled_plan("gpipe", num_microbatches=4, times_s=(1.0,), transfer_s=0.25)
    slower = with_costs(plan, lambda i, cost: {} if i else {"activation_s": 0.75, "gradient_s": 1.0})
    assert parts_of(plan, simulate(slower)) == {(ErrorCause.COMMUNICATION, None): pytest.approx(1.0)}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_engine_gaps_part(schedule: str) -> None:
    plan = scheduled_plan(schedule, num_microbatches=4, times_s=(1.0,))
    slower = with_costs(plan, lambda _, cost: {"gap_s": 0.05})
    assert set(parts_of(plan, simulate(slower))) <= {(ErrorCause.ENGINE, None), (ErrorCause.STEP_EXTRAS, None)}
    assert parts_of(plan, simulate(slower))[ErrorCause.ENGINE, None] > 0


def test_faster_engine_is_a_negative_part() -> None:
    plan = with_costs(scheduled_plan("1f1b", num_microbatches=4, times_s=(1.0,)), lambda _, cost: {"gap_s": 0.05})
    assert parts_of(plan, simulate(with_costs(plan, lambda _, cost: {"gap_s": 0.0})))[ErrorCause.ENGINE, None] < 0


def test_single_actions_part() -> None:
    plan = scheduled_plan("gpipe", num_microbatches=4, times_s=(1.0,), transfer_s=0.0)
    schedule, costs = schedule_of(plan), [x.cost for x in plan.stages]
    usual_s = planned_s(schedule, costs, plan.recompute)
    jitter = {Action(0, ActionKind.FORWARD, 0): 0.5, Action(0, ActionKind.FORWARD, 3): -0.5}
    timeline = timeline_of(schedule, costs, duration_s=lambda x: usual_s(x) + jitter.get(x, 0.0), origin="measured")
    assert parts_of(plan, timeline) == {
        (ErrorCause.SINGLE_ACTIONS, None): pytest.approx(timeline.step_s - simulate(plan).step_s)
    }


@pytest.mark.parametrize("field", ["optimizer_s", "all_reduce_s"])
def test_a_longer_optimizer_is_a_step_extra(field: str) -> None:
    plan = make_plan()
    slower = with_costs(plan, lambda _, cost: {field: 0.01 + getattr(cost, field)})
    assert parts_of(plan, simulate(slower)) == {(ErrorCause.STEP_EXTRAS, None): pytest.approx(0.01)}


def test_a_late_first_action_is_a_step_extra() -> None:
    plan = make_plan()
    assert parts_of(plan, at_moments(simulate(plan), lambda _, moment_s: moment_s + 0.25)) == {
        (ErrorCause.STEP_EXTRAS, None): pytest.approx(0.25)
    }


def test_pause_with_input_present_is_engine_time() -> None:
    plan = scheduled_plan("gpipe", num_devices=1, num_microbatches=4, times_s=(1.0,), transfer_s=0.0)

    def late(action: Action, moment_s: float) -> float:
        return moment_s + (0.0 if action.kind is ActionKind.FORWARD else 0.8)

    assert parts_of(plan, at_moments(simulate(plan), late)) == {(ErrorCause.ENGINE, None): pytest.approx(0.8)}
