"""The words and figures of the page."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gplan.core import ActionKind, GradientCheck, Plan, Proof
from gplan.core.units import bytes_text, seconds_text
from gplan.reporting.summary_tables import (
    DEVICE_COLUMNS,
    STAGE_COLUMNS,
    device_lines,
    headlines,
    plan_facts,
    run_facts,
    stage_lines,
    step_rows,
)
from tests.reporting.subjects import make_plan, make_run, make_scheduled_plan, named


def test_the_headline_of_a_run_has_measured_predicted_and_error() -> None:
    run = make_run()
    step, rate, bubble, peak = headlines(run)
    assert step.measured == seconds_text(run.timeline.step_s)
    assert step.predicted == seconds_text(run.plan.prediction.step_s)
    assert step.error and step.error.startswith("-"), "the run was slower than predicted"
    assert rate.error and rate.error.startswith("+")
    assert bubble.error and bubble.error.endswith("points")
    largest = max(range(4), key=lambda i: run.peak_bytes[i])
    assert peak.name == f"peak memory, device {largest}"
    assert peak.measured == bytes_text(max(run.peak_bytes))


def test_the_headline_of_a_plan_has_nothing_measured() -> None:
    plan = make_plan()
    assert {x.measured for x in headlines(plan)} == {None}
    assert headlines(plan)[3].predicted == bytes_text(max(plan.device_peak_bytes))


def test_each_stage_has_its_layers_and_three_lines_per_figure() -> None:
    run = make_run(named(make_plan(5, num_stages=2, recompute="always"), list("vwxyz")))
    first, second = stage_lines(run)
    assert (first.first_layer, first.last_layer, first.indices) == ("v", "w", "layers 0–1")
    assert (second.first_layer, second.last_layer, second.indices) == ("x", "z", "layers 2–4")
    assert [len(lines) for lines in first.figures] == [3] * len(STAGE_COLUMNS)
    cost = run.plan.stages[0].cost
    backward = dict(zip(STAGE_COLUMNS, first.figures, strict=True))["backward per micro-batch"]
    assert backward[0] == seconds_text(cost.backward_s + cost.recompute_s)
    measured_s = run.timeline.mean_s(ActionKind.BACKWARD, stage=0)
    assert backward[1] == seconds_text(measured_s)
    assert backward[2] == f"{100 * ((cost.backward_s + cost.recompute_s) / measured_s - 1):+.1f} %"


def test_a_stage_of_a_plan_has_one_line_per_figure() -> None:
    assert {len(lines) for line in stage_lines(make_plan()) for lines in line.figures} == {1}


def test_the_backward_of_a_stage_is_both_halves_with_what_recomputing_adds() -> None:
    plan = make_scheduled_plan("zb-v", recompute="always")
    for line, stage in zip(stage_lines(plan), plan.stages, strict=True):
        backward = dict(zip(STAGE_COLUMNS, line.figures, strict=True))["backward per micro-batch"]
        assert backward == (seconds_text(stage.cost.backward_s + stage.cost.recompute_s),)
    assert [line.name for line in stage_lines(plan)][3] == "stage 3, device 0"


def test_each_device_has_its_stages_and_what_it_does_waits_and_holds() -> None:
    run = make_run(make_scheduled_plan("interleaved-1f1b:2"))
    lines = device_lines(run)
    assert [(line.name, line.stages) for line in lines] == [("device 0", "stages 0, 2"), ("device 1", "stages 1, 3")]
    peak = dict(zip(DEVICE_COLUMNS, lines[1].figures, strict=True))["peak memory"]
    assert peak[:2] == (bytes_text(run.plan.device_peak_bytes[1]), bytes_text(run.peak_bytes[1]))
    assert peak[2] == "-9.1 %", "the run held a tenth more"


def test_memory_that_was_not_measured_has_no_headline_and_says_so_in_its_cell() -> None:
    run = make_run(make_plan(4, num_stages=2))
    run = replace(run, peak_bytes=(0, 0))
    assert [x.name for x in headlines(run)] == ["step time", "throughput", "bubble"]
    for line, predicted in zip(device_lines(run), run.plan.device_peak_bytes, strict=True):
        peak = dict(zip(DEVICE_COLUMNS, line.figures, strict=True))["peak memory"]
        assert peak == (bytes_text(predicted), "not measured", "–")


@pytest.mark.parametrize("plan", [make_plan(), make_scheduled_plan("interleaved-1f1b:2")])
def test_the_table_of_the_step_leaves_stages_and_devices_out(plan: Plan) -> None:
    quantities = [row[0] for row in step_rows(make_run(plan))]
    assert quantities[:3] == ["step time", "throughput", "bubble"]
    assert len(quantities) == len(set(quantities)) == 8


def test_how_it_was_measured_tells_steps_warm_up_and_refused() -> None:
    run = make_run(engine="virtual")
    facts = dict(run_facts(replace(run, num_disturbed=1, versions=(("torch", "2.13"), ("python", "3.12")))))
    assert facts["engine"].startswith("virtual: ")
    assert "simulated" in facts["engine"]
    assert facts["steps"] == "1 of 3 steps: 1 to warm up, 1 refused as interrupted"
    assert facts["median step by the wall clock"] == seconds_text(run.timeline.step_s)
    assert facts["versions"] == "torch 2.13, python 3.12"
    assert facts["gradients compared with the plain model"] == "not checked"


def test_gradients_that_differ_are_told_in_capitals() -> None:
    check = GradientCheck(
        max_relative_error=0.5, worst_parameter="w", loss=1.0, plain_loss=1.0, num_parameters=2, tolerance=1e-4,
        reference="plain",
    )  # fmt: skip
    facts = dict(run_facts(replace(make_run(), check=check)))
    assert (
        facts["gradients compared with the plain model"]
        == "DIFFERENT: largest relative error 5.0e-01, tolerance 1.0e-04"
    )


def test_the_plan_tells_its_gap_or_that_it_is_proven() -> None:
    plan = make_plan()
    proven = Proof(solver="dp", objective_s=2.0, lower_bound_s=2.0, solve_s=0.0)
    open_ = replace(proven, lower_bound_s=1.5)
    assert dict(plan_facts(replace(plan, proof=proven)))["gap"] == "0: proven optimal"
    assert dict(plan_facts(replace(plan, proof=open_)))["gap"] == "25.0 %"


def test_capacity_and_settings_are_among_the_facts_of_the_plan() -> None:
    plan = make_plan(memory_bytes=2**30)
    plan = replace(plan, model=replace(plan.model, settings=(("depth", "4"),)))
    facts = dict(plan_facts(plan))
    assert facts["memory of each device"] == "1.00 GiB"
    assert facts["model"] == "made (depth=4)"
    assert dict(plan_facts(make_plan()))["memory of each device"] == "unknown"
