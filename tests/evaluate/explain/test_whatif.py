"""Other profiles, other cuts: scaled and priced."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gplan.core import Constraints, Link, LinkPoint, MachineDevice, Value, ValueCost
from gplan.evaluate.explain.alternatives import best, obstacle, priced, setting_of, with_layer_times, with_link_times
from tests.evaluate.explain.settings import (
    CHUNKED,
    cut_bound,
    memory_bound,
    plan_of,
    recompute_bound,
    setting,
    split,
    uneven,
)
from tests.made import make_profile


@pytest.mark.parametrize("recompute", ["never", "always", "except-last"])
@pytest.mark.parametrize("minimize", ["step-time", "max-stage"])
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_plans_own_cuts_cost_what_the_plan_says(recompute: str, minimize: str, num_replicas: int) -> None:
    plan = plan_of(uneven(), num_stages=3, recompute=recompute, minimize=minimize, num_replicas=num_replicas)
    found = priced(uneven(), setting_of(plan), plan.cuts)
    assert (found.step_s, found.objective_s) == (plan.prediction.step_s, plan.proof.objective_s)
    assert found.stages == plan.stages


@pytest.mark.parametrize("given", CHUNKED, ids=lambda given: str(given["schedule"])[:8])
@pytest.mark.parametrize("minimize", ["step-time", "max-stage"])
def test_cuts_of_devices_with_several_stages_cost_what_their_plan_says(given: dict[str, Any], minimize: str) -> None:
    profile = split(uneven())
    plan = plan_of(profile, minimize=minimize, **given)
    found = priced(profile, setting_of(plan), plan.cuts)
    assert (found.stages, found.step_s, found.peak_bytes) == (plan.stages, plan.prediction.step_s, plan.peak_bytes)
    assert found.objective_s == pytest.approx(plan.proof.objective_s, rel=1e-12)
    worst = plan.device_peak_bytes.index(plan.peak_bytes)
    tight = priced(profile, replace(setting_of(plan), memory_bytes=plan.peak_bytes - 1), plan.cuts)
    assert tight.misfit.startswith(f"device {worst} needs")


def test_the_device_of_the_profile_limits_nothing_that_the_setting_does_not() -> None:
    profile = memory_bound()
    limited = replace(profile, device=replace(profile.device, memory_bytes=60))
    assert best(limited, setting()).prediction.step_s == 54.0
    assert best(limited, setting(memory_bytes=60)).prediction.step_s == 63.0


def test_scaling_a_layer_leaves_the_others_and_all_bytes_alone() -> None:
    profile = make_profile([1.0, 2.0], stash_bytes=7)
    scaled = with_layer_times(profile, 1, 0.5)
    assert scaled.layers[0] == profile.layers[0]
    assert (scaled.layers[1].costs[0].forward.median_s, scaled.layers[1].costs[0].backward.median_s) == (1.0, 2.0)
    assert scaled.layers[1].costs[0].stash_bytes == 7


@pytest.mark.parametrize("factor", [0.5, 0.0])
def test_a_faster_link_shortens_every_transfer_alike(factor: float) -> None:
    points = (LinkPoint(num_bytes=100, seconds=1.0), LinkPoint(num_bytes=300, seconds=2.0))
    link = Link(latency_s=1.0, bytes_per_s=100.0, points=points)
    faster = with_link_times(replace(cut_bound(), link=link), factor).link
    for num_bytes in (50, 200, 1000):
        assert faster.transfer_s(num_bytes) == pytest.approx(factor * link.transfer_s(num_bytes), abs=1e-20)


def test_transfers_whose_seconds_are_given_are_shortened_as_well() -> None:
    cost = ValueCost(microbatch_size=1, num_bytes=8)
    value = Value(producer=0, consumers=(1,), costs=(cost,), transfer_s=4.0)
    assert with_link_times(replace(cut_bound(), values=(value,)), 0.5).values[0].transfer_s == 2.0


def test_what_cuts_of_selected_layers_cost_is_what_their_plan_says() -> None:
    plan = plan_of(recompute_bound(), memory_bytes=70, recompute="selected")
    found = priced(recompute_bound(), setting_of(plan), plan.cuts)
    assert any(stage.recompute_layers for stage in plan.stages)
    assert (found.stages, found.step_s, found.misfit) == (plan.stages, plan.prediction.step_s, "")


def test_cuts_that_do_not_fit_whatever_is_recomputed_say_so() -> None:
    profile = make_profile([1.0, 1.0, 1.0], stash_bytes=10, weight_bytes=10)
    found = priced(profile, setting(memory_bytes=60, recompute="selected"), (2,))
    assert found.misfit.startswith(f"stage 0 needs {found.peak_bytes} B, whichever layers it recomputes; expected")


def test_the_constraints_of_a_plan_are_asked_for_again() -> None:
    profile, constraints = make_profile([1.0, 1.0, 2.0]), Constraints(cut_after=("a",))
    plan = plan_of(profile, constraints=constraints)
    assert setting_of(plan).constraints == constraints
    assert best(profile, setting_of(plan)).cuts == plan.cuts == (1,)


def test_a_plan_on_places_cannot_be_balanced_anew() -> None:
    plan = plan_of(make_profile([1.0, 1.0]))
    place = MachineDevice(name="gpu0", host="here")
    assert obstacle(plan) == ""
    assert "machine" in obstacle(replace(plan, stages=tuple(replace(x, machine_device=place) for x in plan.stages)))
    assert obstacle(replace(plan, recompute="selected")) == ""
