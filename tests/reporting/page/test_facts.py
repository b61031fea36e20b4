"""The headlines, facts and tables of the page."""

from __future__ import annotations

from dataclasses import replace

from gplan.core import GradientCheck, Proof
from gplan.core.units import bytes_text, quantity_text, seconds_text
from gplan.evaluate.compare import samples_per_s
from gplan.reporting.page.document import headlines, plan_facts, run_facts, table
from gplan.reporting.text.fitted_table import FittedTable, Line
from gplan.reporting.text.run import comparison_table, devices_table
from tests.reporting.subjects import make_plan, make_run, make_scheduled_plan


def test_the_headline_of_a_run_has_measured_predicted_and_error() -> None:
    run = make_run()
    step, bubble, peak = headlines(run)
    assert step.measured == seconds_text(run.timeline.step_s)
    assert step.predicted == seconds_text(run.plan.prediction.step_s)
    assert step.error and step.error.startswith("-"), "the run was slower than predicted"
    assert step.detail == quantity_text(samples_per_s(run.plan, run.timeline.step_s), "samples_per_s")
    assert bubble.error and bubble.error.endswith("points")
    largest = max(range(4), key=lambda i: run.peak_bytes[i])
    assert peak.name == f"peak memory, device {largest}"
    assert peak.measured == bytes_text(max(run.peak_bytes))


def test_the_headline_of_a_plan_has_nothing_measured() -> None:
    plan = make_plan()
    assert {x.measured for x in headlines(plan)} == {None}
    assert headlines(plan)[2].predicted == bytes_text(max(plan.device_peak_bytes))


def test_each_device_has_its_stages_and_what_it_computes_and_waits() -> None:
    run = make_run(make_scheduled_plan("interleaved-1f1b:2"))
    first, second = devices_table(run).lines
    assert (tuple(first.cells.values())[:2], tuple(second.cells.values())[:2]) == (("0", "0 2"), ("1", "1 3"))
    timeline = run.timeline
    assert first.cells["compute"] == seconds_text(timeline.busy_s(0))
    assert second.cells["idle"] == seconds_text(timeline.step_s - timeline.busy_s(1) - timeline.update_s(1))


def test_a_table_is_html_with_escaped_cells_groups_in_heads_and_bars() -> None:
    shown = FittedTable(
        title="t",
        lines=(Line(cells={"<a>": "<x>", "b": "1", "c": "50.0 %"}),),
        groups={"per step": ("b", "c")},
        below="z",
    )
    html = table(shown, shares=[0.5])
    assert '<th class="text">&lt;a&gt;</th><th>b per step</th><th>c per step</th>' in html
    assert '<td class="text">&lt;x&gt;</td><td>1</td><td><span class="bar"><i style="width:50.0%">' in html
    assert html.endswith("<p>z</p>")


def test_memory_that_was_not_measured_has_no_headline() -> None:
    run = make_run(make_plan(4, num_stages=2))
    run = replace(run, peak_bytes=(0, 0))
    assert [x.name for x in headlines(run)] == ["step time", "bubble"]


def test_how_it_was_measured_tells_steps_warm_up_and_refused() -> None:
    run = make_run(engine="virtual")
    facts = dict(run_facts(replace(run, num_disturbed=1, versions=(("torch", "2.13"), ("python", "3.12")))))
    assert facts["engine"].startswith("virtual: ")
    assert "simulated" in facts["engine"]
    assert facts["steps"] == "1 of 3 steps: 1 to warm up, 1 left out as interrupted"
    assert facts["median of all steps after the warm-up"] == seconds_text(run.timeline.step_s)
    assert facts["versions"] == "torch 2.13, python 3.12"
    assert facts["gradients"] == "not compared with the plain model's"


def test_gradients_that_differ_are_told_in_capitals() -> None:
    check = GradientCheck(
        max_relative_error=0.5, worst_parameter="w", loss=1.0, plain_loss=1.0, num_parameters=2, tolerance=1e-4,
        whole_batch=None,
    )  # fmt: skip
    facts = dict(run_facts(replace(make_run(), check=check)))
    assert (
        facts["gradients"] == "DIFFER from the plain model's: largest relative difference 5.0e-01 (w) over 2 tensors, "
        "tolerance 1e-04; loss 1.000000 against 1.000000"
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
    assert facts["limit of each device"] == "1.00 GiB"
    assert facts["model"] == "made (depth=4)"
    assert dict(plan_facts(make_plan()))["memory of each device"] == "unknown"


def test_a_run_tells_a_fact_once_and_its_signs() -> None:
    run = make_run()
    shown = comparison_table(run)
    assert "throughput" not in {x.cells["quantity"] for x in shown.lines}
    below = " ".join(shown.notes_below(shown.keys))
    assert below.count("error: ") == 1 and "the nearer to 0 the better" in below
    assert set(devices_table(run).keys) == {"device", "stages", "compute", "optimizer", "idle"}
    facts = [*run_facts(run), *plan_facts(run.plan)]
    assert len({name for name, _ in facts}) == len(facts)
