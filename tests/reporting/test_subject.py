"""The load of each stage, the sides and the memory limit, checked against the timelines and the plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gplan.core import ActionKind, MachineDevice
from gplan.reporting.subject import MEASURED, PASSES, PREDICTED, capacity_bytes, side_text, stage_loads
from tests.reporting.subjects import make_plan, make_run, make_scheduled_plan

MIXED = "custom:0F0 0F1 0B0 0B1 / 1F0 1B0 1F1 1I1 1W1"


@pytest.mark.parametrize("recompute", ["never", "except-last", "always"])
def test_the_largest_load_is_the_objective_of_a_plan_that_minimises_the_largest_stage(recompute: str) -> None:
    plan = make_plan(9, num_stages=3, recompute=recompute)  # type: ignore[arg-type]
    assert max(sum(x.values()) for x in stage_loads(plan)[PREDICTED]) == pytest.approx(plan.proof.objective_s)


def test_recompute_is_split_from_the_predicted_backward_but_not_from_the_measured_one() -> None:
    run = make_run(make_plan(recompute="always"))
    loads, cost = stage_loads(run), run.plan.stages[2].cost
    assert loads[PREDICTED][2]["backward_s"] == pytest.approx(cost.backward_s)
    assert loads[PREDICTED][2]["recompute_s"] == pytest.approx(cost.recompute_s)
    assert loads[MEASURED][2]["recompute_s"] == 0
    assert loads[MEASURED][2]["backward_s"] == pytest.approx(run.timeline.mean_s(ActionKind.BACKWARD, stage=2))


def test_what_a_stage_receives_is_charged_to_it() -> None:
    plan = make_plan(num_stages=3)
    received = [x["communication_s"] for x in stage_loads(plan)[PREDICTED]]
    first, second, third = (stage.cost for stage in plan.stages)
    assert received[0] == pytest.approx(first.gradient_s)
    assert received[1] == pytest.approx(first.activation_s + second.gradient_s)
    assert received[2] == pytest.approx(second.activation_s)
    assert third.activation_s == 0


def test_a_split_backward_has_its_halves_apart() -> None:
    plan = make_scheduled_plan("zb-h1")
    first, second = stage_loads(plan)[PREDICTED]
    cost, other = (stage.cost for stage in plan.stages)
    assert (first["backward_s"], first["input_gradient_s"]) == (0, 0), "nobody waits for the first stage's"
    assert first["weight_gradient_s"] == pytest.approx(cost.backward_s)
    assert (second["input_gradient_s"], second["weight_gradient_s"]) == pytest.approx((other.backward_s / 2,) * 2)


@pytest.mark.parametrize("recompute", ["except-last", "always"])
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v", "interleaved-1f1b:2"])
def test_what_recomputing_adds_is_apart_from_the_half_that_runs_it(schedule: str, recompute: str) -> None:
    plan = make_scheduled_plan(schedule, recompute=recompute)  # type: ignore[arg-type]
    without, loads = (stage_loads(x)[PREDICTED] for x in (replace(plan, recompute="never"), plan))
    share = 1.0 if recompute == "always" else 0.75
    assert [x["recompute_s"] for x in loads] == pytest.approx([share * x.cost.recompute_s for x in plan.stages])
    for part in PASSES:
        assert [x[part] for x in loads] == pytest.approx([x[part] for x in without])


def test_a_stage_that_mixes_whole_and_split_backwards_has_the_recompute_of_both() -> None:
    plan = make_scheduled_plan(MIXED, num_microbatches=2, recompute="always")
    second, cost = stage_loads(plan)[PREDICTED][1], plan.stages[1].cost
    assert second["recompute_s"] == pytest.approx(cost.recompute_s)
    assert second["backward_s"] == pytest.approx(cost.backward_s / 2), "one micro-batch of two"
    assert second["input_gradient_s"] == pytest.approx(cost.backward_s / 4)


def test_a_run_is_the_measured_side_whatever_its_timeline_says_of_its_origin() -> None:
    run = make_run()
    run = replace(run, timeline=replace(run.timeline, origin="computed"))
    assert set(stage_loads(run)) == {PREDICTED, MEASURED}
    assert set(stage_loads(run.plan)) == {PREDICTED}


def test_capacity_is_the_limit_else_what_the_device_has_else_nothing() -> None:
    plan = make_plan()
    big = replace(plan, device=replace(plan.device, memory_bytes=64))
    assert capacity_bytes(plan) is None
    assert capacity_bytes(big) == 64
    assert capacity_bytes(replace(big, memory_limit_bytes=32)) == 32
    places = [MachineDevice(name=str(i), host="a", memory_bytes=48 - i) for i in range(big.num_stages)]
    stages = tuple(replace(x, machine_device=place) for x, place in zip(big.stages, places, strict=True))
    on_machine = replace(big, stages=stages)
    assert capacity_bytes(on_machine) == places[-1].memory_bytes
    assert capacity_bytes(replace(on_machine, memory_limit_bytes=32)) == 32


def test_sides_are_named_by_how_their_figures_came_about() -> None:
    run = make_run(engine="virtual")
    assert side_text(run, MEASURED) == "measured (virtual engine)"
    assert side_text(run, PREDICTED) == side_text(run.plan, PREDICTED) == "predicted"
