"""Rivals: each differs from the plan in one thing and has costs from the same cost model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gplan.core import Constraints, MachineDevice, Plan, Profile
from gplan.core.errors import FileError
from gplan.evaluate.rivals import THIS_PLAN, rivals_of
from gplan.simulation.simulator import simulate
from gplan.strategy_search.planner import balance
from tests.evaluate.explain.settings import two_towers
from tests.evaluate.hosts import usual_plan, usual_profile
from tests.made import make_profile


def rivals(plan: Plan, profile: Profile | None = None) -> dict[str, Plan]:
    return dict(rivals_of(plan, profile or usual_profile()).plans)


def left_out(plan: Plan, profile: Profile) -> dict[str, str]:
    return {x.label: x.reason for x in rivals_of(plan, profile).left_out}


def test_rivals_and_their_labels() -> None:
    plan = usual_plan()
    found = rivals(plan)
    assert list(found) == [
        THIS_PLAN, "equal layer counts", "the cut a layer later", "schedule 1f1b", "4 micro-batches of 4",
        "16 micro-batches of 1", "the cut a layer earlier",
    ]  # fmt: skip
    assert found[THIS_PLAN] is plan
    assert found["equal layer counts"].cuts == (4,)
    assert found["the cut a layer earlier"].cuts == (plan.cuts[0] - 1,)
    assert found["the cut a layer later"].cuts == (plan.cuts[0] + 1,)
    assert found["schedule 1f1b"].schedule == "1f1b"
    assert {x.batch_size for x in found.values()} == {16}


def test_rival_predictions_are_simulated() -> None:
    for plan in rivals(usual_plan()).values():
        assert simulate(plan).step_s == pytest.approx(plan.prediction.step_s)


def test_no_rival_beats_a_proven_plan() -> None:
    plan, found = usual_plan(), rivals(usual_plan())
    for label in ("equal layer counts", "the cut a layer later", "the cut a layer earlier"):
        assert found[label].prediction.step_s >= plan.prediction.step_s


def test_unprofiled_size_changes_the_batch() -> None:
    profile = usual_profile(microbatch_sizes=(2,))
    found = rivals(usual_plan(profile), profile)
    assert found["4 micro-batches of 2"].batch_size == 8
    assert found["16 micro-batches of 2"].batch_size == 32


def test_duplicate_rival_is_left_out() -> None:
    profile = make_profile([1.0] * 4)
    plan = balance(profile, num_devices=2, num_microbatches=4)
    assert left_out(plan, profile)["equal layer counts"] == f"the same as {THIS_PLAN}"


def test_rival_over_the_memory_limit_is_left_out() -> None:
    profile = make_profile([3.0, 1.0, 1.0, 1.0], weight_bytes=[20, 10, 10, 0])
    limit = usual_plan(profile, microbatch_size=1).peak_bytes
    plan = usual_plan(profile, microbatch_size=1, memory_bytes=limit)
    assert plan.cuts == (1,)
    assert left_out(plan, profile)["equal layer counts"] == "stage 0 needs 120 B; expected at most 80 B"
    assert all(x.peak_bytes <= limit for x in rivals(plan, profile).values())


def test_unconstrained_plan_is_a_rival() -> None:
    profile = usual_profile()
    plan = usual_plan(profile, constraints=Constraints(cut_after=("c",)))
    assert rivals(plan, profile)["without constraints"].cuts == plan.rivals[0].cuts


def test_runner_up_with_unknown_order_is_left_out() -> None:
    profile = usual_profile()
    plan = usual_plan(profile, constraints=Constraints(cut_after=("c",)))
    reordered = replace(plan, rivals=tuple(replace(x, step_s=2 * x.step_s) for x in plan.rivals))
    assert "an order that the plan's file does not hold" in left_out(reordered, profile)["without constraints"]
    slower = make_profile([2.0] * 8, microbatch_sizes=(1, 2, 4))
    assert "the plan was not made with this profile's times" in left_out(plan, slower)["without constraints"]


def test_an_odd_number_of_micro_batches_has_no_half() -> None:
    profile = usual_profile()
    assert left_out(usual_plan(profile, num_microbatches=7), profile)["half the micro-batches"] == "7 have no half"


@pytest.mark.parametrize(
    ("schedule", "other"),
    [("1f1b", "gpipe"), ("interleaved-1f1b:2", "looped-bfs:2"), ("looped-bfs:3", "interleaved-1f1b:3")],
)
def test_the_other_schedule_has_as_many_chunks(schedule: str, other: str) -> None:
    profile = usual_profile()
    plan = usual_plan(profile, schedule=schedule)
    assert rivals(plan, profile)[f"schedule {other}"].num_stages == plan.num_stages


def test_rivals_keep_the_order_of_layers() -> None:
    profile = two_towers()
    plan = balance(profile, num_devices=2, num_microbatches=4)
    assert plan.layer_names == ("b", "a", "c")
    assert rivals(plan, profile)["equal layer counts"].layer_names == ("b", "a", "c")


def test_num_rivals() -> None:
    plan, profile = usual_plan(), usual_profile()
    assert len(rivals_of(plan, profile, num_rivals=2).plans) == 3
    assert list(rivals_of(plan, profile, num_rivals=0).plans) == [THIS_PLAN]


def test_machine_plan_has_no_rivals() -> None:
    plan = usual_plan()
    stages = tuple(replace(x, machine_device=MachineDevice(name=str(x.index), host="here")) for x in plan.stages)
    field = rivals_of(replace(plan, stages=stages), usual_profile())
    assert list(field.plans) == [THIS_PLAN]
    assert "links" in field.left_out[0].reason


def test_other_profile_is_refused_or_noted() -> None:
    plan, profile = usual_plan(), usual_profile()
    other = replace(profile, model=replace(profile.model, digest="another"))
    with pytest.raises(FileError, match="expected the profile that the plan was made from"):
        rivals_of(plan, other)
    slower = make_profile([2.0] * 8, microbatch_sizes=(1, 2, 4))
    assert "this profile gives the plan a step of" in rivals_of(plan, slower).notes[0]
