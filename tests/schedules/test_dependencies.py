"""Orders that are no training step, each refused with what is wrong; what actions wait for."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gplan.core import Action, Schedule
from gplan.schedules.dependencies import OrderError, check_orders, dependencies_of, execution_order
from gplan.schedules.registry import make_schedule
from tests.schedules.made import NAMES


def orders_of(*lines: str) -> list[list[Action]]:
    return [[Action.parse(word) for word in line.split()] for line in lines]


WRONG = {
    "a device has nothing to do": (["0F0 0B0", ""], "device 1 has no actions", 1),
    "an action is there twice": (["0F0 0B0 0F0"], "0F0 appears 2 times; expected every action once", 0),
    "a stage is on two devices": (["0F0 1F0 1B0", "0B0"], "0B0 is on device 1, other actions of stage 0 are on device 0", 1),
    "a stage is left out": (["0F0 0B0", "2F0 2B0"], "stage 1 has no actions, but stage 2 has", None),
    "the first stage is left out": (["1F0 1B0"], "stage 0 has no actions, but stage 1 has", None),
    "a forward is missing": (["0F0 0B0 0B1"], "0F1 is missing; expected a forward of every micro-batch", 0),
    "a backward is missing": (["0F0 0F1 0B1"], "stage 0 has no backward for micro-batch 0; expected only 0B0, or", 0),
    "a micro-batch is missing on one stage": (["0F0 0F1 0B0 0B1", "1F0 1B0"], "1F1 is missing", 1),
    "B and I are both there": (["0F0 0B0 0I0"], "stage 0 has 0B0 and 0I0 for micro-batch 0; expected only 0B0", 0),
    "B and W are both there": (["0F0 0B0 0W0"], "stage 0 has 0B0 and 0W0 for micro-batch 0", 0),
    "all three are there": (["0F0 0I0 0W0 0B0"], "stage 0 has 0B0 and 0I0 and 0W0", 0),
    "an I is without its W": (["0F0 0I0"], "stage 0 has 0I0 for micro-batch 0; expected only 0B0, or 0I0 and 0W0", 0),
    "a W is without its I": (["0F0 0W0"], "stage 0 has 0W0 for micro-batch 0", 0),
    "W comes before I": (["0F0 0W0 0I0"], "0W0 comes before 0I0; expected it after", 0),
    "a backward comes before its forward": (["0B0 0F0"], "0B0 comes before 0F0; expected it after", 0),
    "a half comes before its forward": (["0I0 0F0 0W0"], "0I0 comes before 0F0", 0),
    "a stage number is huge": (["0F0 0B0 999999999F0 999999999B0"], "stage 1 has no actions, but stage 999999999 has", None),
    "a micro-batch number is huge": (["0F0 0B0 0F999999999 0B999999999"], "0F1 is missing", 0),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_orders_that_are_no_step_are_refused(case: str) -> None:
    lines, message, device = WRONG[case]
    with pytest.raises(OrderError) as caught:
        check_orders(orders_of(*lines))
    assert message in str(caught.value)
    assert caught.value.device == device


def test_devices_that_wait_for_each_other_are_named_with_what_they_wait_for() -> None:
    """Device 0 wants its backward before the forward that device 1 begins with."""
    with pytest.raises(OrderError) as caught:
        check_orders(orders_of("0F0 0B0 0F1 0B1", "1F1 1F0 1B0 1B1"))
    assert str(caught.value) == (
        "the order can never finish: device 0 waits at 0B0 for 1B0, device 1 waits at 1F1 for 0F1; "
        "expected the awaited actions earlier in the order"
    )
    assert caught.value.device is None


def test_a_device_can_wait_for_itself_forever() -> None:
    with pytest.raises(OrderError, match="device 0 waits at 1F0 for 0F0"):
        check_orders(orders_of("1F0 0F0 1B0 0B0"))


def test_a_stage_waits_for_the_half_that_the_next_one_has() -> None:
    with pytest.raises(OrderError, match="device 0 waits at 0B0 for 1I0, device 1 waits at 1F1 for 0F1"):
        check_orders(orders_of("0F0 0B0 0F1 0B1", "1F0 1F1 1I0 1W0 1B1"))


def test_whole_and_split_backwards_may_be_mixed_by_stage_and_by_micro_batch() -> None:
    orders = orders_of("0F0 0F1 2F0 2B0 2F1 2I1 2W1 0B0 0I1 0W1", "1F0 1F1 1I0 1B1 1W0")
    schedule = check_orders(orders)
    assert (schedule.num_stages, schedule.num_microbatches) == (3, 2)
    needs = dependencies_of([x for order in orders for x in order], 3)
    texts = {str(action): str(need) for action, need in needs.items()}
    assert texts == {
        "1F0": "0F0", "1F1": "0F1", "2F0": "1F0", "2F1": "1F1", "2B0": "2F0", "2I1": "2F1", "2W1": "2I1",
        "1I0": "2B0", "1B1": "2I1", "1W0": "1I0", "0B0": "1I0", "0I1": "1B1", "0W1": "0I1",
    }  # fmt: skip


@given(st.sampled_from(NAMES), st.integers(1, 4), st.integers(1, 5), st.randoms(use_true_random=False))
def test_a_shuffled_order_is_carried_out_or_refused_but_never_hangs(
    name: str, k: int, m: int, rng: random.Random
) -> None:
    orders = [list(order) for order in make_schedule(name, num_devices=k, num_microbatches=m).orders]
    swapped = rng.choice(orders)
    i, j = rng.randrange(len(swapped)), rng.randrange(len(swapped))
    swapped[i], swapped[j] = swapped[j], swapped[i]
    try:
        schedule = check_orders(orders)
    except OrderError:
        assert not is_possible(orders)
        return
    assert is_possible(orders)
    assert len(execution_order(schedule)) == sum(map(len, orders))


def is_possible(orders: Sequence[Sequence[Action]]) -> bool:
    """Whether the devices finish when each does what it can, one action at a time; by strings,
    not by the code tried."""
    waiting = [[str(x) for x in order] for order in orders]
    last = max(x.stage for order in orders for x in order)
    done: set[str] = set()
    while any(waiting):
        ready = [order for order in waiting if order and can_start(order[0], done, last)]
        if not ready:
            return False
        for order in ready:
            done.add(order.pop(0))
    return True


def can_start(action: str, done: set[str], last: int) -> bool:
    letter = next(x for x in action if x in "FBIW")
    stage, m = map(int, action.split(letter))
    if letter == "F":
        return stage == 0 or f"{stage - 1}F{m}" in done
    if letter == "W":
        return f"{stage}I{m}" in done
    return f"{stage}F{m}" in done and (stage == last or bool({f"{stage + 1}B{m}", f"{stage + 1}I{m}"} & done))


@pytest.mark.parametrize("action", ["0F3", "5F0"])
def test_an_action_that_the_schedule_does_not_have_is_named(action: str) -> None:
    orders = tuple(map(tuple, orders_of(f"0F0 {action} 0B0")))
    schedule = Schedule(name="made", num_stages=1, num_microbatches=1, orders=orders)
    with pytest.raises(OrderError, match=f"made has action {action}; expected stages 0 to 0 and micro-batches 0 to 0"):
        execution_order(schedule)
