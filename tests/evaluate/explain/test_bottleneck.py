"""The bottleneck, on timelines worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gplan.core import Plan, RecomputeMode
from gplan.evaluate.bottleneck import exposed_cuts, find_bottleneck
from gplan.simulation.simulator import simulate
from tests.evaluate.explain.settings import cut_bound, plan_of, uneven
from tests.made import make_profile
from tests.scheduled import EVERY_SCHEDULE, scheduled_plan


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("recompute", ["never", "except-last"])
@pytest.mark.parametrize("num_stages", [2, 3, 5])
def test_bottleneck_times_add_up(schedule: str, recompute: str, num_stages: int) -> None:
    plan = plan_of(uneven(), schedule=schedule, recompute=recompute, num_devices=num_stages)
    found = find_bottleneck(plan, memory_gain_s=0.0)
    parts = (found.busy_s, found.filling_s, found.imbalance_s, found.communication_s, found.tail_s)
    assert sum(parts) == pytest.approx(plan.prediction.step_s, rel=1e-12)


def test_bottleneck_and_its_slowest_layers() -> None:
    plan = plan_of(make_profile([1.0, 1.0, 1.0, 5.0, 1.0]))
    found = find_bottleneck(plan, memory_gain_s=0.0)
    assert (plan.cuts, found.device, found.busy_s, found.num_layers) == ((3,), 1, 4 * 18.0, 2)
    assert [(x.layer, x.time_s) for x in found.layers] == [("d", 15.0)]
    assert found.layers[0].share == pytest.approx(5 / 6)


def test_stages_within_one_percent_are_as_long() -> None:
    for seconds, equals in ((0.995, (1, 2)), (0.98, (1,))):
        plan = plan_of(make_profile([1.0, 1.0, seconds]), num_devices=3)
        assert find_bottleneck(plan, memory_gain_s=0.0).equals == equals


def test_cut_binds() -> None:
    found = find_bottleneck(plan_of(cut_bound()), memory_gain_s=0.0)
    assert found.exposed_s == found.cuts[0].exposed_s == 2.0
    assert (found.busy_s, found.filling_s, found.communication_s) == (8.0, 3.0, 1.0)
    assert (found.cuts[0].layer, found.cuts[0].transfer_s, found.binds) == ("a", 2.0, "cut")


@pytest.mark.parametrize("schedule", EVERY_SCHEDULE)
@pytest.mark.parametrize("recompute", ["never", "except-last"])
def test_the_five_times_add_up_for_every_schedule(schedule: str, recompute: RecomputeMode) -> None:
    plan = scheduled_plan(schedule, recompute=recompute)
    found = find_bottleneck(plan, memory_gain_s=0.0)
    parts = (found.busy_s, found.filling_s, found.imbalance_s, found.communication_s, found.tail_s)
    assert sum(parts) == pytest.approx(plan.prediction.step_s, rel=1e-12)
    assert found.stages == tuple(stage.index for stage in plan.stages_of(found.device))


def test_bottleneck_of_a_device_with_several_stages() -> None:
    """Stages of 2, 5, 6 and 1 s forward on devices 0, 1, 0, 1: the third, of 6, is with the first."""
    plan = scheduled_plan("looped-bfs:2", times_s=(2.0, 5.0, 6.0, 1.0), transfer_s=0.0)
    found = find_bottleneck(plan, memory_gain_s=0.0)
    assert (found.device, found.stages, found.busy_s, found.num_layers) == (0, (0, 2), 2 * 3 * 8.0, 2)
    assert [(x.layer, x.share) for x in found.layers] == [("c", 0.75)]
    assert found.equals == ()
    alike = scheduled_plan("looped-bfs:2", times_s=(2.0, 7.0, 6.0, 1.0), transfer_s=0.0)
    assert find_bottleneck(alike, memory_gain_s=0.0).equals == (1,)


def test_within_a_device_there_is_no_cut_to_expose() -> None:
    cuts, exposed_s = exposed_cuts(scheduled_plan("zb-v"))
    assert [(cut.stage, cut.layer) for cut in cuts] == [(0, "a"), (2, "c")]
    assert exposed_s > 0


@pytest.mark.parametrize("schedule", EVERY_SCHEDULE)
def test_exposed_cuts_agree_with_the_simulator(schedule: str) -> None:
    plan = scheduled_plan(schedule)
    cuts, exposed_s = exposed_cuts(plan)
    for cut in cuts:
        expected_s = max(0.0, plan.prediction.step_s - step_without(plan, {cut.stage}))
        assert cut.exposed_s == pytest.approx(expected_s, abs=1e-9)
    all_s = plan.prediction.step_s - step_without(plan, {cut.stage for cut in cuts})
    assert exposed_s == pytest.approx(all_s, abs=1e-9)
    assert exposed_s >= max(cut.exposed_s for cut in cuts) > 0


def step_without(plan: Plan, stages: set[int]) -> float:
    """The step where the transfers over the cuts after these stages take no time."""
    costs = [replace(x.cost, activation_s=0.0, gradient_s=0.0) if x.index in stages else x.cost for x in plan.stages]
    free = [replace(stage, cost=cost) for stage, cost in zip(plan.stages, costs, strict=True)]
    return simulate(replace(plan, stages=tuple(free))).step_s


def test_filling_binds_one_microbatch() -> None:
    profile = make_profile([1.0, 1.0])
    for num_microbatches, binds in ((1, "filling"), (8, "compute")):
        plan = plan_of(profile, num_microbatches=num_microbatches)
        assert find_bottleneck(plan, memory_gain_s=0.0).binds == binds


def test_memory_binds() -> None:
    plan = plan_of(make_profile([1.0, 1.0]), num_microbatches=8)
    step_s = plan.prediction.step_s
    for share, binds in ((0.011, "memory"), (0.009, "compute")):
        assert find_bottleneck(plan, memory_gain_s=share * step_s).binds == binds
    assert find_bottleneck(plan, memory_gain_s=None).memory_gain_s is None


@pytest.mark.parametrize(("optimizer_s", "binds"), [(13.0, "optimizer"), (11.0, "compute")])
def test_optimizer_binds(optimizer_s: float, binds: str) -> None:
    plan = plan_of(make_profile([1.0, 1.0], weight_bytes=8, optimizer_s=optimizer_s), num_devices=1)
    found = find_bottleneck(plan, memory_gain_s=0.0)
    assert (found.busy_s, found.tail_s, found.binds) == (24.0, optimizer_s, binds)


def test_one_stage_has_no_cut_and_never_waits() -> None:
    found = find_bottleneck(plan_of(make_profile([1.0, 2.0]), num_devices=1), memory_gain_s=0.0)
    assert (found.cuts, found.exposed_s, found.filling_s, found.equals) == ((), 0.0, 0.0, ())


def test_layers_without_time_have_no_share() -> None:
    plan = plan_of(make_profile([0.0, 0.0], weight_bytes=8, optimizer_s=1.0))
    found = find_bottleneck(plan, memory_gain_s=0.0)
    assert (found.layers, found.busy_s, found.binds) == ((), 0.0, "optimizer")
