"""Plans for given cuts and changed profiles, and the check that a profile belongs to a plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gplan.core import Collective, Constraints, Link, LinkPoint, MachineDevice, Plan, Profile
from gplan.core.errors import FileError, NoPlanError
from gplan.corrections.links import with_link_times
from gplan.evaluate.replanning import (
    other_times_notes,
    plan_with_cuts,
    plan_within_memory,
    profile_in_plan_order,
    replan,
    setting_of,
    why_not_replannable,
)
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
from tests.reporting.subjects import named


@pytest.mark.parametrize("recompute", ["never", "always", "except-last"])
@pytest.mark.parametrize("minimize", ["step-time", "max-stage"])
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_plans_own_cuts_cost_what_the_plan_says(recompute: str, minimize: str, num_replicas: int) -> None:
    plan = plan_of(uneven(), num_devices=3, recompute=recompute, minimize=minimize, num_replicas=num_replicas)
    found = plan_with_cuts(uneven(), setting_of(plan), plan.cuts)
    assert (found.prediction.step_s, found.proof.objective_s) == (plan.prediction.step_s, plan.proof.objective_s)
    assert found.stages == plan.stages


@pytest.mark.parametrize("given", CHUNKED, ids=lambda given: str(given["schedule"])[:8])
@pytest.mark.parametrize("minimize", ["step-time", "max-stage"])
def test_repricing_chunked_plans(given: dict[str, Any], minimize: str) -> None:
    profile = split(uneven())
    plan = plan_of(profile, minimize=minimize, **given)
    found = plan_with_cuts(profile, setting_of(plan), plan.cuts)
    assert (found.stages, found.prediction.step_s, found.peak_bytes) == (
        plan.stages,
        plan.prediction.step_s,
        plan.peak_bytes,
    )
    assert found.proof.objective_s == pytest.approx(plan.proof.objective_s, rel=1e-12)
    worst = plan.device_peak_bytes.index(plan.peak_bytes)
    with pytest.raises(NoPlanError, match=f"^device {worst} needs"):
        plan_within_memory(profile, replace(setting_of(plan), memory_bytes=plan.peak_bytes - 1), plan.cuts)


def test_memory_excess_names_the_stage_of_a_device() -> None:
    plan = plan_of(uneven(), num_devices=2, num_microbatches=1, schedule="custom:1F0 1B0 / 0F0 0B0")
    assert [plan.stages_of(device)[0].index for device in range(2)] == [1, 0]
    worst = plan.stages_of(plan.device_peak_bytes.index(plan.peak_bytes))[0].index
    with pytest.raises(NoPlanError, match=f"^stage {worst} needs"):
        plan_within_memory(uneven(), replace(setting_of(plan), memory_bytes=plan.peak_bytes - 1), plan.cuts)


def test_only_the_setting_limits_memory() -> None:
    profile = memory_bound()
    limited = replace(profile, device=replace(profile.device, memory_bytes=60))
    assert replan(limited, setting()).prediction.step_s == 54.0
    assert replan(limited, setting(memory_bytes=60)).prediction.step_s == 63.0


@pytest.mark.parametrize("factor", [0.5, 0.0])
def test_a_faster_link_shortens_every_transfer_alike(factor: float) -> None:
    points = (LinkPoint(num_bytes=100, seconds=1.0), LinkPoint(num_bytes=300, seconds=2.0))
    link = Link(latency_s=1.0, bytes_per_s=100.0, points=points)
    link = replace(link, collectives=(Collective(kind="all_reduce", num_devices=2, message=link),))
    faster = with_link_times(replace(cut_bound(), link=link), factor).link
    for num_bytes in (50, 200, 1000):
        assert faster.transfer_s(num_bytes) == pytest.approx(factor * link.transfer_s(num_bytes), abs=1e-20)
        summed_s = (float(x.collectives_s("all_reduce", num_bytes, 2)) for x in (faster, link))
        assert next(summed_s) == pytest.approx(factor * next(summed_s), abs=1e-20)


def test_repricing_selected_layers() -> None:
    plan = plan_of(recompute_bound(), memory_bytes=70, recompute="selected")
    found = plan_within_memory(recompute_bound(), setting_of(plan), plan.cuts)
    assert any(stage.recompute_layers for stage in plan.stages)
    assert (found.stages, found.prediction.step_s) == (plan.stages, plan.prediction.step_s)


def test_memory_excess_of_selected_layers() -> None:
    profile = make_profile([1.0, 1.0, 1.0], stash_bytes=10, weight_bytes=10)
    limited = setting(memory_bytes=60, recompute="selected")
    needed = plan_with_cuts(profile, limited, (2,)).peak_bytes
    with pytest.raises(NoPlanError, match=f"^stage 0 needs {needed} B, whichever layers it recomputes; expected"):
        plan_within_memory(profile, limited, (2,))


def test_setting_keeps_constraints() -> None:
    profile, constraints = make_profile([1.0, 1.0, 2.0]), Constraints(cut_after=("a",))
    plan = plan_of(profile, constraints=constraints)
    assert setting_of(plan).constraints == constraints
    assert replan(profile, setting_of(plan)).cuts == plan.cuts == (1,)


def test_a_plan_on_places_cannot_be_balanced_anew() -> None:
    plan = plan_of(make_profile([1.0, 1.0]))
    place = MachineDevice(name="gpu0", host="here")
    assert why_not_replannable(plan) == ""
    assert "machine" in why_not_replannable(
        replace(plan, stages=tuple(replace(x, machine_device=place) for x in plan.stages))
    )
    assert why_not_replannable(replace(plan, recompute="selected")) == ""


PROFILE = make_profile([1.0, 2.0, 3.0], microbatch_sizes=(2, 4))
PLAN = plan_of(PROFILE, microbatch_size=4)


@pytest.mark.parametrize(
    ("plan", "profile", "told"),
    [
        (PLAN, replace(PROFILE, model=replace(PROFILE.model, digest="else")), "digest made.*digest else"),
        (named(PLAN, ("a", "b", "z")), PROFILE, "a layer z, which the profile does not have"),
        (plan_of(make_profile([1.0, 2.0])), PROFILE, "the plan has 2 layers, the profile 3"),
        (replace(PLAN, microbatch_size=8), PROFILE, "micro-batches of 8, the profile was made at 2 to 4"),
    ],
)
def test_other_profile_is_refused(plan: Plan, profile: Profile, told: str) -> None:
    with pytest.raises(FileError, match=told + ".*expected the profile that the plan was made from"):
        profile_in_plan_order(plan, profile)


def test_the_profile_comes_in_the_order_of_the_plan() -> None:
    other = PROFILE.reordered([2, 0, 1])
    assert [x.name for x in other.layers] == ["c", "a", "b"]
    assert profile_in_plan_order(PLAN, other) == PROFILE


def test_remeasured_profile_is_noted() -> None:
    assert other_times_notes(PLAN, PROFILE) == ()
    again = make_profile([1.0, 2.0, 3.3], microbatch_sizes=(2, 4))
    (note,) = other_times_notes(PLAN, again)
    assert "194 s, not 180 s" in note
