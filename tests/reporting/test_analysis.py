"""What a plan is compared with: plans that are priced as it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gplan.core import Profile, Run
from gplan.corrections.contention import without_contention
from gplan.reporting.analysis import PlanAnalysis, analysis_of
from gplan.strategy_search.planner import balance
from tests.made import make_profile
from tests.reporting.subjects import make_run


def with_contention(contentions: Sequence[float], *, slowness: float = 1.0) -> Profile:
    """Layers that take so much longer while another process computes; their backwards differ from their forwards."""
    backwards_s = [slowness * x for x in (5e-3, 1e-3, 2e-3, 4e-3)]
    made = make_profile([slowness * x for x in (1e-3, 2e-3, 3e-3, 2e-3)], backwards_s, optimizer_s=2e-3, weight_bytes=4)
    layers = (
        replace(layer, costs=tuple(replace(cost, slow_down=factor) for cost in layer.costs))
        for layer, factor in zip(made.layers, contentions, strict=True)
    )
    return replace(made, layers=tuple(layers), num_neighbours=1, step=replace(made.step, slow_down=contentions[0]))


def run_alone(profile: Profile) -> Run:
    """By the virtual engine, of two devices."""
    return make_run(balance(without_contention(profile), num_devices=2, num_microbatches=4), engine="virtual")


def steps_of(found: PlanAnalysis) -> list[tuple[int, int, float]]:
    return [(x.num_devices, x.num_microbatches, x.prediction.step_s) for x in found.choices]


def test_a_run_of_the_virtual_engine_is_compared_with_plans_without_contention() -> None:
    profile, alone = with_contention([1.5] * 4), with_contention([1.0] * 4)
    run = run_alone(profile)
    found, expected = analysis_of(run, profile), analysis_of(run.plan, alone)
    assert found.explanation is not None and expected.explanation is not None
    assert found.explanation.options == expected.explanation.options
    assert steps_of(found) == steps_of(expected)
    assert found.explanation.notes == ()


def test_a_run_of_processes_is_compared_with_plans_with_contention() -> None:
    profile = with_contention([1.5] * 4)
    plan = balance(profile, num_devices=2, num_microbatches=4)
    of_run, of_plan = analysis_of(make_run(plan), profile), analysis_of(plan, profile)
    assert (of_run.explanation, steps_of(of_run)) == (of_plan.explanation, steps_of(of_plan))


def test_layers_whose_contention_differs_are_no_sign_of_another_profile_but_other_times_are() -> None:
    run = run_alone(with_contention([1.1, 1.9, 1.2, 1.6]))
    same = analysis_of(run, with_contention([1.1, 1.9, 1.2, 1.6])).explanation
    other = analysis_of(run, with_contention([1.1, 1.9, 1.2, 1.6], slowness=2.0)).explanation
    assert same is not None and same.notes == ()
    assert other is not None and "this profile gives the plan a step of" in other.notes[0]
