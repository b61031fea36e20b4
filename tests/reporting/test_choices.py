"""Other numbers of micro-batches and devices, and the marks in the charts of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gplan.core import Alternative, Plan
from gplan.evaluate.explain import explain
from gplan.reporting.analysis import PlanAnalysis, analysis_of, planned_choices
from gplan.reporting.charts.choices_chart import choices_chart, frontier_chart, pareto_front, points_of
from gplan.strategy_search.planner import balance
from tests.made import make_profile
from tests.reporting.subjects import make_plan

PROFILE = make_profile([1e-3, 2e-3, 3e-3, 2e-3, 1e-3, 1e-3])


def alternative(plan: Plan, *, step_s: float, peak_bytes: int, num_microbatches: int = 8) -> Alternative:
    return Alternative(
        num_stages=plan.num_stages, num_replicas=1, num_microbatches=num_microbatches, microbatch_size=1,
        schedule="gpipe", recompute="never", cuts=(), step_s=step_s, peak_bytes=peak_bytes, bubble=0.1,
    )  # fmt: skip


def test_with_a_profile_each_choice_is_the_best_plan_of_its_own() -> None:
    plan = balance(PROFILE, num_devices=2, num_microbatches=4)
    found = {(x.num_devices, x.num_microbatches): x for x in planned_choices(plan, PROFILE)}
    assert {k for k, _ in found} == {1, 2, 4}, "eight devices are more than there are layers"
    assert found[4, 8].prediction.step_s == balance(PROFILE, num_devices=4, num_microbatches=8).prediction.step_s
    assert found[2, 4] is plan


def test_what_no_memory_holds_is_left_out() -> None:
    profile = make_profile([1e-3] * 4, stash_bytes=2**20)
    plan = balance(profile, num_devices=2, num_microbatches=4)
    tight = replace(plan, memory_limit_bytes=plan.peak_bytes)
    assert {x.num_microbatches for x in planned_choices(tight, profile) if x.num_devices == 2} == {1, 2, 4}


def test_the_chart_has_a_line_for_each_number_of_devices() -> None:
    plan = balance(PROFILE, num_devices=2, num_microbatches=4)
    figure = choices_chart(plan, analysis_of(plan, PROFILE))
    assert figure is not None
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["K = 1", "K = 2", "K = 4", "this plan"]


def test_the_frontier_is_what_none_beats_in_both_memory_and_time() -> None:
    plan = make_plan()
    step_s, peak_bytes = plan.prediction.step_s, plan.peak_bytes
    others = [(2.0, 0.5), (3.0, 0.6), (1.5, 2.0), (2.5, 0.4)]
    found = [alternative(plan, step_s=a * step_s, peak_bytes=int(b * peak_bytes)) for a, b in others]
    points = points_of(replace(plan, frontier=tuple(found)), None)
    kept = [(x.step_s / step_s, x.peak_bytes / peak_bytes) for x in pareto_front(points)]
    assert [pytest.approx(x, rel=1e-6) for x in ((2.5, 0.4), (2.0, 0.5), (1.0, 1.0))] == kept


def test_plans_for_another_batch_are_not_compared() -> None:
    plan = make_plan()
    other = alternative(plan, step_s=1.0, peak_bytes=1, num_microbatches=16)
    assert [x.kind for x in points_of(replace(plan, frontier=(other,)), None)] == ["this plan"]


def test_without_another_plan_there_is_no_chart() -> None:
    alone = PlanAnalysis(choices=())
    assert choices_chart(make_plan(), alone) is None
    assert frontier_chart(make_plan(), alone) is None


def test_options_of_the_explanation_are_points_too() -> None:
    plan = balance(PROFILE, num_devices=2, num_microbatches=4)
    labels = [x.label for x in points_of(plan, explain(plan, PROFILE))]
    assert {"schedule 1f1b", "recompute always"} <= set(labels)
    assert not any("one more" in label for label in labels), "that is other hardware"
