"""What devices hold over time: no gap, the plan's own peak, and categories that come and go as the order says."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gplan.core import Plan, StageBytes, StageCost
from gplan.cost.memory_moments import device_memory
from gplan.files.json_files import load, save
from gplan.schedules.registry import every_schedule, make_schedule
from gplan.simulation.memory_timeline import Holding, device_holdings, fullest, memory_timeline
from gplan.simulation.simulator import simulate, simulate_schedule
from tests.reporting.subjects import make_plan, make_scheduled_plan

SCHEDULES = every_schedule()
COST = StageCost(
    forward_s=1.0, backward_s=2.0, input_gradient_s=1.0, weight_gradient_s=1.0, recompute_s=1.0, optimizer_s=0.5,
    activation_bytes=1, gradient_bytes=1, activation_s=0.25, gradient_s=0.25,
)  # fmt: skip
sizes = st.integers(0, 100)
parts = st.builds(StageBytes, **dict.fromkeys(StageBytes.__struct_fields__, sizes))


@given(
    st.sampled_from(SCHEDULES), st.integers(1, 4), st.integers(1, 6), st.sampled_from(["never", "always", "except-last"]),
    st.lists(parts, min_size=8, max_size=8),
)  # fmt: skip
def test_the_most_of_all_is_the_peak_that_plans_are_made_with(name, num_devices, m, recompute, held) -> None:  # type: ignore[no-untyped-def]
    schedule = make_schedule(name, num_devices=num_devices, num_microbatches=m)
    timeline = simulate_schedule(schedule, [COST] * schedule.num_stages, recompute=recompute)
    own = dict(enumerate(held))
    for device in range(num_devices):
        stages = {stage: own[stage] for stage in schedule.stages_of(device)}
        expected = device_memory(schedule, device, stages, recompute=recompute)
        most = fullest(device_holdings(schedule, timeline, device, own, recompute=recompute))
        assert most.num_bytes == sum(x.peak_bytes for x in expected.values())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_holdings_follow_each_other_without_a_gap_to_the_end_of_the_step(schedule: str) -> None:
    plan = make_scheduled_plan(schedule)
    for held in memory_timeline(plan):
        assert (held[0].start_s, held[-1].end_s) == (0.0, simulate(plan).step_s)
        assert all(one.end_s == other.start_s for one, other in pairwise(held))


def test_before_the_first_action_and_after_the_update_only_what_is_always_held_is_there() -> None:
    plan = make_scheduled_plan("zb-v")
    for device, held in enumerate(memory_timeline(plan)):
        always = sum(x.parts.weight + x.parts.optimizer for x in plan.stages_of(device) if x.parts)
        assert held[0].num_bytes == held[-1].num_bytes == always
        assert held[0].category_bytes("activation_bytes") == held[-1].category_bytes("gradient_bytes") == 0


def test_between_forward_and_backward_the_activations_are_held_and_gradients_stay() -> None:
    plan = make_plan(4, num_stages=2, num_microbatches=2, schedule="gpipe")
    last = memory_timeline(plan)[1]
    stash, sent = plan.stages[1].parts.stash, plan.stages[1].parts.sent  # type: ignore[union-attr]
    activations = {x.action: x.category_bytes("activation_bytes") for x in last}
    assert activations["1F0"] == stash
    assert activations["1F1"] == 2 * stash
    assert activations["1B0"] == 2 * sent, "what was sent stays"
    gradients = [x.category_bytes("gradient_bytes") for x in last if x.action in ("1F1", "1B1", "1B0", "optimizer")]
    assert gradients[:2] == [0, 0]
    assert set(gradients[2:]) == {plan.stages[1].parts.gradient}  # type: ignore[union-attr]


def test_where_layers_are_selected_a_device_that_recomputes_none_is_as_without() -> None:
    plan = make_plan(recompute="never")
    selecting = replace(plan, recompute="selected")
    assert _levels(memory_timeline(selecting)) == _levels(memory_timeline(plan))


def test_a_plan_file_says_what_its_memory_is_made_of(tmp_path: Path) -> None:
    plan = make_plan()
    save(plan, tmp_path / "plan.json")
    assert memory_timeline(load(Plan, tmp_path / "plan.json")) == memory_timeline(plan) != ()


def test_a_plan_that_does_not_say_what_its_memory_is_made_of_has_no_timeline() -> None:
    plan = make_plan()
    assert memory_timeline(replace(plan, stages=(replace(plan.stages[0], parts=None), *plan.stages[1:]))) == ()


def _levels(timeline: tuple[tuple[Holding, ...], ...]) -> list[list[int]]:
    return [[x.num_bytes for x in held if x.action != ""] for held in timeline]
