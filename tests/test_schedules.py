"""Laws that hold for every schedule, every K and every M."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gplan.errors import UsageError
from gplan.nouns import Action, ActionKind, StageCost
from gplan.schedules import make_schedule
from gplan.simulator import simulate_schedule

names = st.sampled_from(["gpipe", "1f1b"])
stages = st.integers(1, 8)
microbatches = st.integers(1, 32)


def equal_stage(forward_s: float = 1.0, backward_s: float = 2.0) -> StageCost:
    return StageCost(
        forward_s=forward_s, backward_s=backward_s, recompute_s=0.0, optimizer_s=0.0, activation_bytes=0,
        gradient_bytes=0, activation_s=0.0, gradient_s=0.0,
    )  # fmt: skip


@given(names, stages, microbatches)
def test_every_action_happens_once_on_the_device_of_its_stage(name: str, k: int, m: int) -> None:
    schedule = make_schedule(name, num_devices=k, num_microbatches=m)
    for stage, order in enumerate(schedule.orders):
        wanted = {Action(stage, kind, i) for kind in (ActionKind.FORWARD, ActionKind.BACKWARD) for i in range(m)}
        assert len(order) == len(wanted)
        assert set(order) == wanted


@given(names, stages, microbatches)
def test_the_bubble_of_equal_stages_is_k_minus_1_over_m_plus_k_minus_1(name: str, k: int, m: int) -> None:
    schedule = make_schedule(name, num_devices=k, num_microbatches=m)
    timeline = simulate_schedule(schedule, [equal_stage()] * k, recompute="never")
    assert timeline.bubble == pytest.approx((k - 1) / (m + k - 1), abs=1e-12)
    assert timeline.step_s == pytest.approx(3.0 * (m + k - 1))


def most_in_flight(order: tuple[Action, ...]) -> int:
    level = peak = 0
    for action in order:
        level += 1 if action.kind is ActionKind.FORWARD else -1
        peak = max(peak, level)
    return peak


@given(stages, microbatches)
def test_1f1b_keeps_at_most_k_minus_s_micro_batches_in_flight_and_gpipe_all(k: int, m: int) -> None:
    for stage in range(k):
        one = make_schedule("1f1b", num_devices=k, num_microbatches=m).orders[stage]
        assert most_in_flight(one) == min(m, k - stage)
        assert most_in_flight(make_schedule("gpipe", num_devices=k, num_microbatches=m).orders[stage]) == m


def test_an_unknown_schedule_is_refused_with_the_choices() -> None:
    with pytest.raises(UsageError, match="gpipe, 1f1b, eager-1f1b"):
        make_schedule("2f2b", num_devices=2, num_microbatches=2)


@pytest.mark.parametrize("text", ["3F", "F0", "3X0", "", "3F0 "])
def test_text_that_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="3F0"):
        Action.parse(text)
