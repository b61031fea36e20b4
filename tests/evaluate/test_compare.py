"""Comparison of predicted and measured: every row, and the sign of errors."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace

import pytest
from msgspec import structs

from gplan.core import IdleCause, Plan, Run, StageCost
from gplan.core.units import bytes_axis, error_text, quantity_text, seconds_axis
from gplan.evaluate.compare import (
    BACKWARD,
    BUBBLE,
    FORWARD,
    INPUT_GRADIENT,
    OPTIMIZER,
    PEAK_MEMORY,
    STEP_TIME,
    THROUGHPUT,
    WEIGHT_GRADIENT,
    compare,
    idle_quantity,
    order_difference,
    prediction_error,
    stale_prediction_notes,
)
from gplan.simulation.bubble import idle_by_cause
from gplan.simulation.simulator import simulate
from tests.made import make_profile
from tests.reporting.subjects import make_plan, make_run
from tests.scheduled import EVERY_SCHEDULE, scheduled_plan


def with_costs(plan: Plan, stage: int, **costs: float) -> Plan:
    stages = list(plan.stages)
    cost: StageCost = replace(stages[stage].cost, **costs)  # type: ignore[arg-type]
    stages[stage] = replace(stages[stage], cost=cost)
    return replace(plan, stages=tuple(stages))


def run_as(plan: Plan, happened: Plan) -> Run:
    """A run of `plan` that measured what `happened` would predict."""
    timeline = replace(simulate(happened), origin="measured")
    return replace(make_run(plan), timeline=timeline, peak_bytes=plan.device_peak_bytes)


def test_perfect_run_has_no_errors() -> None:
    plan = make_plan(recompute="always")
    assert [row.error for row in compare(run_as(plan, plan)).rows if row.error != pytest.approx(0.0, abs=1e-12)] == []


def test_run_of_half_the_speed() -> None:
    plan = make_plan(profile=make_profile([1e-3] * 4), num_stages=2)
    slow = make_plan(profile=make_profile([2e-3] * 4), num_stages=2)
    comparison = compare(run_as(plan, slow))
    assert comparison.row(STEP_TIME).error == pytest.approx(-0.5)
    assert comparison.row(THROUGHPUT).error == pytest.approx(1.0)
    assert comparison.row(BUBBLE).error == pytest.approx(0.0)


def test_step_rows() -> None:
    run = make_run()
    step, rate = compare(run).row(STEP_TIME), compare(run).row(THROUGHPUT)
    assert (step.predicted, step.measured) == (run.plan.prediction.step_s, run.timeline.step_s)
    assert (rate.predicted, rate.measured) == (8 / step.predicted, 8 / step.measured)
    assert rate.unit == "samples_per_s"


def test_slow_forward_shows_in_its_row_only() -> None:
    plan = make_plan(num_stages=4)
    forward_s = plan.stages[2].cost.forward_s
    comparison = compare(run_as(plan, with_costs(plan, 2, forward_s=1.25 * forward_s)))
    changed = {
        (row.quantity, row.stage) for row in comparison.rows if row.stage is not None and abs(row.error or 0) > 1e-9
    }
    assert changed == {(FORWARD, 2)}
    assert comparison.row(FORWARD, stage=2).error == pytest.approx(1 / 1.25 - 1)


def test_optimizer_and_memory_rows() -> None:
    plan = make_plan()
    run = replace(run_as(plan, with_costs(plan, 1, optimizer_s=1.0)), peak_bytes=(1, 2, 3, 4))
    comparison = compare(run)
    assert comparison.row(OPTIMIZER, stage=1).measured == pytest.approx(1.0)
    assert comparison.row(OPTIMIZER, stage=0).error == pytest.approx(0.0)
    assert [comparison.row(PEAK_MEMORY, stage=i).measured for i in range(4)] == [1, 2, 3, 4]
    assert comparison.row(PEAK_MEMORY, stage=3).predicted == plan.stages[3].memory.peak_bytes


def test_predicted_backward_includes_recompute() -> None:
    plan = make_plan(recompute="always")
    cost = plan.stages[1].cost
    row = compare(make_run(plan)).row(BACKWARD, stage=1)
    assert row.predicted == pytest.approx(cost.backward_s + cost.recompute_s)


def test_rows_of_a_device_with_several_stages() -> None:
    plan = scheduled_plan("interleaved-1f1b:2")
    rows = [x for x in compare(chunked_run(plan)).rows if x.device is not None]
    assert [(x.device, x.stage) for x in rows if x.quantity == FORWARD] == [(0, 0), (0, 2), (1, 1), (1, 3)]
    assert [(x.device, x.stage, x.predicted) for x in rows if x.quantity == PEAK_MEMORY] == [
        (0, None, 202),
        (1, None, 204),
    ]
    assert compare(chunked_run(plan)).row(PEAK_MEMORY, device=1).measured == 8


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_backward_halves_have_rows(
    schedule: str,
) -> None:
    rows = compare(chunked_run(scheduled_plan(schedule))).rows
    assert BACKWARD not in {x.quantity for x in rows}
    stages = {x.stage for x in rows if x.quantity == FORWARD}
    assert {x.stage for x in rows if x.quantity == WEIGHT_GRADIENT} == stages
    assert {x.stage for x in rows if x.quantity == INPUT_GRADIENT} == stages - {0}


def chunked_run(plan: Plan) -> Run:
    """A run that went as planned, its devices with 4 and 8 bytes."""
    return replace(make_run(), plan=plan, timeline=replace(simulate(plan), origin="measured"), peak_bytes=(4, 8))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_idle_rows_add_up_to_the_idle_time_of_the_devices(schedule: str) -> None:
    run = make_run(make_plan(schedule=schedule))
    rows = [compare(run).row(idle_quantity(cause)) for cause in IdleCause]
    for side, timeline in (("predicted", simulate(run.plan)), ("measured", run.timeline)):
        idle_s = sum(map(timeline.idle_s, range(timeline.num_devices)))
        assert sum(getattr(row, side) for row in rows) == pytest.approx(idle_s)


def test_idle_rows_are_those_of_the_bubble_module() -> None:
    run = make_run()
    expected = idle_by_cause(run.timeline)
    assert {cause: compare(run).row(idle_quantity(cause)).measured for cause in IdleCause} == expected


def test_error_of_a_share() -> None:
    run = make_run(spread=1.0)
    row = compare(run).row(BUBBLE)
    assert row.error == pytest.approx(run.plan.prediction.bubble - run.timeline.bubble)
    assert row.error != 0


def test_unpredicted_idle_has_no_relative_error() -> None:
    plan = make_plan(profile=make_profile([1e-3] * 4), num_stages=2)
    comparison = compare(run_as(plan, with_costs(plan, 0, activation_s=1e-3)))
    row = comparison.row(idle_quantity(IdleCause.COMMUNICATION))
    assert row.predicted == 0
    assert row.measured > 0
    assert row.error is None


def test_zero_against_zero_is_no_error() -> None:
    assert prediction_error(0.0, 0.0, "seconds") == 0.0
    assert prediction_error(1.0, 0.0, "seconds") is None


def test_missing_row_names_the_existing_ones() -> None:
    with pytest.raises(ValueError, match=r"no row for 'latency' of the step; expected one of step time, throughput"):
        compare(make_run()).row("latency")


def test_the_engine_is_kept_with_the_comparison() -> None:
    assert compare(make_run(engine="virtual")).engine == "virtual"


def test_compare_imports_no_torch() -> None:
    code = "import gplan.evaluate.compare, sys; print({'torch', 'pandas', 'matplotlib'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def test_every_kind_of_row_has_a_text() -> None:
    assert quantity_text(0.25, "seconds") == "250 ms"
    assert quantity_text(3 * 2**30, "bytes") == "3.00 GiB"
    assert quantity_text(0.25, "share") == "25.0 %"
    assert quantity_text(12.345, "samples_per_s") == "12.3 samples/s"


def test_errors_are_written_with_their_sign() -> None:
    assert error_text(0.0512, "seconds") == "+5.1 %"
    assert error_text(-0.0512, "share") == "-5.1 points"
    assert error_text(None, "bytes") == "–"


def test_axis_units() -> None:
    assert [seconds_axis(x)[0] for x in (2.0, 0.5, 2e-4, 1e-8, 0.0)] == ["s", "ms", "µs", "µs", "µs"]
    assert [bytes_axis(x)[0] for x in (0, 1000, 2**20, 5 * 2**40)] == ["B", "B", "MiB", "TiB"]


@pytest.mark.parametrize("schedule", EVERY_SCHEDULE)
def test_simulated_plan_has_no_order_difference(schedule: str) -> None:
    plan = scheduled_plan(schedule)
    assert order_difference(plan, simulate(plan)) is None


def test_first_order_difference() -> None:
    ran = simulate(scheduled_plan("gpipe", num_microbatches=4))
    departure = order_difference(scheduled_plan("1f1b", num_microbatches=4), ran)
    assert departure is not None
    assert (departure.device, departure.index, str(departure.planned), str(departure.ran)) == (0, 2, "0B0", "0F2")


def test_missing_and_other_actions_are_differences() -> None:
    plan, split = scheduled_plan("1f1b", num_microbatches=4), scheduled_plan("zb-h1", num_microbatches=4)
    other = order_difference(plan, simulate(split))
    assert other is not None
    assert {str(other.planned), str(other.ran)} == {"0B0", "0I0"}
    timeline = simulate(plan)
    short = replace(timeline, spans=tuple(x for x in timeline.spans if str(x.action) != "1B3"))
    missing = order_difference(plan, short)
    assert missing is not None
    assert (missing.device, str(missing.planned), missing.ran) == (1, "1B3", None)


def test_simultaneous_actions_in_any_order() -> None:
    plan = scheduled_plan("gpipe", num_microbatches=4)
    timeline = simulate(plan)
    at_once = replace(timeline, spans=tuple(structs.replace(x, start_s=0.0) for x in reversed(timeline.spans)))
    assert order_difference(plan, at_once) is None


def test_edited_plan_is_noted() -> None:
    plan = make_plan(num_stages=2)
    assert stale_prediction_notes(plan) == ()
    (note,) = stale_prediction_notes(replace(plan, num_microbatches=plan.num_microbatches + 1))
    assert re.match(r"the plan was changed after it was made, .*: it predicts a step of .*; balance again", note)
