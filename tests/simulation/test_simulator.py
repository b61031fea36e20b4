"""The simulator against closed forms and against a story of events."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gplan
from gplan.core import RECOMPUTE_MODES, Action, ActionKind, RecomputeMode, Schedule, StageCost
from gplan.schedules.dependencies import dependencies_of
from gplan.schedules.registry import make_schedule
from gplan.simulation.simulator import dependency_order, equal_bubble, simulate, simulate_schedule, step_and_bubble
from tests.events import Step
from tests.made import make_profile
from tests.schedules.made import schedules

seconds = st.integers(1, 20).map(float)


def stage_cost(forward_s: float, backward_s: float, hop_s: float = 0.0, optimizer_s: float = 0.0) -> StageCost:
    return StageCost(
        forward_s=forward_s, backward_s=backward_s, recompute_s=forward_s, optimizer_s=optimizer_s,
        activation_bytes=1, gradient_bytes=1, activation_s=hop_s, gradient_s=hop_s,
    )  # fmt: skip


stage_costs = st.lists(st.builds(stage_cost, seconds, seconds, st.integers(0, 5).map(float)), min_size=1, max_size=6)
microbatches = st.integers(1, 12)


@given(stage_costs, microbatches)
def test_gpipe_equals_its_closed_form(costs: list[StageCost], m: int) -> None:
    schedule = make_schedule("gpipe", num_devices=len(costs), num_microbatches=m)
    forward, backward = [x.forward_s for x in costs], [x.backward_s for x in costs]
    there, back = [x.activation_s for x in costs[:-1]], [x.gradient_s for x in costs[:-1]]  # links are like stages
    expected = sum(sum(x) + (m - 1) * max(x) for x in (forward + there, backward + back))
    assert simulate_schedule(schedule, costs, recompute="never").step_s == pytest.approx(expected)


@given(stage_costs, microbatches)
def test_gpipe_with_recompute_is_gpipe_with_longer_backwards(costs: list[StageCost], m: int) -> None:
    schedule = make_schedule("gpipe", num_devices=len(costs), num_microbatches=m)
    longer = [stage_cost(x.forward_s, x.backward_s + x.forward_s, x.activation_s) for x in costs]
    found = simulate_schedule(schedule, costs, recompute="always").step_s
    assert found == pytest.approx(simulate_schedule(schedule, longer, recompute="never").step_s)


@given(stage_costs, microbatches)
def test_1f1b_takes_at_least_what_each_stage_and_its_way_there_take(costs: list[StageCost], m: int) -> None:
    total, hop = totals(costs)
    lower = max(m * total[s] + sum(total[:s]) + sum(hop[:s]) for s in range(len(costs)))
    assert step_of_1f1b(costs, m) >= lower - 1e-9


@given(stage_costs, st.sampled_from([1, 2, 5, 12, 60, 200]))
def test_1f1b_goes_at_the_pace_of_its_slowest_run_of_stages(costs: list[StageCost], m: int) -> None:
    """Stages i to j that wait for each other need all their time once in j - i + 1 micro-batches;
    K of them to settle."""
    total, hop = totals(costs)
    k = len(costs)
    period = max((sum(total[i : j + 1]) + sum(hop[i:j])) / (j - i + 1) for i in range(k) for j in range(i, k))
    step_s = step_of_1f1b(costs, m)
    assert (m - k) * period - 1e-9 <= step_s <= sum(total) + sum(hop) + (m - 1 + k) * period + 1e-9


def totals(costs: list[StageCost]) -> tuple[list[float], list[float]]:
    """Forward and backward of each stage, and of each hop."""
    return [x.forward_s + x.backward_s for x in costs], [x.activation_s + x.gradient_s for x in costs[:-1]]


def step_of_1f1b(costs: list[StageCost], m: int) -> float:
    schedule = make_schedule("1f1b", num_devices=len(costs), num_microbatches=m)
    return simulate_schedule(schedule, costs, recompute="never").step_s


def test_in_1f1b_the_place_of_the_bottleneck_matters() -> None:
    schedule = make_schedule("1f1b", num_devices=4, num_microbatches=8)
    steps = []
    for slow in range(4):
        costs = [stage_cost(1.0, 2.0) if s != slow else stage_cost(1.5, 3.0) for s in range(4)]
        steps.append(simulate_schedule(schedule, costs, recompute="never").step_s)
    assert steps == [40.5, 42.0, 43.5, 45.0]


def test_the_step_ends_with_the_slowest_optimizer() -> None:
    costs = [stage_cost(1.0, 1.0, optimizer_s=5.0), stage_cost(1.0, 1.0, optimizer_s=0.0)]
    timeline = simulate_schedule(make_schedule("gpipe", num_devices=2, num_microbatches=1), costs, recompute="never")
    assert (timeline.loop_end_s, timeline.step_s) == (4.0, 9.0)


def perhaps_split(schedule: Schedule, share: float, rng: random.Random) -> Schedule:
    """The schedule with a share of its whole backwards in halves, one after the other."""
    halves = ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT

    def parts(action: Action) -> list[Action]:
        is_split = action.kind is ActionKind.BACKWARD and rng.random() < share
        return [Action(action.stage, kind, action.microbatch) for kind in halves] if is_split else [action]

    orders = tuple(tuple(part for action in order for part in parts(action)) for order in schedule.orders)
    return replace(schedule, orders=orders)


def uneven_cost(rng: random.Random) -> StageCost:
    f, i, w, hop, back, again, update, reduce = (float(rng.randrange(10)) for _ in range(8))
    return replace(
        stage_cost(f, i + w), input_gradient_s=i, weight_gradient_s=w, activation_s=hop, gradient_s=back,
        recompute_s=again, optimizer_s=update, all_reduce_s=reduce,
    )  # fmt: skip


@given(schedules, st.sampled_from([0.0, 0.3]), st.sampled_from(RECOMPUTE_MODES), st.integers(0, 9999))
@settings(max_examples=60)
def test_the_timeline_is_that_of_a_story_of_events(
    schedule: Schedule, share: float, recompute: RecomputeMode, seed: int
) -> None:
    rng = random.Random(seed)
    schedule = perhaps_split(schedule, share, rng)
    costs = [uneven_cost(rng) for _ in range(schedule.num_stages)]
    timeline = simulate_schedule(schedule, costs, recompute=recompute)
    num_kept = {"never": schedule.num_microbatches, "except-last": 1}.get(recompute, 0)
    told = Step(schedule.orders, costs, set(range(schedule.num_microbatches - num_kept))).run()
    assert {x.action: (x.start_s, x.end_s) for x in timeline.spans} == told.spans
    assert {x.action: (x.source, x.target, x.start_s, x.end_s) for x in timeline.transfers} == told.sent
    assert (len(timeline.spans), len(timeline.transfers)) == (len(told.spans), len(told.sent))
    found = step_and_bubble(schedule, costs, recompute=recompute)
    assert found == (timeline.step_s, pytest.approx(timeline.bubble, abs=1e-12))


def test_spans_lie_by_device_then_by_start_and_optimizers_at_the_end() -> None:
    schedule = make_schedule("zb-v", num_devices=2, num_microbatches=3)
    spans = simulate_schedule(schedule, [split_cost(optimizer_s=4.0)] * 4, recompute="never").spans
    loop, updates = spans[:-4], spans[-4:]
    assert list(loop) == sorted(loop, key=lambda x: (x.device, x.start_s))
    assert [str(x.action) for x in updates] == ["0O0", "3O0", "1O0", "2O0"]
    assert updates[0].start_s == loop[17].end_s
    assert updates[1].start_s == updates[0].end_s == updates[0].start_s + 4.0


def split_cost(hop_s: float = 0.0, optimizer_s: float = 0.0) -> StageCost:
    return replace(stage_cost(1.0, 2.0, hop_s, optimizer_s), input_gradient_s=1.0, weight_gradient_s=1.0)


def test_neighbours_on_one_device_send_nothing() -> None:
    """In ZB-V the last device holds both stages in the middle."""
    schedule = make_schedule("zb-v", num_devices=3, num_microbatches=4)
    transfers = simulate_schedule(schedule, [split_cost(hop_s=1.0)] * 6, recompute="never").transfers
    assert {(x.source, x.target) for x in transfers} == {(0, 1), (1, 2), (2, 1), (1, 0)}
    assert len(transfers) == 4 * 2 * 4
    alone = make_schedule("looped-bfs:3", num_devices=1, num_microbatches=4)
    assert simulate_schedule(alone, [split_cost(hop_s=1.0)] * 3, recompute="never").transfers == ()


def test_transfers_carry_the_bytes_of_the_cut_that_they_cross() -> None:
    costs = [replace(stage_cost(1.0, 1.0), activation_bytes=10 * s, gradient_bytes=s) for s in (1, 2, 3)]
    timeline = simulate_schedule(make_schedule("1f1b", num_devices=3, num_microbatches=1), costs, recompute="never")
    assert {str(x.action): x.num_bytes for x in timeline.transfers} == {"0F0": 10, "1F0": 20, "2B0": 2, "1B0": 1}


def test_half_a_backward_whose_time_is_not_known_is_refused() -> None:
    schedule = make_schedule("zb-h1", num_devices=2, num_microbatches=1)
    with pytest.raises(ValueError, match="1I is half a backward, and how long the halves take is not known"):
        simulate_schedule(schedule, [stage_cost(1.0, 2.0)] * 2, recompute="never")


@given(stage_costs, microbatches, st.sampled_from(["gpipe", "1f1b"]), st.sampled_from(["never", "always"]))
def test_the_ideal_bubble_of_gpipe_and_1f1b_does_not_depend_on_the_costs(
    costs: list[StageCost], m: int, name: str, recompute: RecomputeMode
) -> None:
    k = len(costs)
    found = equal_bubble(make_schedule(name, num_devices=k, num_microbatches=m), costs, recompute=recompute)
    assert found == pytest.approx((k - 1) / (m + k - 1), abs=1e-12)


@given(st.integers(1, 6), st.integers(0, 6), st.sampled_from(["never", "always"]), seconds, seconds, seconds)
def test_the_ideal_bubble_of_zb_h1_is_that_of_equal_stages_although_the_first_does_not_split(
    k: int, more: int, recompute: RecomputeMode, f: float, i: float, w: float
) -> None:
    """The first stage was measured with all of its backward in the second half;
    a recompute takes what a forward takes."""
    first = replace(stage_cost(f, i + w), input_gradient_s=0.0, weight_gradient_s=i + w)
    others = [replace(stage_cost(f, i + w), input_gradient_s=i, weight_gradient_s=w)] * (k - 1)
    m = k + more
    schedule = make_schedule("zb-h1", num_devices=k, num_microbatches=m)
    i += f if recompute == "always" else 0.0
    waits_s = (k - 1) * (f + i - min(f, i, w))
    found = equal_bubble(schedule, [first, *others], recompute=recompute)
    assert found == pytest.approx(waits_s / (m * (f + i + w) + waits_s), abs=1e-9)


def test_the_ideal_bubble_needs_no_halves_where_no_backward_is_split() -> None:
    costs = [split_cost(), stage_cost(3.0, 2.0)]
    schedule = make_schedule("1f1b", num_devices=2, num_microbatches=3)
    assert equal_bubble(schedule, costs, recompute="never") == pytest.approx(1 / 4)
    split = make_schedule("zb-h1", num_devices=2, num_microbatches=3)
    with pytest.raises(ValueError, match="how long the halves take is not known"):
        equal_bubble(split, costs, recompute="never")


@given(schedules)
def test_one_device_can_run_the_dependency_order(schedule: Schedule) -> None:
    done: set[Action] = set()
    order = dependency_order(schedule)
    needs = dependencies_of(order, schedule.num_stages)
    for action in order:
        assert action not in needs or needs[action] in done
        done.add(action)
    assert len(done) == len(order) == sum(map(len, schedule.orders))


def test_an_order_that_deadlocks_is_named() -> None:
    backward_first = (Action(0, ActionKind.BACKWARD, 0), Action(0, ActionKind.FORWARD, 0))
    schedule = Schedule(name="mine", num_stages=1, num_microbatches=1, orders=(backward_first,))
    with pytest.raises(ValueError, match="mine can never finish: device 0 waits at 0B0 for 0F0"):
        simulate_schedule(schedule, [stage_cost(1.0, 1.0)], recompute="never")


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("recompute", ["never", "always", "except-last"])
def test_step_and_bubble_without_the_timeline_are_those_of_the_timeline(schedule: str, recompute: str) -> None:
    plan = gplan.balance(
        make_profile([1.1, 2.3, 0.7, 3.1], optimizer_s=0.3, overhead_s=0.05, output_bytes=3, weight_bytes=7),
        num_devices=3, num_microbatches=5, schedule=schedule, recompute=recompute,
    )  # fmt: skip
    timeline = simulate(plan)
    made = make_schedule(schedule, num_devices=3, num_microbatches=5)
    found = step_and_bubble(made, [stage.cost for stage in plan.stages], recompute=plan.recompute)
    assert found == (timeline.step_s, pytest.approx(timeline.bubble, abs=1e-15))
