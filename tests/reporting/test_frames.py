"""The numbers behind the charts, checked against the timelines and the plan that they come from."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gplan.core import ActionKind, MachineDevice
from gplan.reporting.subject import (
    BACKWARDS,
    MEASURED,
    PREDICTED,
    capacity_bytes,
    idle_frame,
    side_text,
    spans_frame,
    stages_frame,
    transfers_frame,
)
from gplan.simulation.bubble import idle_pieces
from gplan.simulation.simulator import simulate
from tests.reporting.subjects import make_plan, make_run, make_scheduled_plan

MIXED = "custom:0F0 0F1 0B0 0B1 / 1F0 1B0 1F1 1I1 1W1"


@pytest.mark.parametrize("recompute", ["never", "except-last", "always"])
def test_the_largest_load_is_the_objective_of_a_plan_that_minimises_the_largest_stage(recompute: str) -> None:
    plan = make_plan(9, num_stages=3, recompute=recompute)  # type: ignore[arg-type]
    assert stages_frame(plan)["load_s"].max() == pytest.approx(plan.proof.objective_s)


def test_recompute_is_split_from_the_predicted_backward_but_not_from_the_measured_one() -> None:
    run = make_run(make_plan(recompute="always"))
    frame = stages_frame(run).set_index(["side", "stage"])
    cost = run.plan.stages[2].cost
    assert frame.loc[(PREDICTED, 2), "backward_s"] == pytest.approx(cost.backward_s)
    assert frame.loc[(PREDICTED, 2), "recompute_s"] == pytest.approx(cost.recompute_s)
    assert frame.loc[(MEASURED, 2), "recompute_s"] == 0
    assert frame.loc[(MEASURED, 2), "backward_s"] == pytest.approx(run.timeline.mean_s(ActionKind.BACKWARD, stage=2))


def test_what_a_stage_receives_is_charged_to_it() -> None:
    plan = make_plan(num_stages=3)
    received = stages_frame(plan)["communication_s"]
    first, second, third = (stage.cost for stage in plan.stages)
    assert received[0] == pytest.approx(first.gradient_s)
    assert received[1] == pytest.approx(first.activation_s + second.gradient_s)
    assert received[2] == pytest.approx(second.activation_s)
    assert third.activation_s == 0


def test_a_split_backward_has_its_halves_in_columns_of_their_own() -> None:
    plan = make_scheduled_plan("zb-h1")
    first, second = stages_frame(plan).to_dict("records")
    cost, other = (stage.cost for stage in plan.stages)
    assert (first["backward_s"], first["input_gradient_s"]) == (0, 0), "nobody waits for the first stage's"
    assert first["weight_gradient_s"] == pytest.approx(cost.backward_s)
    assert (second["input_gradient_s"], second["weight_gradient_s"]) == pytest.approx((other.backward_s / 2,) * 2)


@pytest.mark.parametrize("recompute", ["except-last", "always"])
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v", "interleaved-1f1b:2"])
def test_what_recomputing_adds_is_taken_from_the_half_that_runs_it(schedule: str, recompute: str) -> None:
    plan = make_scheduled_plan(schedule, recompute=recompute)  # type: ignore[arg-type]
    without = stages_frame(replace(plan, recompute="never"))
    share = 1.0 if recompute == "always" else 0.75
    frame = stages_frame(plan)
    assert list(frame["recompute_s"]) == pytest.approx([share * stage.cost.recompute_s for stage in plan.stages])
    for column in BACKWARDS:
        assert list(frame[column]) == pytest.approx(list(without[column]))


def test_a_stage_that_mixes_whole_and_split_backwards_has_its_recompute_taken_from_both() -> None:
    plan = make_scheduled_plan(MIXED, num_microbatches=2, recompute="always")
    second, cost = stages_frame(plan).loc[1], plan.stages[1].cost
    assert second["recompute_s"] == pytest.approx(cost.recompute_s)
    assert second["backward_s"] == pytest.approx(cost.backward_s / 2), "one micro-batch of two"
    assert second["input_gradient_s"] == pytest.approx(cost.backward_s / 4)


def test_spans_and_transfers_are_those_of_the_timeline() -> None:
    timeline = make_run().timeline
    spans, transfers = spans_frame(timeline), transfers_frame(timeline)
    assert len(spans) == len(timeline.spans)
    assert spans["end_s"].max() == timeline.step_s
    assert list(transfers["device"]) == [x.source for x in timeline.transfers]


def test_spans_say_which_of_its_devices_stages_a_stage_is() -> None:
    spans = spans_frame(simulate(make_scheduled_plan("zb-v")))
    chunks = {(x.device, x.stage, x.chunk) for x in spans.itertuples()}
    assert chunks == {(0, 0, 0), (0, 3, 1), (1, 1, 0), (1, 2, 1)}


def test_idle_rows_are_the_pieces_of_the_bubble_with_their_causes() -> None:
    timeline = make_run().timeline
    frame = idle_frame(timeline)
    expected = [(piece.device, piece.cause.value, piece.start_s) for piece in idle_pieces(timeline)]
    assert list(zip(frame["device"], frame["cause"], frame["start_s"], strict=True)) == expected


def test_a_plan_without_a_run_has_predicted_rows_only() -> None:
    plan = make_plan()
    assert set(stages_frame(plan)["side"]) == {PREDICTED}


def test_the_run_is_the_measured_side_whatever_its_timeline_says_of_its_origin() -> None:
    run = make_run()
    run = replace(run, timeline=replace(run.timeline, origin="computed"))
    assert set(stages_frame(run)["side"]) == {PREDICTED, MEASURED}


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
    assert side_text(run, PREDICTED) == side_text(run.plan, PREDICTED) == "predicted (computed)"
