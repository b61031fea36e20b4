"""Errors raw and at equal host speed: made runs on hosts that are slower than their profile by a known factor."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest
from rich.console import Console

from gplan.core import (
    HostLoad,
    HostSpeed,
    Link,
    Machine,
    MachineDevice,
    Plan,
    Profile,
    Run,
    SharedWeight,
    Span,
    StepSpeed,
    Timeline,
    YardstickTimes,
)
from gplan.core.host_speed import PartWeights
from gplan.evaluate.attribution import ErrorCause, at_speed, attribute_error, predicted_times
from gplan.evaluate.compare import BUBBLE, FORWARD, OPTIMIZER, PEAK_MEMORY, STEP_TIME, THROUGHPUT, compare
from gplan.evaluate.profile_difference import profile_difference
from gplan.evaluate.retiming import retime_profile
from gplan.evaluate.verify import verify
from gplan.files import json_files
from gplan.reporting.page.facts import headlines, run_facts
from gplan.reporting.text.profile_difference import difference_view
from gplan.reporting.text.run import comparison_table, run_view
from gplan.simulation.simulator import schedule_of, simulate, timeline_of
from tests.evaluate.hosts import measured_run, times, usual_plan, usual_profile
from tests.made import make_profile

SPEED = HostSpeed(
    reference=YardstickTimes(compute_s=1e-3, memory_s=2e-3, interpreter_s=5e-4),
    load=HostLoad(),
)


def readings(factor: float) -> YardstickTimes:
    """A yardstick that takes `factor` times as long as in the profile."""
    return SPEED.reference.times(factor)


def with_speed(run: Run, *factors: float) -> Run:
    """The run with these slowdowns of its ranks in all timed steps; the last window was missed by the first rank."""
    ranks = tuple(map(readings, factors))
    windows = (
        StepSpeed(first_step=3, end_step=6, ranks=ranks, compute_s=factors),
        StepSpeed(first_step=6, end_step=8, ranks=(None, *ranks[1:]), compute_s=factors),
    )
    return replace(run, plan=replace(run.plan, host_speed=SPEED), host_speed=windows)


def slow_run(plan: Plan, *factors: float) -> Run:
    """A run whose devices are exactly as slow as the yardstick says."""
    return with_speed(measured_run(plan, slow_timeline(plan, factors)), *factors)


def slow_timeline(plan: Plan, factors: tuple[float, ...]) -> Timeline:
    slow = at_speed(predicted_times(plan), plan, factors, update_slowdowns=factors).durations
    updates = {x.action: x.duration_s * factors[x.device] for x in simulate(plan).spans}
    return timeline_of(
        schedule_of(plan), plan.stage_costs, duration_s={**updates, **slow}.__getitem__, origin="measured"
    )


def mean_timeline(timelines: Sequence[Timeline]) -> Timeline:
    """Every action from its mean start to its mean end, as in a run."""
    spans = (
        Span(
            device=x[0].device, action=x[0].action, start_s=fmean(y.start_s for y in x), end_s=fmean(y.end_s for y in x)
        )
        for x in zip(*(sorted(y.spans, key=lambda span: str(span.action)) for y in timelines), strict=True)
    )
    return replace(timelines[0], spans=tuple(sorted(spans, key=lambda x: x.start_s)))


def printed(view: object, *, width: int = 200) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(view)
    return " ".join(capture.get().split())


def test_a_slow_host_is_no_error_at_equal_speed() -> None:
    run = slow_run(usual_plan(), 1.25, 1.25)
    found = compare(run)
    step = found.row(STEP_TIME)
    assert (step.error, step.equal_speed_error) == (pytest.approx(-0.2), pytest.approx(0.0, abs=1e-12))
    assert found.row(THROUGHPUT).equal_speed_error == pytest.approx(0.0, abs=1e-12)
    assert found.row(FORWARD, stage=1).equal_speed_error == pytest.approx(0.0, abs=1e-12)
    assert found.row(BUBBLE).equal_speed_error == pytest.approx(0.0, abs=1e-12)
    assert found.row(PEAK_MEMORY, device=0).equal_speed_error is None


@pytest.mark.parametrize("factors", [(1.25, 1.25), (1.4, 1.0), (0.8, 1.1)])
def test_host_drift_is_one_part_and_the_model_another(factors: tuple[float, float]) -> None:
    run = slow_run(usual_plan(), *factors)
    found = attribute_error(run)
    parts = {(x.cause, x.stage): x.seconds for x in found.parts if abs(x.seconds) > 1e-9 * found.measured_s}
    assert set(parts) == {(ErrorCause.HOST_SPEED, None)}
    assert math.fsum(parts.values()) == pytest.approx(found.error_s)
    found_rows = compare(run)
    assert found_rows.row(STEP_TIME).equal_speed_error == pytest.approx(0.0, abs=1e-9)
    assert found_rows.row(BUBBLE).equal_speed_error == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_devices_that_are_slow_in_turns_wait_for_each_other(schedule: str) -> None:
    plan = usual_plan(schedule=schedule)
    phases = [(1.5, 1.0), (1.0, 1.5)]
    run = slow_run(plan, 1.25, 1.25)
    windows = tuple(
        StepSpeed(first_step=i, end_step=i + 1, ranks=tuple(map(readings, x)), compute_s=x)
        for i, x in enumerate(phases, start=3)
    )
    run = replace(run, timeline=mean_timeline([slow_timeline(plan, x) for x in phases]), host_speed=windows)
    assert run.device_slowdowns == pytest.approx((1.25, 1.25))
    step, bubble = (compare(run).row(x) for x in (STEP_TIME, BUBBLE))
    assert step.measured > 1.25 * step.predicted and bubble.error is not None and bubble.error < 0.0
    assert step.equal_speed_error == pytest.approx(0.0, abs=1e-9)
    assert bubble.equal_speed_error == pytest.approx(0.0, abs=1e-9)
    parts = {x.cause: x.seconds for x in attribute_error(run).parts}
    assert parts[ErrorCause.HOST_SPEED] == pytest.approx(step.measured - step.predicted)


def test_virtual_transfers_are_no_slower_on_a_slow_host() -> None:
    link, factors = Link(latency_s=2.0, bytes_per_s=8.0), (1.4, 1.1)
    profile = make_profile([3.0, 5.0, 4.0, 6.0], output_bytes=8, link=link, optimizer_s=2.0, weight_bytes=4)
    plan = usual_plan(profile, microbatch_size=1)
    assert max(predicted_times(plan).transfers.values()) == 3.0
    run = with_speed(measured_run(plan, slow_timeline(plan, factors), engine="virtual"), *factors)
    parts = {x.cause for x in attribute_error(run).parts if abs(x.seconds) > 1e-9 * run.timeline.step_s}
    assert parts == {ErrorCause.HOST_SPEED}
    assert compare(run).row(STEP_TIME).equal_speed_error == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("factors", [(1.4, 1.0), (1.0, 1.4)])
def test_devices_with_a_tied_weight_wait_for_each_other_at_any_speed(factors: tuple[float, float]) -> None:
    tied = SharedWeight(name="w", layers=(0, 3), num_parameters=2, weight_bytes=8, gradient_bytes=8)
    profile = make_profile([3.0, 5.0, 4.0, 6.0], optimizer_s=40.0, weight_bytes=[4, 4, 4, 40], shared_weights=(tied,))
    plan = usual_plan(profile, microbatch_size=1)
    predicted = simulate(plan)
    assert predicted.step_s > predicted.loop_end_s + predicted.update_s(0), "the last device, which waits, ends last"
    run = slow_run(plan, *factors)
    assert compare(run).row(STEP_TIME).equal_speed_error == pytest.approx(0.0, abs=1e-9)
    parts = {x.cause for x in attribute_error(run).parts if abs(x.seconds) > 1e-9 * run.timeline.step_s}
    assert parts == {ErrorCause.HOST_SPEED}


def test_memory_counts_half_for_updates() -> None:
    plan = usual_plan()
    run = slow_run(plan, 1.0, 1.0)
    memory = replace(SPEED.reference, memory_s=1.5**2 * SPEED.reference.memory_s)
    windows = (StepSpeed(first_step=3, end_step=8, ranks=(SPEED.reference, memory), compute_s=(1.0, 1.0)),)
    run = replace(run, host_speed=windows)
    slower = 1.5 ** (2 / 3)  # of passes, by the default weights
    assert (run.device_slowdowns, run.update_slowdowns) == (pytest.approx((1.0, slower)), pytest.approx((1.0, 1.5)))
    found = compare(run)
    assert found.row(FORWARD, stage=1).equal_speed_error == pytest.approx(slower - 1)
    assert [found.row(OPTIMIZER, stage=x).equal_speed_error for x in (0, 1)] == pytest.approx([0.0, 0.5])


def test_what_the_host_does_not_explain_stays_with_the_model() -> None:
    plan = usual_plan()
    run = with_speed(measured_run(plan, times(simulate(plan), 1.5)), 1.25, 1.25)
    found = {x.cause: 0.0 for x in attribute_error(run).parts}
    for part in attribute_error(run).parts:
        found[part.cause] += part.seconds
    step_s = simulate(plan).step_s
    assert found[ErrorCause.HOST_SPEED] == pytest.approx(0.25 * step_s)
    assert sum(found.values()) == pytest.approx(0.5 * step_s)
    assert found[ErrorCause.COMPUTE] > 0.2 * step_s
    assert compare(run).row(STEP_TIME).equal_speed_error == pytest.approx(1.25 / 1.5 - 1)


def test_waits_for_cores_count_as_the_hosts() -> None:
    plan = usual_plan()
    run = slow_run(plan, 2.0, 1.0)
    waited = replace(with_speed(run, 1.0, 1.0), core_stretch=(2.0, 1.0))
    assert waited.device_slowdowns == pytest.approx((2.0, 1.0))
    assert compare(waited).row(STEP_TIME).equal_speed_error == pytest.approx(0.0, abs=1e-9)
    assert "waits for cores made actions up to 2.00 times as long" in printed(run_view(waited))
    assert retime_profile(profiled(), run=waited).host_speed is None
    busy = replace(SPEED, load=HostLoad(wait_share=0.4))
    uncounted = replace(waited, plan=replace(waited.plan, host_speed=busy))
    assert uncounted.device_slowdowns == pytest.approx((1.0, 1.0))
    assert "2.00 times as long; neither error is corrected for that" in printed(run_view(uncounted))


def made_windows(compute_s: Sequence[float], reading: Mapping[int, float]) -> tuple[StepSpeed, ...]:
    """Windows of one step and one rank; a reading is by default as slow as the step, whose compute takes 1 s."""
    return tuple(
        StepSpeed(first_step=i, end_step=i + 1, ranks=(readings(reading.get(i, seconds)),), compute_s=(seconds,))
        for i, seconds in enumerate(compute_s)
    )


def test_a_slow_phase_counts_as_long_as_it_is() -> None:
    phase = [2.0 if i in (3, 4) else 1.0 for i in range(8)]
    assert SPEED.slowdowns(made_windows(phase, {})) == (pytest.approx(phase),)


def test_a_slow_phase_counts_for_updates_too() -> None:
    """A middle mean of the readings alone would leave it out."""
    windows = made_windows([2.0 if i == 4 else 1.0 for i in range(8)], {})  # the first three are the warm-up
    run = replace(with_speed(slow_run(usual_plan(), 1.0, 1.0), 1.0, 1.0), host_speed=windows)
    assert run.update_slowdowns == run.device_slowdowns == pytest.approx((1.2, 1.2))


def test_readings_that_are_slow_where_the_steps_are_not_do_not_count() -> None:
    run = replace(
        with_speed(slow_run(usual_plan(), 1.0, 1.0), 1.0, 1.0), host_speed=made_windows([1.0] * 8, {2: 1.5, 6: 3.0})
    )
    assert run.device_slowdowns == pytest.approx((1.0, 1.0))
    assert compare(run).row(STEP_TIME).equal_speed_error == pytest.approx(0.0)


def test_a_long_tail_of_readings_counts() -> None:
    """The reference of a profile is a mean too. The middle half alone would be 1."""
    windows = made_windows([1.0] * 8, {3: 1.2, 6: 1.2})
    assert SPEED.slowdowns(windows) == (pytest.approx([1.05] * 8),)


def test_steps_with_more_work_are_not_a_slower_host() -> None:
    windows = made_windows([1.0, 4.0, 1.0, 4.0], dict.fromkeys(range(4), 1.0))
    assert SPEED.slowdowns(windows) == ((1.0, 1.0, 1.0, 1.0),)


def test_without_a_yardstick_there_is_one_error() -> None:
    plan = usual_plan()
    run = measured_run(plan, times(simulate(plan), 1.5))
    assert {x.equal_speed_error for x in compare(run).rows} == {None}
    assert ErrorCause.HOST_SPEED not in {x.cause for x in attribute_error(run).parts}
    text = printed(run_view(run))
    assert "equal host speed" not in text and "as fast as in the profile" not in text


def test_a_run_prints_both_errors_and_the_range() -> None:
    run = slow_run(usual_plan(), 1.25, 1.25)
    text = printed(run_view(run))
    assert "the host ran 0.80 times as fast as in the profile: the step's error is -20.0 %" in text
    assert "at equal host speed" in text
    assert "step time 648 s 810 s -20.0 % +0.0 %" in text
    assert "-20.0 % +0.0 %" in printed(run_view(run), width=80)  # the last column is whole
    assert json_files.parse(Run, json_files.to_json(run), name="run") == run


def test_plans_keep_the_speed_and_do_not_change_by_it() -> None:
    profile = usual_profile()
    plain, with_it = usual_plan(profile), usual_plan(replace(profile, host_speed=SPEED))
    assert with_it.host_speed == SPEED
    assert replace(with_it, host_speed=None, proof=plain.proof) == plain


@pytest.mark.parametrize(
    ("changed", "is_kept"),
    [({}, True), ({"hardware": "cpu"}, True), ({"speed": 2.0}, False), ({"hardware": "b200"}, False)],
)
def test_plans_for_machines_like_the_profiled_host_keep_its_speed(changed: dict[str, Any], is_kept: bool) -> None:
    profile = usual_profile()
    profile = replace(profile, host_speed=SPEED, device=replace(profile.device, name="cpu"))
    devices = (MachineDevice(name="a", host="a"), MachineDevice(name="b", host="b", **changed))
    link = Link(latency_s=0.0, bytes_per_s=1e9)
    plan = usual_plan(profile, machine=Machine(devices=devices, within=link, between=link))
    assert plan.host_speed == (SPEED if is_kept else None)


class SlowHost:
    """Every run is slower by this factor, and its yardstick shows it."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, plan: Plan) -> Run:
        return with_speed(measured_run(plan, times(simulate(plan), self.factor)), *[self.factor] * plan.num_devices)


