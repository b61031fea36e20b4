"""The numbers behind the charts, checked against the timelines and the plan that they come from."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gplan.bubble import idle_pieces
from gplan.nouns import ActionKind
from gplan.reporting.frames import (
    MEASURED,
    PREDICTED,
    capacity_bytes,
    idle_frame,
    layers_frame,
    memory_frame,
    side_text,
    spans_frame,
    stages_frame,
    transfers_frame,
)
from gplan.simulator import simulate
from tests.reporting.subjects import make_plan, make_run, named


def test_layers_come_in_model_order_with_their_stage_and_costs() -> None:
    plan = named(make_plan(6, num_stages=3), list("uvwxyz"))
    frame = layers_frame(plan)
    assert list(frame["name"]) == list("uvwxyz")
    assert list(frame["layer"]) == list(range(6))
    assert list(frame["stage"]) == [0, 0, 1, 1, 2, 2]
    assert frame["forward_s"].sum() == pytest.approx(sum(stage.cost.forward_s for stage in plan.stages))


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
    assert frame.loc[(MEASURED, 2), "backward_s"] == pytest.approx(
        run.timeline.mean_s(stage=2, kind=ActionKind.BACKWARD)
    )


def test_what_a_stage_receives_is_charged_to_it() -> None:
    plan = make_plan(num_stages=3)
    received = stages_frame(plan)["communication_s"]
    first, second, third = (stage.cost for stage in plan.stages)
    assert received[0] == pytest.approx(first.gradient_s)
    assert received[1] == pytest.approx(first.activation_s + second.gradient_s)
    assert received[2] == pytest.approx(second.activation_s)
    assert third.activation_s == 0


def test_idle_time_of_a_stage_is_the_sum_of_its_idle_pieces() -> None:
    run = make_run()
    stages, idle = stages_frame(run), idle_frame(run)
    pieces = idle.groupby(["side", "device"])["duration_s"].sum()
    for row in stages.to_dict("records"):
        assert row["idle_s"] == pytest.approx(pieces[(row["side"], row["stage"])])


def test_spans_and_transfers_are_those_of_both_timelines() -> None:
    run = make_run()
    spans, transfers, predicted = spans_frame(run), transfers_frame(run), simulate(run.plan)
    for side, timeline in ((PREDICTED, predicted), (MEASURED, run.timeline)):
        mine = spans[spans["side"] == side]
        assert len(mine) == len(timeline.spans)
        assert mine["end_s"].max() == timeline.step_s
        assert (transfers["side"] == side).sum() == len(timeline.transfers)


def test_idle_rows_are_the_pieces_of_the_bubble_with_their_causes() -> None:
    run = make_run()
    measured = idle_frame(run).query("side == 'measured'")
    expected = [(piece.device, piece.cause.value, piece.start_s) for piece in idle_pieces(run.timeline)]
    assert list(zip(measured["device"], measured["cause"], measured["start_s"], strict=True)) == expected


def test_memory_categories_add_up_to_the_peak_and_the_measured_peak_stands_beside() -> None:
    run = make_run()
    totals = memory_frame(run).groupby(["side", "stage"])["num_bytes"].sum()
    assert list(totals[PREDICTED]) == [stage.memory.peak_bytes for stage in run.plan.stages]
    assert list(totals[MEASURED]) == list(run.peak_bytes)


def test_a_plan_without_a_run_has_predicted_rows_only() -> None:
    plan = make_plan()
    for frame in (stages_frame(plan), spans_frame(plan), idle_frame(plan), memory_frame(plan), transfers_frame(plan)):
        assert set(frame["side"]) == {PREDICTED}


def test_the_run_is_the_measured_side_whatever_its_timeline_says_of_its_origin() -> None:
    run = make_run()
    run = replace(run, timeline=replace(run.timeline, origin="computed"))
    assert set(spans_frame(run)["side"]) == {PREDICTED, MEASURED}
    assert stages_frame(run).query("side == 'measured'")["peak_bytes"].tolist() == list(run.peak_bytes)


def test_capacity_is_the_limit_else_what_the_device_has_else_nothing() -> None:
    plan = make_plan()
    big = replace(plan, device=replace(plan.device, memory_bytes=64))
    assert capacity_bytes(plan) is None
    assert capacity_bytes(big) == 64
    assert capacity_bytes(replace(big, memory_limit_bytes=32)) == 32


def test_sides_are_named_by_how_their_figures_came_about() -> None:
    run = make_run(engine="virtual")
    assert side_text(run, MEASURED) == "measured (virtual engine)"
    assert side_text(run, PREDICTED) == side_text(run.plan, PREDICTED) == "predicted (computed)"
