"""Laws that hold for every schedule, every K and every M, and what each docstring says of its own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gplan.core import Action, Schedule, StageCost
from gplan.schedules.dependencies import check_orders, dependencies_of, execution_order
from gplan.schedules.registry import SCHEDULES, make_schedule, num_stages_of, schedule_info, stage_devices
from gplan.simulation.simulator import simulate_schedule, step_and_bubble
from tests.schedules.made import (
    BACKWARD,
    FORWARD,
    INPUT,
    NAMES,
    WEIGHT,
    cost,
    most_in_flight,
    num_chunks,
    num_devices,
    num_microbatches,
    schedules,
)

some_seconds = st.integers(1, 6).map(float)


def made(name: str, k: int, m: int) -> Schedule:
    return make_schedule(name, num_devices=k, num_microbatches=m)


def step_s(name: str, k: int, m: int, stage: StageCost) -> float:
    schedule = made(name, k, m)
    return step_and_bubble(schedule, [stage] * schedule.num_stages, recompute="never")[0]


def bubble(name: str, k: int, m: int, stage: StageCost | None = None) -> float:
    schedule = made(name, k, m)
    return simulate_schedule(schedule, [stage or cost()] * schedule.num_stages, recompute="never").bubble


@given(st.sampled_from(NAMES), num_devices, num_microbatches)
def test_every_action_happens_once_on_the_device_of_its_stage(name: str, k: int, m: int) -> None:
    schedule = made(name, k, m)
    kinds = (FORWARD, INPUT, WEIGHT) if schedule_info(name).splits_backward else (FORWARD, BACKWARD)
    for device, order in enumerate(schedule.orders):
        wanted = {Action(s, kind, i) for s in schedule.stages_of(device) for kind in kinds for i in range(m)}
        assert len(order) == len(wanted)
        assert set(order) == wanted


@given(st.sampled_from(NAMES), num_devices, num_microbatches)
def test_stages_go_round_the_devices_or_down_and_up_again(name: str, k: int, m: int) -> None:
    schedule = made(name, k, m)
    assert schedule.num_stages == num_stages_of(name, k) == schedule_info(name).num_chunks * k
    assert stage_devices(name, num_devices=k) == schedule.devices
    turns_back = SCHEDULES[name.partition(":")[0]].turns_back
    v_shaped = [*range(k), *reversed(range(k))]
    assert list(schedule.devices) == (v_shaped if turns_back else [s % k for s in range(schedule.num_stages)])


@given(schedules)
def test_every_action_comes_after_what_it_needs_and_none_waits_forever(schedule: Schedule) -> None:
    flow, done = execution_order(schedule), set[tuple[int, str, int]]()
    last = schedule.num_stages - 1
    for action in flow:
        stage, m = action.stage, action.microbatch
        if action.kind is FORWARD:
            assert stage == 0 or (stage - 1, "F", m) in done
        elif action.kind is WEIGHT:
            assert (stage, "I", m) in done
        else:
            assert (stage, "F", m) in done
            assert stage == last or {(stage + 1, "B", m), (stage + 1, "I", m)} & done
        done.add((stage, action.kind.value, m))
    assert sorted(flow) == sorted(x for order in schedule.orders for x in order)


@given(schedules)
def test_the_flow_keeps_the_order_of_every_device(schedule: Schedule) -> None:
    flow = execution_order(schedule)
    for device, order in enumerate(schedule.orders):
        assert order == tuple(x for x in flow if schedule.devices[x.stage] == device)


@given(schedules)
def test_the_flow_has_what_an_action_needs_before_it(schedule: Schedule) -> None:
    flow = execution_order(schedule)
    needs, places = dependencies_of(flow, schedule.num_stages), {x: place for place, x in enumerate(flow)}
    for place, action in enumerate(flow):
        need = needs.get(action)
        assert need is None or places[need] < place
        assert (need is None) == (action.kind is FORWARD and action.stage == 0)
        assert need is None or need.microbatch == action.microbatch


@given(schedules)
def test_what_a_rule_makes_can_be_carried_out(schedule: Schedule) -> None:
    found = check_orders(schedule.orders)
    assert found.orders == schedule.orders
    assert (found.num_stages, found.num_microbatches) == (schedule.num_stages, schedule.num_microbatches)


@given(num_devices, num_microbatches)
def test_1f1b_keeps_k_minus_s_micro_batches_in_flight_eager_almost_twice_as_many_and_gpipe_all(k: int, m: int) -> None:
    for stage in range(k):
        assert most_in_flight(made("gpipe", k, m), stage) == m
        assert most_in_flight(made("1f1b", k, m), stage) == min(m, k - stage)
        assert most_in_flight(made("1f1b-cap:2", k, m), stage) == min(m, 2, k - stage)
        assert most_in_flight(made("eager-1f1b", k, m), stage) == min(m, 2 * (k - stage) - 1)


@given(num_devices, num_microbatches, num_chunks)
def test_looped_bfs_keeps_every_micro_batch_of_every_chunk_in_flight(k: int, m: int, v: int) -> None:
    schedule = made(f"looped-bfs:{v}", k, m)
    for device in range(k):
        assert most_in_flight(schedule, device) == v * m
        for stage in schedule.stages_of(device):
            assert most_in_flight(schedule, device, lambda x, stage=stage: x.stage == stage) == m


@given(num_devices, num_microbatches, st.integers(2, 4))
def test_interleaved_1f1b_keeps_no_more_in_flight_than_its_warm_up_and_one(k: int, m: int, v: int) -> None:
    for device in range(k):
        most = 2 * (k - device - 1) + (v - 1) * k + 1
        found = most_in_flight(made(f"interleaved-1f1b:{v}", k, m), device)
        assert found <= min(most, v * m)
        assert found == min(most, v * m) or m % k


@given(num_devices, st.integers(2, 4))
def test_interleaved_1f1b_keeps_a_share_k_minus_1_over_k_v_more_than_1f1b(k: int, v: int) -> None:
    pairs = most_in_flight(made(f"interleaved-1f1b:{v}", k, 4 * k), 0)
    assert pairs / v == pytest.approx(k * (1 + (k - 1) / (k * v)))


@given(num_devices, num_microbatches)
def test_zb_h1_keeps_on_every_stage_what_1f1b_keeps_on_the_first(k: int, m: int) -> None:
    for stage in range(k):
        assert most_in_flight(made("zb-h1", k, m), stage) == min(m, k)


@given(num_devices, num_microbatches)
def test_zb_v_keeps_on_every_device_what_1f1b_keeps_on_the_first(k: int, m: int) -> None:
    for device in range(k):
        found = most_in_flight(made("zb-v", k, m), device)
        assert found <= 2 * min(k, m)
        assert found == 2 * k or m < 2 * k - 1


@given(num_devices, num_microbatches)
def test_one_chunk_is_the_schedule_without_chunks(k: int, m: int) -> None:
    assert made("looped-bfs:1", k, m).orders == made("gpipe", k, m).orders
    assert made("interleaved-1f1b:1", k, m).orders == made("1f1b", k, m).orders


@given(st.sampled_from(["gpipe", "1f1b", "eager-1f1b"]), num_devices, num_microbatches, some_seconds, some_seconds)
def test_the_bubble_of_equal_stages_is_k_minus_1_over_m_plus_k_minus_1(
    name: str, k: int, m: int, forward_s: float, half_s: float
) -> None:
    stage = cost(forward_s, half_s, half_s)
    assert bubble(name, k, m, stage) == pytest.approx((k - 1) / (m + k - 1), abs=1e-12)
    assert step_s(name, k, m, stage) == pytest.approx((forward_s + 2 * half_s) * (m + k - 1))


@given(num_devices, st.integers(1, 4), num_chunks)
def test_interleaving_divides_the_bubble_by_the_chunks_where_k_divides_m(k: int, groups: int, v: int) -> None:
    m = groups * k
    assert bubble(f"interleaved-1f1b:{v}", k, m) == pytest.approx((k - 1) / (v * m + k - 1), abs=1e-12)


@given(num_devices, st.integers(0, 24), num_chunks)
def test_looped_bfs_divides_the_bubble_by_the_chunks_from_k_micro_batches_on(k: int, more: int, v: int) -> None:
    m = k + more
    assert bubble(f"looped-bfs:{v}", k, m) == pytest.approx((k - 1) / (v * m + k - 1), abs=1e-12)


@given(num_devices, st.integers(0, 24))
def test_zb_h1_has_a_third_of_the_bubble_from_k_micro_batches_on(k: int, more: int) -> None:
    m = k + more
    assert bubble("zb-h1", k, m) == pytest.approx((k - 1) / (3 * m + k - 1), abs=1e-12)


@given(num_devices, st.integers(0, 24), some_seconds, some_seconds, some_seconds)
def test_zb_h1_waits_f_and_i_less_the_shortest_of_the_three_for_each_other_stage(
    k: int, more: int, f: float, i: float, w: float
) -> None:
    waits_s = (k - 1) * (f + i - min(f, i, w))
    assert step_s("zb-h1", k, k + more, cost(f, i, w)) == pytest.approx((k + more) * (f + i + w) + waits_s)


@given(num_devices, st.integers(0, 24))
def test_zb_v_waits_only_at_both_ends_from_2_k_minus_1_micro_batches_on(k: int, more: int) -> None:
    m = 2 * k - 1 + more
    assert bubble("zb-v", k, m) == pytest.approx((k - 1) / (6 * m + k - 1), abs=1e-12)


@given(num_devices, st.integers(0, 24), some_seconds, some_seconds, some_seconds)
def test_zb_v_waits_no_longer_as_m_grows(k: int, more: int, f: float, i: float, w: float) -> None:
    fewest, stage = 2 * k - 1, cost(f, i, w)
    longer_s = step_s("zb-v", k, fewest + more, stage) - step_s("zb-v", k, fewest, stage)
    assert longer_s == pytest.approx(more * 2 * (f + i + w))


@given(st.integers(2, 5), some_seconds, some_seconds, st.integers(0, 9).map(float))
def test_transfers_make_1f1b_slower_and_eager_1f1b_not_while_it_hides_them(
    k: int, forward_s: float, half_s: float, hop_s: float
) -> None:
    stage, total_s = cost(forward_s, half_s, half_s, hop_s=hop_s), forward_s + 2 * half_s
    assert period_s("1f1b", k, stage) == pytest.approx(total_s + 2 * hop_s * (k - 1) / k)
    hidden = 2 * hop_s <= total_s
    assert (period_s("eager-1f1b", k, stage) == pytest.approx(total_s)) == hidden


def period_s(name: str, k: int, stage: StageCost) -> float:
    """How much longer the step is for each of many more micro-batches."""
    more = k * (2 * k - 1)
    return (step_s(name, k, 9 * k + more, stage) - step_s(name, k, 9 * k, stage)) / more