def profiled() -> Profile:
    return replace(usual_profile(), host_speed=SPEED)


def test_a_verification_has_both_errors() -> None:
    profile = profiled()
    found = verify(usual_plan(profile), profile, SlowHost(1.25), engine="torch", num_rounds=2, num_rivals=2)
    assert found.chosen.error == pytest.approx(-0.2)
    assert found.chosen.equal_speed_error == pytest.approx(0.0, abs=1e-9)
    assert len(found.chosen.slowdowns) == 2


def test_two_profiles_are_compared_at_equal_speed() -> None:
    old = profiled()
    layers = (
        replace(
            x,
            costs=tuple(replace(y, forward=y.forward.times(1.25), backward=y.backward.times(1.25)) for y in x.costs),
        )
        for x in old.layers
    )
    new = replace(old, layers=tuple(layers), host_speed=replace(SPEED, reference=readings(1.25)))
    found = profile_difference(old, new)
    assert found.slowdown == pytest.approx(1.25)
    text = printed(difference_view(found, only_changed=False))
    assert re.search(r"the new host ran 0\.80 times as fast as the old one, at equal host speed it is [+-]0\.0 %", text)


def test_a_retimed_profile_has_the_speed_of_the_run() -> None:
    profile = profiled()
    plan = usual_plan(profile)
    newer = retime_profile(profile, run=slow_run(plan, 1.25, 1.25))
    assert newer.host_speed is not None
    assert newer.host_speed.reference.compute_s == pytest.approx(1.25e-3)
    assert newer.host_speed.beside is None
    assert retime_profile(profile, run=measured_run(plan, times(simulate(plan), 1.5))).host_speed is None


