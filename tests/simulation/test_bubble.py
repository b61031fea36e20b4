"""The bubble's pieces against the idle time, for every schedule, predicted and measured."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from gplan.core import ActionKind, IdleCause, RecomputeMode, StageCost, Timeline
from gplan.schedules.dependencies import dependencies_of
from gplan.schedules.registry import make_schedule
from gplan.simulation.bubble import idle_by_cause, idle_by_device, idle_pieces
from gplan.simulation.simulator import simulate_schedule, timeline_of
from tests.scheduled import OWN

EVERY = ("gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b:2", "interleaved-1f1b:3", "looped-bfs:2", "zb-h1", "zb-v")
LOOP_CAUSES = tuple(cause for cause in IdleCause if cause is not IdleCause.OPTIMIZER)

schedules = st.sampled_from(EVERY)
seconds = st.floats(0.1, 20.0)
modes = st.sampled_from(("never", "always", "except-last"))


def stage_cost(
    forward_s: float = 1.0, first_s: float = 1.0, second_s: float = 1.0, hop_s: float = 0.0, optimizer_s: float = 0.0
) -> StageCost:
    return StageCost(
        forward_s=forward_s, backward_s=first_s + second_s, recompute_s=forward_s, optimizer_s=optimizer_s,
        activation_bytes=1, gradient_bytes=1, activation_s=hop_s, gradient_s=hop_s, input_gradient_s=first_s,
        weight_gradient_s=second_s,
    )  # fmt: skip


def engine_taking(cost: StageCost, gap_s: float, forward_s: float, backward_s: float) -> StageCost:
    return replace(cost, gap_s=gap_s, forward_sending_s=forward_s, backward_sending_s=backward_s)


def equal_step(
    name: str, k: int, m: int, cost: StageCost | None = None, *, recompute: RecomputeMode = "never"
) -> Timeline:
    schedule = make_schedule(name, num_devices=k, num_microbatches=m)
    return simulate_schedule(schedule, [cost or stage_cost()] * schedule.num_stages, recompute=recompute)


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """A step with stages, transfers and updates that differ; every action of a measured one differs."""
    name = draw(st.sampled_from((*EVERY, OWN)))
    k, m = (2, 2) if name == OWN else (draw(st.integers(1, 4)), draw(st.integers(1, 9)))
    schedule = make_schedule(name, num_devices=k, num_microbatches=m)
    made = st.builds(stage_cost, seconds, seconds, seconds, st.floats(0, 5), st.floats(0, 5))
    gaps = st.tuples(*[st.sampled_from([0.0, 0.3])] * 3)
    costs = [engine_taking(draw(made), *draw(gaps)) for _ in range(schedule.num_stages)]
    if draw(st.booleans()):
        return simulate_schedule(schedule, costs, recompute=draw(modes))
    chance = draw(st.randoms(use_true_random=False))
    return timeline_of(schedule, costs, duration_s=lambda _: chance.uniform(0.1, 3.0), origin="measured")


@given(timelines())
def test_the_causes_but_the_optimizer_and_the_updates_in_the_loop_add_up_to_the_bubble(timeline: Timeline) -> None:
    loop_end_s = timeline.loop_end_s
    idle_s = timeline.bubble * timeline.num_devices * (loop_end_s - timeline.loop_start_s)
    updates = [x for x in timeline.spans if x.action.kind is ActionKind.OPTIMIZER]
    inside_s = sum(max(0.0, min(x.end_s, loop_end_s) - x.start_s) for x in updates)
    found = idle_by_cause(timeline)
    assert sum(found[cause] for cause in LOOP_CAUSES) + inside_s == pytest.approx(idle_s, abs=1e-6)


@given(timelines())
def test_all_causes_add_up_to_the_idle_time_of_each_device(timeline: Timeline) -> None:
    for device, idle in enumerate(idle_by_device(timeline)):
        assert sum(idle.values()) == pytest.approx(timeline.idle_s(device), abs=1e-6)


@given(timelines())
def test_no_piece_overlaps_what_its_device_does_or_another_piece(timeline: Timeline) -> None:
    for device in range(timeline.num_devices):
        taken = sorted((x.start_s, x.end_s) for x in (*idle_pieces(timeline), *timeline.spans) if x.device == device)
        assert all(end <= start + 1e-9 for (_, end), (start, _) in pairwise(taken))


@given(schedules, st.integers(1, 8), st.integers(1, 32), modes, st.floats(0.1, 3), st.floats(0.1, 3), st.floats(0.1, 3))
def test_equal_stages_and_free_transfers_leave_no_imbalance_and_no_communication(
    name: str, k: int, m: int, recompute: RecomputeMode, forward_s: float, first_s: float, second_s: float
) -> None:
    found = idle_by_cause(equal_step(name, k, m, stage_cost(forward_s, first_s, second_s), recompute=recompute))
    assert found[IdleCause.IMBALANCE] == found[IdleCause.COMMUNICATION] == 0.0


@given(schedules, st.integers(1, 5), st.integers(1, 12), st.floats(0, 3))
def test_equal_stages_leave_no_imbalance_whatever_transfers_take(name: str, k: int, m: int, hop_s: float) -> None:
    assert idle_by_cause(equal_step(name, k, m, stage_cost(hop_s=hop_s)))[IdleCause.IMBALANCE] == 0.0


@given(timelines())
def test_communication_is_only_while_the_awaited_input_is_in_transfer(timeline: Timeline) -> None:
    num_stages = 1 + max(x.action.stage for x in timeline.loop_spans)
    needs = dependencies_of([x.action for x in timeline.loop_spans], num_stages)
    sent = {(x.action, x.target): x for x in timeline.transfers}
    for piece in idle_pieces(timeline):
        if piece.cause is IdleCause.COMMUNICATION:
            after = min(
                (x for x in timeline.loop_spans if x.device == piece.device and x.start_s >= piece.end_s - 1e-9),
                key=lambda x: (x.start_s, x.end_s),
            )
            transfer = sent[needs[after.action], piece.device]
            assert transfer.start_s - 1e-9 <= piece.start_s <= piece.end_s <= transfer.end_s + 1e-9


def test_a_wait_for_a_transfer_is_told_from_the_wait_before_it() -> None:
    """Device 1 waits 1 s for the forward and 3 s for its way; device 0 5 s for device 1 and 3 s for the way back."""
    found = idle_by_device(equal_step("gpipe", 2, 1, stage_cost(1.0, 0.5, 0.5, hop_s=3.0)))
    assert found[1][IdleCause.WARM_UP] == 1.0
    assert [idle[IdleCause.COMMUNICATION] for idle in found] == [3.0, 3.0]


def test_gpipe_fills_until_the_first_backward_and_drains_after_the_last() -> None:
    found = idle_by_device(equal_step("gpipe", 3, 4))
    assert [(x[IdleCause.WARM_UP], x[IdleCause.DRAIN]) for x in found] == [(6.0, 0.0), (4.0, 2.0), (2.0, 4.0)]


def test_1f1b_drains_between_its_last_backwards() -> None:
    found = idle_by_device(equal_step("1f1b", 3, 8))
    assert [(x[IdleCause.WARM_UP], x[IdleCause.DRAIN]) for x in found] == [(4.0, 2.0), (3.0, 3.0), (2.0, 4.0)]


def test_a_slow_stage_is_imbalance_on_the_others_and_none_on_itself() -> None:
    costs = [stage_cost(), stage_cost(2.0, 2.0, 2.0), stage_cost()]
    schedule = make_schedule("gpipe", num_devices=3, num_microbatches=10)
    found = idle_by_device(simulate_schedule(schedule, costs, recompute="never"))
    assert found[1][IdleCause.IMBALANCE] == 0.0
    assert min(found[i][IdleCause.IMBALANCE] for i in (0, 2)) > 9 * 3.0 * 0.9


@pytest.mark.parametrize("name", ["zb-h1", "zb-v"])
def test_a_first_stage_that_takes_twice_as_long_is_imbalance_though_its_halves_are_divided_otherwise(name: str) -> None:
    schedule = make_schedule(name, num_devices=2, num_microbatches=8)
    costs = [stage_cost(2.0, 2.0, 2.0), *[stage_cost()] * (schedule.num_stages - 1)]
    found = idle_by_cause(simulate_schedule(schedule, costs, recompute="never"))
    assert found[IdleCause.IMBALANCE] > found[IdleCause.WARM_UP] + found[IdleCause.DRAIN]


def test_the_second_half_of_a_backward_never_waits_for_what_its_first_half_sends() -> None:
    timeline = equal_step("zb-h1", 3, 4, stage_cost(hop_s=50.0))
    waiting = [x for x in idle_pieces(timeline) if x.cause is IdleCause.COMMUNICATION]
    ended = {(x.device, x.start_s) for x in timeline.loop_spans if x.action.kind is not ActionKind.WEIGHT_GRADIENT}
    assert waiting
    assert {(x.device, x.end_s) for x in waiting} <= ended


def test_after_the_loop_devices_wait_for_the_last_update() -> None:
    costs = [stage_cost(1.0, 0.5, 0.5, optimizer_s=5.0), stage_cost(1.0, 0.5, 0.5, optimizer_s=2.0)]
    schedule = make_schedule("gpipe", num_devices=2, num_microbatches=1)
    timeline = simulate_schedule(schedule, costs, recompute="never")
    found = idle_by_device(timeline)
    assert (timeline.loop_end_s, timeline.step_s) == (4.0, 9.0)
    assert found[0][IdleCause.OPTIMIZER] == 0.0
    assert found[1][IdleCause.OPTIMIZER] == 4.0  # its own update takes 3 to 5, the first second of it in the loop
    assert found[1][IdleCause.DRAIN] == 0.0


def test_a_pause_before_the_first_forward_is_no_part_of_the_step() -> None:
    timeline = equal_step("1f1b", 2, 3)
    later = replace(
        timeline,
        spans=tuple(structs.replace(x, start_s=x.start_s + 7, end_s=x.end_s + 7) for x in timeline.spans),
        transfers=tuple(structs.replace(x, start_s=x.start_s + 7, end_s=x.end_s + 7) for x in timeline.transfers),
    )
    assert idle_by_cause(later) == idle_by_cause(timeline)


def test_pieces_come_by_device_then_by_time() -> None:
    pieces = idle_pieces(equal_step("zb-v", 3, 5, stage_cost(hop_s=0.3, optimizer_s=1.0)))
    assert [(x.device, x.start_s) for x in pieces] == sorted((x.device, x.start_s) for x in pieces)
    assert {x.cause for x in pieces} > {IdleCause.WARM_UP, IdleCause.COMMUNICATION, IdleCause.OPTIMIZER}
