"""Plans and runs as text in any width."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gplan.core import Alternative, GradientCheck, MachineDevice, Plan
from gplan.core.units import seconds_text
from gplan.partition.balance import alternative_of
from gplan.reporting.text.plan import plan_view
from gplan.reporting.text.run import run_view
from gplan.simulation.simulator import simulate
from tests.reporting.subjects import make_plan, make_run, make_scheduled_plan, named
from tests.reporting.text.printed import printed
from tests.scheduled import OWN, scheduled_plan


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_a_plan_keeps_its_times_and_peak_memory_in_every_width(width: int) -> None:
    plan = named(make_plan(num_stages=2), [f"transformer.encoder.layers.{i}.block" for i in range(8)])
    lines = printed(plan_view(plan), width=width)
    assert all(len(line) <= width for line in lines)
    rows = [line for line in lines if line.split()[0] in ("0", "1")]
    assert len(rows) == 2
    assert all(row.count(" ms") >= 2 and row.endswith(" MiB") for row in rows)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_run_keeps_predicted_and_measured_in_every_width(width: int) -> None:
    lines = printed(run_view(make_run()), width=width)
    assert all(len(line) <= width for line in lines)
    table = lines[: lines.index("idle time is of all devices together")]
    assert sum(line.endswith((" %", " points")) for line in table) == 2 + 6 + 4 * 4
    assert any(line.split()[0] in ("warm-up", "idle", "idle:") for line in lines)


def test_columns_of_seconds_name_their_basis() -> None:
    plan = make_plan(num_stages=2, num_microbatches=8)
    lines = printed(plan_view(plan))
    heads = [" ".join(line.split()) for line in lines[1:3]]
    assert heads == [
        "per micro-batch ───────── per step ────────",
        "stage layers forward backward compute transfers idle peak memory",
    ]
    cost = plan.stages[0].cost
    times = (cost.forward_s, cost.backward_s, 8 * (cost.forward_s + cost.backward_s), 8 * 2 * cost.activation_s)
    assert [seconds_text(x) in lines[3] for x in times] == [True] * 4


def test_a_plan_that_was_changed_by_hand_is_not_said_to_be_proven_as_it_is() -> None:
    plan = make_plan(num_stages=2)
    text = " ".join(printed(plan_view(plan), width=200))
    assert "best found by dp" in text and "as it was made" not in text
    text = " ".join(printed(plan_view(replace(plan, num_microbatches=plan.num_microbatches + 1)), width=200))
    assert "as it was made" in text and "the plan was changed after it was made" in text


def _rows(lines: list[str], title: str) -> list[str]:
    """What stands below a title, its header left out."""
    return lines[lines.index(title) + 2 :]


def test_rivals_stand_beside_the_plan_with_what_they_change() -> None:
    plan = make_plan(num_stages=2)
    free = alternative_of(replace(plan, prediction=replace(plan.prediction, step_s=plan.prediction.step_s / 2)))
    lines = printed(plan_view(replace(plan, rivals=(replace(free, label="without constraints", cuts=(3,)),))))
    this, other = _rows(lines, "compared with")[:2]
    assert this.startswith("this plan") and this.endswith(" 4")
    assert other.startswith("without constraints") and "-50.0 %" in other and other.endswith(" 3")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_frontier_is_a_table_that_begins_with_the_plan(width: int) -> None:
    plan = make_plan(num_stages=2)
    slower = replace(
        alternative_of(plan), recompute="selected", step_s=2 * plan.prediction.step_s, peak_bytes=plan.peak_bytes // 2
    )
    lines = printed(plan_view(replace(plan, frontier=(alternative_of(plan), slower))), width=width)
    first, second = _rows(lines, "less memory, longer steps")[:2]
    assert all(len(line) <= width for line in lines)
    assert first.endswith("MiB") and second.endswith("MiB")
    assert first.startswith("2 stages") and second.startswith("2 stages")
    assert "less memory" not in "".join(printed(plan_view(replace(plan, frontier=(alternative_of(plan),)))))


def _frontier(*alternatives: Alternative) -> list[str]:
    plan = make_plan(num_stages=2)
    return _rows(
        printed(plan_view(replace(plan, frontier=(alternative_of(plan), *alternatives)))), "less memory, longer steps"
    )


def test_rows_of_a_frontier_that_differ_by_cuts_alone_show_them() -> None:
    one = replace(alternative_of(make_plan(num_stages=2)), num_stages=4, cuts=(1, 3, 6), peak_bytes=9)
    first, second, third, other = _frontier(
        one, replace(one, cuts=(1, 4, 6), peak_bytes=8), replace(one, num_microbatches=1, peak_bytes=7)
    )[:4]
    assert (second.split("never")[1].split()[:3], third.split("never")[1].split()[:3]) == (
        ["cuts", "…", "3"],
        ["cuts", "…", "4"],
    )
    assert "…" not in first + other


def test_rows_of_a_frontier_that_select_other_layers_alone_say_so() -> None:
    one = replace(alternative_of(make_plan(num_stages=2)), recompute="selected", peak_bytes=9)
    _, second, third = _frontier(one, replace(one, peak_bytes=8))[:3]
    assert ("more recomputed" in second, "more recomputed" in third) == (False, True)


def test_a_frontier_without_such_rows_has_no_cuts() -> None:
    plan = make_plan(num_stages=2)
    other = replace(alternative_of(plan), recompute="always", cuts=(5,))
    assert not any(
        "told apart" in line for line in printed(plan_view(replace(plan, frontier=(alternative_of(plan), other))))
    )


def test_rows_of_a_frontier_count_devices_where_they_are_not_as_many_as_stages() -> None:
    chunked = replace(alternative_of(scheduled_plan("interleaved-1f1b:2")), peak_bytes=9)
    owned = replace(alternative_of(scheduled_plan(OWN)), peak_bytes=8)
    first, second, third = _frontier(chunked, owned)[:3]
    assert first.startswith("2 stages, ")
    assert second.startswith("4 stages on 2 devices, interleaved-1f1b:2, ")
    assert third.startswith("3 stages on 2 devices, custom order, ")


def _adding_up() -> Plan:
    plan = make_plan(num_stages=2)
    return replace(plan, stages=tuple(replace(x, cost=replace(x.cost, all_reduce_s=0.25)) for x in plan.stages))


def test_tied_weights_and_what_they_cost_stand_below() -> None:
    lines = printed(plan_view(_adding_up()))
    assert "after its last backward a stage takes up to 250 ms to sum the gradients of tied weights" in lines


def test_replicas_stand_in_the_title_and_below() -> None:
    lines = printed(plan_view(replace(_adding_up(), num_replicas=4)))
    assert ": 4 replicas of 2 stages" in lines[0]
    assert any("to sum the gradients of all replicas and of tied weights" in line for line in lines)


def test_selected_layers_are_counted_for_each_stage() -> None:
    plan = make_plan(num_stages=2)
    first = replace(plan.stages[0], recompute_layers=plan.stages[0].layer_names[:3])
    lines = printed(plan_view(replace(plan, recompute="selected", stages=(first, plan.stages[1]))))
    assert "recomputed" in lines[2]
    assert "3 of 4" in lines[3] and "0 of 4" in lines[4]


def test_each_stage_has_its_own_device_and_that_devices_memory() -> None:
    plan = make_plan(num_stages=2)
    places = (MachineDevice(name="big", host="h", memory_bytes=2**30), MachineDevice(name="small", host="h"))
    stages = tuple(replace(stage, machine_device=place) for stage, place in zip(plan.stages, places, strict=True))
    lines = printed(plan_view(replace(plan, stages=stages)))
    assert "big" in lines[3] and lines[3].endswith("of 1.00 GiB")
    assert "small" in lines[4] and " of " not in lines[4]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_stages_are_grouped_by_device_where_devices_have_several(width: int) -> None:
    lines = printed(plan_view(scheduled_plan("interleaved-1f1b:2")), width=width)
    first = next(i for i, line in enumerate(lines) if line.startswith("device"))
    rows = lines[first + 1 : first + 5]
    assert all(len(line) <= width for line in lines)
    assert [row.split()[:2] for row in rows] == [["0", "0"], ["2", "c"], ["1", "1"], ["3", "d"]]
    assert [row.endswith(" B") for row in rows] == [True, False, True, False]
    assert rows[0].endswith("202 B") and rows[2].endswith("204 B")


def test_a_custom_order_is_named_not_written_out() -> None:
    text = "\n".join(printed(plan_view(scheduled_plan(OWN))))
    assert "3 stages on 2 devices, custom order, 2 micro-batches" in text
    assert "0F0" not in text


def test_a_backward_that_is_partly_in_halves_has_its_mean_over_micro_batches() -> None:
    first = next(line for line in printed(plan_view(scheduled_plan(OWN))) if line.startswith("0 "))
    assert first.split()[3:7] == ["1.00", "s", "2.00", "s"]


def test_what_stays_on_a_device_costs_no_communication() -> None:
    lines = printed(plan_view(scheduled_plan("zb-v")))
    assert next(line for line in lines if line.startswith("1 ")).split()[9:11] == ["0", "s"]


def test_a_run_in_another_order_than_the_plans_has_no_parts_of_its_error() -> None:
    plan, other = (make_scheduled_plan(schedule) for schedule in ("1f1b", "gpipe"))
    lines = printed(run_view(replace(make_run(plan), timeline=simulate(other))), width=120)
    assert any(x.startswith("the error cannot be divided into parts") for x in lines)
    assert not any("than predicted" in x for x in lines)


def test_a_run_tells_devices_from_stages() -> None:
    plan = scheduled_plan("interleaved-1f1b:2")
    run = replace(make_run(), plan=plan, timeline=simulate(plan), peak_bytes=(4, 8))
    lines = printed(run_view(run))
    assert lines[1].split() == ["quantity", "device", "stage", "predicted", "measured", "error"]
    assert next(line for line in lines if line.startswith("peak memory")).split()[:4] == ["peak", "memory", "0", "202"]
    assert [line.split()[3:5] for line in lines if line.startswith("forward")] == [
        ["0", "0"],
        ["0", "2"],
        ["1", "1"],
        ["1", "3"],
    ]


def test_the_steps_of_a_run_are_counted_as_warm_up_counted_and_refused() -> None:
    run = replace(make_run(), step_s=(1.0,) * 8, losses=(), num_warmup_steps=2, num_counted=5, num_disturbed=1)
    text = "measured over 5 of 8 steps: 2 to warm up, 1 left out as interrupted"
    assert text in printed(run_view(run))
    kept = replace(run, num_counted=6, num_disturbed=4)
    text = "measured over 6 of 8 steps: 2 to warm up, 4 of the 6 interrupted"
    assert text in printed(run_view(kept))


def test_a_run_repeats_the_notes_of_its_plan() -> None:
    run = make_run()
    alone = replace(run.plan, notes=("of the plan", "another"))
    found = [printed(run_view(replace(run, plan=x)), width=200) for x in (run.plan, alone)]
    for note in alone.notes:
        assert [sum(f"note: {note}" in line for line in lines) for lines in found] == [0, 1]


def test_a_note_that_was_said_before_is_not_said_again() -> None:
    run = replace(make_run(), notes=("at the start", "at the end", "at the end"))
    lines = printed(run_view(run, shown_notes=("at the start",)), width=200)
    assert [x for x in lines if x.startswith("note:")] == ["note: at the end"]


def test_a_run_ends_with_its_verdict_on_gradients_memory_and_time() -> None:
    run = make_run()
    check = GradientCheck(
        max_relative_error=2e-6, worst_parameter="w", loss=1.0, plain_loss=1.0, num_parameters=9, tolerance=1e-5, whole_batch=None
    )  # fmt: skip
    gradients, memory, step = printed(run_view(replace(run, check=check)), width=120)[-3:]
    assert (
        gradients
        == "gradients equal to the plain model's: largest relative difference 2.0e-06 over 9 tensors, tolerance 1e-05"
    )
    assert memory.startswith("peak memory predicted ") and "(largest difference, on device " in memory
    assert step.startswith("step time predicted ")
    wrong = printed(run_view(replace(run, check=replace(check, max_relative_error=0.5))), width=200)[-3]
    assert wrong.startswith("gradients DIFFER from the plain model's")
    assert ": largest relative difference 5.0e-01 (w) over 9 tensors, tolerance 1e-05; loss 1.0" in wrong
    disturbed = replace(run, num_disturbed=run.num_settled, num_counted=run.num_settled)
    assert printed(run_view(disturbed), width=120)[-1].endswith(
        ", in disturbed steps, so this error is not that of the prediction"
    )
    assert printed(run_view(run))[-3] == "gradients not compared with the plain model's"