def test_a_retimed_profile_leaves_out_disturbed_readings_as_its_run_does() -> None:
    profile = profiled()
    run = slow_run(usual_plan(profile), 1.25, 1.25)
    speed = replace(SPEED, beside=SPEED.reference.times(2.0))
    windows = tuple(
        StepSpeed(first_step=i, end_step=i + 1, ranks=(readings(x), readings(x)), compute_s=(1.0, 1.0))
        for i, x in enumerate([2.5, 2.5, 9.0, 2.5], start=3)
    )
    newer = retime_profile(profile, run=replace(run, plan=replace(run.plan, host_speed=speed), host_speed=windows))
    assert newer.host_speed is not None and newer.host_speed.beside is not None
    assert newer.host_speed.reference.compute_s == pytest.approx(1.25e-3)
    assert newer.host_speed.beside.compute_s == pytest.approx(2.5e-3)


@pytest.mark.parametrize("weights", [(0.5, 0.5, 0.5), (1.5, -0.5, 0.0), (math.nan, 0.5, 0.5)])
def test_weights_that_are_no_shares_are_refused(weights: PartWeights) -> None:
    with pytest.raises(ValueError, match="expected three numbers of 0 or more whose sum is 1"):
        replace(SPEED, weights=weights)


def test_the_page_has_both_errors() -> None:
    slow, plain = slow_run(usual_plan(), 1.25, 1.25), measured_run(usual_plan(), simulate(usual_plan()))
    heads = [{x.heading for x in comparison_table(run).columns} for run in (slow, plain)]
    assert ["equal speed" in x for x in heads] == [True, False]
    assert any("as fast as in the profile" in value for _, value in run_facts(slow))
    step, rate, bubble, peak = (x.equal_speed_error for x in headlines(slow))
    assert [x and x.lstrip("+-") for x in (step, rate, bubble, peak)] == ["0.0 %", "0.0 %", "0.0 points", None]
    assert {x.equal_speed_error for x in headlines(plain)} == {None}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"core_stretch": (1.0,)}, "core_stretch"),
        ({"core_stretch": (1.0, 0.5)}, "core_stretch"),
        (
            {"host_speed": (StepSpeed(first_step=0, end_step=1, ranks=(None,) * 3, compute_s=(1.0,) * 3),)},
            "host_speed has 3 ranks",
        ),
    ],
)
def test_runs_that_contradict_their_plan_are_refused(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        replace(slow_run(usual_plan(), 1.0, 1.0), **changed)
