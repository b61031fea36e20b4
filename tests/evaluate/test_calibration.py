"""Calibration from made hosts that differ from their profile in one thing, and the fit of its factors."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from gplan.simulation.without_contention import plan_without_contention

import gplan
from gplan.core import Calibration, EngineCost, Layer, LayerCost, Link, MachineDevice, Profile, SharedWeight, Timing
from gplan.core.errors import FileError, UsageError
from gplan.evaluate.calibration import (
    Sample,
    calibrate,
    calibrated,
    calibration_note,
    common_factor,
    own_factors,
    pricing_profile,
)
from gplan.evaluate.replanning import reprice
from gplan.evaluate.verify import verify
from tests.evaluate.hosts import MadeHost, usual_plan, usual_profile

LINK = Link(latency_s=0.5, bytes_per_s=1.0)


def profile_with(**changed: object) -> Profile:
    """Layers a, c, e, g of kind Even, the others of kind Odd, with transfers that devices wait for."""
    made = usual_profile(output_bytes=1, link=LINK)
    layers = tuple(replace(x, kind="Odd" if i % 2 else "Even") for i, x in enumerate(made.layers))
    return replace(made, layers=layers, **changed)  # type: ignore[arg-type]


def slower(profile: Profile, factor_of: Callable[[Layer], float]) -> Profile:
    def times(cost: LayerCost, factor: float) -> LayerCost:
        return replace(cost, forward=cost.forward.times(factor), backward=cost.backward.times(factor))

    layers = (replace(x, costs=tuple(times(cost, factor_of(x)) for cost in x.costs)) for x in profile.layers)
    return replace(profile, layers=tuple(layers))


def with_contention(profile: Profile, contention: float) -> Profile:
    layers = (replace(x, costs=tuple(replace(y, contention=contention) for y in x.costs)) for x in profile.layers)
    return replace(profile, layers=tuple(layers), num_neighbours=3)


def learned(profile: Profile, truth: Profile, *, engine: str = "torch", num_rivals: int | None = None) -> Calibration:
    """From runs on a host that is as `truth` says, of plans made from `profile`."""
    host = MadeHost(truth=lambda plan: reprice(plan, truth, engine=engine), engine=engine)
    plan = usual_plan(profile)
    found = verify(plan, profile, host, engine=engine, num_rounds=1, num_rivals=num_rivals, num_cores=64)
    return calibrate(found, profile)


def assert_better(calibration: Calibration, *, most: float) -> None:
    assert calibration.held_out and calibration.helps
    for check in calibration.held_out:
        assert abs(check.error_after) <= most < abs(check.error_before)


def test_drift_by_kind() -> None:
    profile = profile_with()
    truth = slower(profile, lambda layer: 1.3 if layer.kind == "Odd" else 1.1)
    found = learned(profile, truth)
    drift = {x.kind: (x.forward, x.backward) for x in found.kinds}
    assert drift["Odd"] == pytest.approx((1.3, 1.3), abs=0.04)
    assert drift["Even"] == pytest.approx((1.1, 1.1), abs=0.04)
    assert_better(found, most=0.02)


def test_every_second_plan_is_held_out() -> None:
    profile = profile_with()
    found = learned(profile, profile)
    checks = [x.label for x in found.held_out]
    assert found.learned_from[0] == "this plan"
    assert not set(checks) & set(found.learned_from)
    assert abs(len(checks) - len(found.learned_from)) <= 1


def test_perfect_prediction_changes_nothing() -> None:
    profile = profile_with()
    found = learned(profile, profile)
    assert all((x.forward, x.backward) == pytest.approx((1.0, 1.0)) for x in found.kinds)
    factors = (found.contention, found.optimizer, found.link, found.action_s)
    assert factors == pytest.approx((1.0, 1.0, 1.0, 0.0), abs=1e-9)
    plan = usual_plan(profile)
    again = reprice(plan, calibrated(profile, found), engine="torch")
    assert again.prediction.step_s == pytest.approx(plan.prediction.step_s)


def test_tied_gradients_are_not_the_optimizer() -> None:
    tied = SharedWeight(name="w", layers=(0, 7), num_parameters=1, weight_bytes=4, gradient_bytes=4)
    profile = profile_with(shared_weights=(tied,))
    assert max(x.cost.all_reduce_s for x in usual_plan(profile).stages) > 1
    found = learned(profile, profile)
    assert (found.optimizer, found.link) == pytest.approx((1.0, 1.0))


def test_engine_time_is_learned() -> None:
    profile = profile_with()
    free = Link(latency_s=0.0, bytes_per_s=1e30)
    found = learned(profile, replace(profile, engine=EngineCost(action_s=2.0, sending=free)))
    assert found.action_s == pytest.approx(2.0, rel=0.15)
    assert_better(found, most=0.03)


def test_engine_time_can_be_lower() -> None:
    sending = Link(latency_s=0.25, bytes_per_s=1e30)
    profile = profile_with(engine=EngineCost(action_s=2.0, sending=sending))
    found = learned(profile, replace(profile, engine=EngineCost(action_s=0.5, sending=sending)))
    assert found.action_s == pytest.approx(0.5, abs=0.3)
    engine = calibrated(profile, found).engine
    assert engine is not None and engine.sending == sending


def test_link_factor() -> None:
    profile = profile_with()
    found = learned(profile, replace(profile, link=replace(LINK, latency_s=1.5, bytes_per_s=1 / 3)))
    assert found.link == pytest.approx(3.0, rel=0.05)
    assert calibrated(profile, found).link.transfer_s(1) == pytest.approx(3.0 * LINK.transfer_s(1), rel=0.05)


def test_optimizer_factor() -> None:
    profile = profile_with()
    step = replace(profile.step, optimizer=profile.step.optimizer.times(2.0))
    found = learned(profile, replace(profile, step=step))
    assert found.optimizer == pytest.approx(2.0, rel=0.02)


def test_common_factor_is_contention() -> None:
    profile = with_contention(profile_with(), 1.3)
    found = learned(profile, with_contention(profile_with(), 1.9))
    assert found.contention == pytest.approx((1 + 0.9 / 3) / (1 + 0.3 / 3), rel=0.01)
    assert all((x.forward, x.backward) == pytest.approx((1.0, 1.0), abs=0.01) for x in found.kinds)
    assert calibrated(profile, found).layers[0].costs[0].contention == pytest.approx(1.9, rel=0.01)


def test_virtual_engine_calibrates_drift_only() -> None:
    profile = profile_with(engine=EngineCost(action_s=0.5, sending=LINK))
    elsewhere = replace(profile, link=Link(latency_s=5.0, bytes_per_s=1.0), engine=None)
    found = learned(profile, slower(elsewhere, lambda _layer: 1.25), engine="virtual")
    assert (found.contention, found.link, found.action_s) == (1.0, 1.0, 0.5)
    assert found.kinds[0].forward == pytest.approx(1.25, rel=0.01)


def test_calibration_without_rivals() -> None:
    profile = profile_with()
    found = learned(profile, slower(profile, lambda _layer: 1.25), num_rivals=0)
    assert found.held_out == ()
    assert not found.helps
    assert "no other plan was run" in calibration_note(found)


def test_machine_plan_is_refused() -> None:
    profile = profile_with()
    plan = usual_plan(profile)
    stages = tuple(replace(x, machine_device=MachineDevice(name=str(x.index), host="here")) for x in plan.stages)
    found = verify(replace(plan, stages=stages), profile, MadeHost(), engine="torch", num_rounds=1, num_cores=64)
    with pytest.raises(UsageError, match="nothing can be learned"):
        calibrate(found, profile)


def test_calibration_of_another_profile_is_refused() -> None:
    profile = profile_with()
    found = learned(profile, profile, num_rivals=1)
    with pytest.raises(FileError, match="the calibration was learned for the profile of 2000-01-01"):
        calibrated(replace(profile, created="2001-01-01T00:00:00+00:00"), found)


def test_calibrated_profile_has_a_note() -> None:
    profile = profile_with()
    corrected = calibrated(profile, learned(profile, slower(profile, lambda _layer: 1.25)))
    assert corrected.plan_notes[-1].startswith("calibrated by ")
    assert "without and" in corrected.plan_notes[-1]
    assert corrected.plan_notes[-1] in gplan.balance(corrected, num_devices=2, num_microbatches=2).notes
    assert corrected.layers[0].costs[0].forward.origin == "computed"


def test_calibrated_layers_and_whole_model_agree() -> None:
    profile = profile_with()
    timing = [Timing.exactly(x) for x in profile.one_stage_s(0)]
    whole = tuple(
        gplan.core.WholeModel(microbatch_size=size, forward=timing[0].times(size), backward=timing[1].times(size))
        for size in profile.microbatch_sizes
    )
    profile = replace(profile, whole_model=whole)
    assert profile.doubts == ()
    assert calibrated(profile, learned(profile, slower(profile, lambda _layer: 1.8))).doubts == ()


def test_pricing_profile() -> None:
    profile = profile_with()
    found = learned(profile, slower(profile, lambda _layer: 1.25), num_rivals=1)
    corrected = calibrated(profile, found)
    assert pricing_profile(usual_plan(profile), profile, found) is profile
    assert pricing_profile(usual_plan(corrected), profile, found) == corrected
    assert pricing_profile(usual_plan(corrected), profile, None) is profile


def test_pricing_profile_of_the_virtual_engine() -> None:
    profile = with_contention(profile_with(), 1.5)
    found = learned(profile, slower(profile, lambda _layer: 1.25), num_rivals=1)
    corrected = calibrated(profile, found)
    assert (
        pricing_profile(plan_without_contention(usual_plan(corrected)), profile, found, engine="virtual") == corrected
    )
    assert pricing_profile(plan_without_contention(usual_plan(profile)), profile, found, engine="virtual") is profile


@pytest.mark.parametrize(
    ("num_rivals", "expected"), [(0, "calibrated by 1 plan run"), (2, "calibrated by 2 plans run")]
)
def test_the_note_counts_the_plans(num_rivals: int, expected: str) -> None:
    assert calibration_note(learned(profile_with(), profile_with(), num_rivals=num_rivals)).startswith(expected)


def test_calibration_round_trip(tmp_path: Path) -> None:
    profile = profile_with()
    found = learned(profile, slower(profile, lambda _layer: 1.25))
    gplan.save(found, tmp_path / "c.json")
    assert gplan.load(tmp_path / "c.json") == found


def test_factors_of_different_mixes() -> None:
    mixes = [(1.0, 3.0), (3.0, 1.0), (2.0, 2.0), (4.0, 1.0)] * 4
    found = own_factors([Sample(measured_s=1.1 * a + 0.95 * b, pieces_s={"a": a, "b": b}) for a, b in mixes])
    assert found["a"] == pytest.approx(1.1, abs=0.01)
    assert found["b"] == pytest.approx(0.95, abs=0.01)


def test_equal_mixes_share_one_factor() -> None:
    found = own_factors([Sample(measured_s=1.2 * (x + 2 * x), pieces_s={"a": x, "b": 2 * x}) for x in (1.0, 2.0, 3.0)])
    assert found["a"] == pytest.approx(found["b"], abs=0.01) == pytest.approx(1.2, abs=0.01)


def test_shrinkage() -> None:
    usual = [Sample(measured_s=1.0, pieces_s={"a": 1.0}) for _ in range(4)]
    found = own_factors([*usual, Sample(measured_s=1.1, pieces_s={"a": 1.0, "b": 0.05})])
    assert 1.0 < found["b"] < 1.5 < 3.0


def test_what_has_no_factor_is_taken_off_first() -> None:
    samples = [Sample(measured_s=0.5 + 2.0 * x, pieces_s={"a": x}, fixed_s=0.5) for x in (1.0, 2.0, 3.0)]
    assert common_factor(samples) == pytest.approx(2.0, rel=0.01)


def test_factors_are_bounded() -> None:
    chance = random.Random(0)
    for _ in range(50):
        samples = [
            Sample(measured_s=chance.expovariate(1), pieces_s={"a": chance.random(), "b": chance.random()})
            for _ in range(3)
        ]
        assert 0.25 <= common_factor(samples) <= 4.0
        assert all(0.125 <= x <= 8.0 for x in own_factors(samples).values())


def test_no_samples_give_factor_one() -> None:
    assert common_factor([]) == 1.0
    assert common_factor([Sample(measured_s=-1.0, pieces_s={"a": 1.0})]) == 1.0
    assert own_factors([]) == {}
    assert own_factors([Sample(measured_s=0.0, pieces_s={"a": 1.0})]) == {"a": 1.0}
