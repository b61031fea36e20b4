"""Schedules tried out with costs by hand and with those of a plan."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gplan.core import ActionKind, IdleCause, RecomputeMode
from gplan.core.errors import UsageError
from gplan.schedules.registry import every_schedule
from gplan.simulation.schedule_trial import GivenCosts, Trial, given_trial, law_of, plan_trial
from gplan.simulation.simulator import simulate
from tests.scheduled import EVERY_SCHEDULE, OWN, scheduled_plan


def tried(
    name: str, k: int = 4, m: int = 8, *, recompute: RecomputeMode = "never", given: GivenCosts | None = None
) -> Trial:
    return given_trial(name, given or GivenCosts(), num_devices=k, num_microbatches=m, recompute=recompute)


@given(st.sampled_from(every_schedule()), st.integers(1, 6), st.integers(1, 16))
def test_every_schedule_has_the_same_work_on_every_device(name: str, k: int, m: int) -> None:
    assert [x.busy_s for x in tried(name, k, m).devices] == pytest.approx([3.0 * m] * k)


@given(st.sampled_from(every_schedule()), st.integers(1, 6), st.integers(1, 16))
def test_a_law_that_is_given_holds(name: str, k: int, m: int) -> None:
    trial = tried(name, k, m)
    assert trial.law is None or trial.law.bubble == pytest.approx(trial.bubble)


def test_published_laws_are_given_where_they_hold_and_nowhere_else() -> None:
    laws = {name: tried(name, 4, 8).law for name in every_schedule()}
    assert {name: law.formula for name, law in laws.items() if law}.items() >= {
        "gpipe": "(K-1)/(M+K-1)", "1f1b": "(K-1)/(M+K-1)", "eager-1f1b": "(K-1)/(M+K-1)",
        "interleaved-1f1b:2": "(K-1)/(vM+K-1)", "looped-bfs:2": "(K-1)/(vM+K-1)", "zb-h1": "(K-1)/(3M+K-1)",
        "zb-v": "(K-1)/(6M+K-1)",
    }.items()  # fmt: skip
    assert tried("interleaved-1f1b", 4, 7).law is tried("zb-h1", 4, 3).law is tried(OWN, 2, 2).law is None
    published = law_of("interleaved-1f1b:3", 0.125, num_devices=4, num_microbatches=7)
    assert published is not None and published.bubble == 3 / (3 * 7 + 3)


def test_the_most_in_flight_are_those_of_the_schedules_laws() -> None:
    assert [x.most_in_flight for x in tried("gpipe").devices] == [8, 8, 8, 8]
    assert [x.most_in_flight for x in tried("1f1b").devices] == [4, 3, 2, 1]
    assert [x.most_in_flight for x in tried("eager-1f1b").devices] == [7, 5, 3, 1]
    assert [x.most_in_flight for x in tried("zb-h1").devices] == [4, 4, 4, 4]
    assert tried("interleaved-1f1b:2").devices[0].most_in_flight == (2 * 3 + 4 + 1) / 2


def test_one_time_serves_all_devices_others_are_for_a_device_or_a_stage() -> None:
    for given_s, expected in (((2.0,), [1, 1, 1, 1]), ((2.0, 4.0), [1, 2, 1, 2]), ((1.0, 2.0, 3.0, 4.0), [1, 2, 3, 4])):
        trial = tried("interleaved-1f1b:2", 2, 4, given=GivenCosts(forward=given_s))
        assert [x.forward_s for x in trial.costs] == expected


def test_as_many_times_as_neither_devices_nor_stages_are_refused() -> None:
    with pytest.raises(UsageError, match="backward has 3 values; expected 1 or 2, one a device, or 4, one a stage"):
        tried("interleaved-1f1b:2", 2, 4, given=GivenCosts(backward=((1.0, 1.0),) * 3))


def test_halves_link_updates_and_recompute_are_those_that_were_given() -> None:
    given_costs = GivenCosts(backward=((1.5, 0.5),), link=0.25, optimizer=(3.0,))
    timeline = tried("zb-h1", 2, 3, given=given_costs, recompute="always").timeline
    kinds = {kind: timeline.mean_s(kind, stage=1) for kind in ActionKind}
    assert (kinds[ActionKind.INPUT_GRADIENT], kinds[ActionKind.WEIGHT_GRADIENT]) == (2.5, 0.5)
    assert kinds[ActionKind.OPTIMIZER] == 3.0
    assert {x.end_s - x.start_s for x in timeline.transfers} == {0.25}


def test_idle_times_are_those_of_the_bubble() -> None:
    trial = tried("1f1b", given=GivenCosts(link=0.5, forward=(1.0, 1.0, 1.0, 2.0)))
    loop_s = trial.timeline.loop_end_s - trial.timeline.loop_start_s
    causes = [cause for cause in IdleCause if cause is not IdleCause.OPTIMIZER]
    assert trial.idle_s(*causes) == pytest.approx(trial.bubble * 4 * loop_s)


@pytest.mark.parametrize("schedule", EVERY_SCHEDULE)
def test_a_plan_is_tried_as_it_is_simulated(schedule: str) -> None:
    plan = scheduled_plan(schedule)
    trial = plan_trial(plan)
    assert trial.timeline.spans == simulate(plan).spans
    assert tuple(x.peak_bytes for x in trial.devices) == plan.device_peak_bytes


def test_a_plan_under_another_schedule_keeps_its_stages_and_has_no_known_memory() -> None:
    plan = scheduled_plan("gpipe")
    trial = plan_trial(plan, schedule="1f1b", num_microbatches=5)
    assert trial.costs == tuple(stage.cost for stage in plan.stages)
    assert (trial.schedule, trial.num_microbatches, trial.devices[0].peak_bytes) == ("1f1b", 5, None)


def test_a_schedule_that_has_other_stages_is_refused() -> None:
    with pytest.raises(UsageError, match="4 stages on 2 devices, 1f1b has 2; balance anew"):
        plan_trial(scheduled_plan("zb-v"), schedule="1f1b")
    with pytest.raises(UsageError, match="4 stages on 2 devices, looped-bfs:2 has them elsewhere"):
        plan_trial(scheduled_plan("zb-v"), schedule="looped-bfs")


def test_an_order_that_can_never_finish_is_refused() -> None:
    with pytest.raises(UsageError, match="can never finish"):
        tried("custom:0F0 0B0 / 1F0 1B0 2F0 2B0", 2, 1)
