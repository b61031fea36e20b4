"""The host's speed: the ratio of two yardsticks, a profile at that speed, and the errors of made runs at equal speed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from gplan.core import EngineCost, HostLoad, Link, Plan, Profile, Run, Timing
from gplan.corrections.host_speed import at_host_speed, speed_ratio
from gplan.evaluate.attribution import ErrorCause, attribute_error
from gplan.evaluate.compare import FORWARD, STEP_TIME, THROUGHPUT, compare, with_equal_speed
from gplan.evaluate.replanning import reprice
from gplan.files import json_files
from gplan.reporting.text.run import run_view
from tests.evaluate.hosts import run_of, usual_plan, usual_profile


def load(seconds: float, *, spread: float = 0.02, num_samples: int = 25) -> HostLoad:
    """A host whose yardstick has this standard deviation as a share."""
    half_s = 0.675 * spread * seconds
    timing = Timing(median_s=seconds, low_s=seconds - half_s, high_s=seconds + half_s, num_samples=num_samples)
    return HostLoad(yardstick=timing)


def profiled() -> Profile:
    engine = EngineCost(action_s=0.25, sending=Link(latency_s=0.125, bytes_per_s=1e3), step_s=0.5)
    return replace(usual_profile(), host_load=load(1e-3), engine=engine, overhead_s=0.25)


def planned(profile: Profile, *, engine: str = "torch") -> Plan:
    return reprice(usual_plan(), profile, engine=engine)


def slow_run(profile: Profile, factor: float, *, engine: str = "torch", **reading: float) -> Run:
    run = replace(
        run_of(planned(profile, engine=engine), factor, engine=engine), host_load=load(factor * 1e-3, **reading)
    )
    return with_equal_speed(run, profile)


def printed(view: object) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(view)
    return " ".join(capture.get().split())


def test_a_ratio_is_as_uncertain_as_both_readings() -> None:
    ratio, uncertainty = speed_ratio(load(1.0, spread=0.03), load(1.2, spread=0.04)) or (0.0, 0.0)
    assert (ratio, uncertainty) == (pytest.approx(1.2), pytest.approx(2 * 1.2 * 1.25 * 0.05 / 5))


@pytest.mark.parametrize("other", [None, HostLoad(), load(1.0, num_samples=4)])
def test_no_ratio_where_a_host_was_read_too_seldom(other: HostLoad | None) -> None:
    assert speed_ratio(other, load(1.0)) is None
    assert speed_ratio(load(1.0), other) is None


def test_a_plan_of_a_slow_host_takes_that_many_times_as_long() -> None:
    profile = profiled()
    before, after = (planned(x).prediction for x in (profile, at_host_speed(profile, 1.25)))
    assert after.step_s == pytest.approx(1.25 * before.step_s, rel=1e-12)
    assert after.bubble == pytest.approx(before.bubble, rel=1e-12)


def test_a_slow_host_is_no_error_at_equal_speed() -> None:
    run = slow_run(profiled(), 1.25)
    found = compare(run)
    step = found.row(STEP_TIME)
    assert (step.error, step.equal_speed_error) == (pytest.approx(-0.2), pytest.approx(0.0, abs=1e-12))
    assert found.row(THROUGHPUT).equal_speed_error == pytest.approx(0.0, abs=1e-12)
    assert found.row(FORWARD, stage=1).equal_speed_error is None
    assert json_files.parse(Run, json_files.to_json(run), name="run") == run
    verdict = (
        "-20.0 %; +0.0 % at equal host speed: the host was slower than in the profile (fixed work took 1.250 ± 0.018 times "
        "as long)"
    )
    assert verdict in printed(run_view(run))


def test_no_correction_within_the_uncertainty() -> None:
    run = slow_run(profiled(), 1.05, spread=0.2)
    step = compare(run).row(STEP_TIME)
    assert step.equal_speed_error == step.error == pytest.approx(1 / 1.05 - 1)
    assert "-4.8 %; the host was as fast as in the profile (fixed work took 1.050 ± " in printed(run_view(run))
    attribution = attribute_error(run)
    assert attribution is not None
    assert not [x for x in attribution.parts if x.cause is ErrorCause.HOST_SPEED]


def test_the_host_is_a_part_of_the_error() -> None:
    found = attribute_error(slow_run(profiled(), 1.25))
    assert found is not None
    parts = {x.cause for x in found.parts if abs(x.seconds) > 1e-9 * found.measured_s}
    assert parts == {ErrorCause.HOST_SPEED}
    assert sum(x.seconds for x in found.parts) == pytest.approx(found.error_s)


def test_the_virtual_engine_takes_transfers_as_planned() -> None:
    profile = profiled()
    run = slow_run(profile, 2.0, engine="virtual")
    assert run.equal_speed is not None
    step_s = planned(profile, engine="virtual").prediction.step_s
    assert step_s < run.equal_speed.step_s < 2 * step_s


def test_a_profile_that_the_plan_was_not_made_from_corrects_nothing() -> None:
    profile = profiled()
    run = replace(run_of(planned(profile), 1.25), host_load=load(1.25e-3))
    for other in (at_host_speed(profile, 1.1), replace(profile, model=replace(profile.model, digest="another"))):
        assert with_equal_speed(run, other) is run
    assert compare(run).row(STEP_TIME).equal_speed_error is None
    assert "the host was" not in printed(run_view(run))


def test_too_few_readings_are_told() -> None:
    run = slow_run(profiled(), 1.25, num_samples=4)
    assert run.equal_speed is None
    assert run.notes[-1] == (
        "the host's speed was read 4 times, so there is no error at equal host speed, which takes 5: run more steps"
    )
