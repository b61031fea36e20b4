"""A plan without the contention of its stages: what one process alone is held against."""

from __future__ import annotations

from dataclasses import replace

import pytest

import gplan
from gplan.core import Contention, Link, Machine, MachineDevice, Profile
from gplan.simulation.simulator import simulate
from gplan.simulation.without_contention import NOTE, plan_without_contention, profile_without_contention
from tests.made import FREE_LINK, make_profile
from tests.scheduled import EVERY_SCHEDULE, scheduled_plan


def with_contention(factor: float) -> Profile:
    made = make_profile([1.0, 2.0, 3.0, 4.0], optimizer_s=4.0, weight_bytes=4)
    layers = tuple(replace(x, costs=tuple(replace(y, contention=factor) for y in x.costs)) for x in made.layers)
    return replace(
        made, layers=layers, num_neighbours=1, step=replace(made.step, contention=factor, update_contention=factor)
    )


def test_alone_a_plan_predicts_what_a_profile_without_contention_does() -> None:
    shared, alone = (gplan.balance(with_contention(x), num_devices=2, num_microbatches=4) for x in (1.5, 1.0))
    update_s = alone.stages[0].cost.optimizer_s  # the end of the step, beside no other device
    assert shared.prediction.step_s == pytest.approx(1.5 * (alone.prediction.step_s - update_s) + update_s)
    found = plan_without_contention(shared)
    assert found.prediction.step_s == pytest.approx(alone.prediction.step_s)
    assert found.prediction.bubble == pytest.approx(alone.prediction.bubble)
    assert found.stages[0].layer_forward_s == pytest.approx(alone.stages[0].layer_forward_s)
    assert found.stages[1].cost.optimizer_s == pytest.approx(alone.stages[1].cost.optimizer_s)
    assert found.notes[-1] == NOTE


def test_alone_a_profile_is_the_one_without_contention() -> None:
    with_loss = (replace(with_contention(x), loss=with_contention(x).layers[0].costs) for x in (1.5, 1.0))
    shared, alone = with_loss
    assert profile_without_contention(shared) == alone


def test_places_and_their_speeds_stay_and_only_the_company_goes() -> None:
    places = (MachineDevice(name="x", host="a", speed=2.0), MachineDevice(name="y", host="b"))
    machine = Machine(devices=places, within=FREE_LINK, between=Link(latency_s=0.5, bytes_per_s=1e9))
    shared, alone = (
        gplan.balance(with_contention(x), num_devices=2, num_microbatches=4, machine=machine, memory_bytes=10**9)
        for x in (1.5, 1.0)
    )
    found = plan_without_contention(shared)
    assert [stage.machine_device for stage in found.stages] == [stage.machine_device for stage in shared.stages]
    assert {stage.machine_device for stage in found.stages} == {*places}
    assert found.prediction.step_s == pytest.approx(alone.prediction.step_s)
    assert found.prediction.step_s < shared.prediction.step_s


def test_a_plan_without_contention_is_left_as_it_is() -> None:
    plan = gplan.balance(make_profile([1.0, 2.0]), num_devices=2, num_microbatches=4)
    assert plan_without_contention(plan) is plan


@pytest.mark.parametrize("schedule", EVERY_SCHEDULE)
def test_the_halves_of_a_backward_have_contention_too(schedule: str) -> None:
    plan = scheduled_plan(schedule, transfer_s=0.0)
    twice = Contention(forward=2, backward=2, recompute=2, input_gradient=2, weight_gradient=2, optimizer=2)
    shared = replace(plan, stages=tuple(replace(x, contention=twice) for x in plan.stages))
    assert simulate(shared).step_s == pytest.approx(2 * plan.prediction.step_s)
    found = plan_without_contention(shared)
    assert found.prediction.step_s == simulate(found).step_s == pytest.approx(plan.prediction.step_s)


def test_halves_that_are_not_known_stay_so() -> None:
    shared = gplan.balance(with_contention(1.5), num_devices=2, num_microbatches=4)
    assert plan_without_contention(shared).stages[1].cost.input_gradient_s is None


def test_contention_may_exceed_what_a_profile_may_contain() -> None:
    assert Contention(forward=2e6).forward == 2e6  # a measured factor times a calibrated one
    with pytest.raises(ValueError, match="forward is 0; expected a finite number above 0"):
        Contention(forward=0)
