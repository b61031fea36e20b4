"""The steps of devices: what is sent is received in that order, early but not too early, and no order ever hangs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gplan.core import Action, ActionKind, Schedule
from gplan.runtime.device_steps import Await, Free, Receive, Send, Step, device_steps
from gplan.schedules.dependencies import dependencies_of
from gplan.schedules.registry import make_schedule
from gplan.schedules.transfers import RECEIVES_AHEAD, SENT_FOR, receives, sends
from tests.schedules.made import NAMES


def random_schedule(rng: random.Random) -> Schedule:
    """Stages on any devices, their actions in any order in which they can run, backwards whole or split."""
    num_devices = rng.randint(1, 5)
    num_stages, num_microbatches = num_devices + rng.randint(0, 4), rng.randint(1, 6)
    devices = [*range(num_devices), *(rng.randrange(num_devices) for _ in range(num_stages - num_devices))]
    rng.shuffle(devices)
    waiting = dict[Action, int]()  # by action: how many others come first
    followers = dict[Action, list[Action]]()

    def add(action: Action, *after: Action) -> None:
        waiting[action] = len(after)
        for x in after:
            followers.setdefault(x, []).append(action)

    for m in range(num_microbatches):
        before: tuple[Action, ...] = ()
        for stage in range(num_stages):
            forward = Action(stage, ActionKind.FORWARD, m)
            add(forward, *before)
            before = (forward,)
        for stage in reversed(range(num_stages)):
            split, forward = rng.random() < 0.5, Action(stage, ActionKind.FORWARD, m)
            backward = Action(stage, ActionKind.INPUT_GRADIENT if split else ActionKind.BACKWARD, m)
            add(backward, forward, *before)
            before = (backward,)
            if split:
                add(Action(stage, ActionKind.WEIGHT_GRADIENT, m), backward)
    ready, orders = [x for x, num in waiting.items() if not num], [list[Action]() for _ in range(num_devices)]
    while ready:
        action = ready.pop(rng.randrange(len(ready)))
        orders[devices[action.stage]].append(action)
        for x in followers.get(action, ()):
            waiting[x] -= 1
            if not waiting[x]:
                ready.append(x)
    return Schedule(
        name="random", num_stages=num_stages, num_microbatches=num_microbatches, orders=tuple(map(tuple, orders))
    )


def forwards_of(schedule: Schedule) -> Schedule:
    orders = tuple(tuple(x for x in order if x.kind is ActionKind.FORWARD) for order in schedule.orders)
    return Schedule(
        name="forward", num_stages=schedule.num_stages, num_microbatches=schedule.num_microbatches, orders=orders
    )


by_rule = st.builds(
    lambda name, k, m: make_schedule(name, num_devices=k, num_microbatches=m),
    st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 8),
)  # fmt: skip
at_random = st.builds(random_schedule, st.randoms(use_true_random=False))
trained = st.one_of(by_rule, at_random)
schedules = st.one_of(trained, by_rule.map(forwards_of))


def source(step: Send | Receive, schedule: Schedule) -> int:
    return schedule.devices[step.made.stage]


def target(step: Send | Receive, schedule: Schedule) -> int:
    return schedule.devices[step.made.receiver]


def run(steps: Sequence[Sequence[Step]], schedule: Schedule, rng: random.Random) -> list[int]:
    """How many steps each device has done when none can go on; a send is done once its receive is posted.

    Messages from one device to another have no names: the first that is sent is the first that is received.
    """
    num_done = [0] * len(steps)
    sent, posted = dict[tuple[int, int], list[Action]](), dict[tuple[int, int], list[Action]]()

    def have_met(made: Action) -> bool:
        pair = schedule.devices[made.stage], schedule.devices[made.receiver]
        both = zip(sent.get(pair, ()), posted.get(pair, ()), strict=False)
        return any(x == y == made for x, y in both)

    while True:
        able = [
            device
            for device, own in enumerate(steps)
            if num_done[device] < len(own)
            and (not isinstance(x := own[num_done[device]], Await | Free) or have_met(x.made))
        ]
        if not able:
            return num_done
        device = rng.choice(able)
        step = steps[device][num_done[device]]
        num_done[device] += 1
        if isinstance(step, Send | Receive):
            lists = sent if isinstance(step, Send) else posted
            lists.setdefault((source(step, schedule), target(step, schedule)), []).append(step.made)


@given(schedules, st.booleans(), st.randoms(use_true_random=False))
def test_no_order_hangs(schedule: Schedule, in_pairs: bool, rng: random.Random) -> None:
    """Whatever takes how long, though a device waits for what it sent."""
    steps = device_steps(schedule, in_pairs=in_pairs)
    assert run(steps, schedule, rng) == [len(own) for own in steps]


AROUND = (
    "custom:0F0 0F1 0F2 0F3 3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 0B0 0B1 0B2 0B3 /"
    " 1F0 1B0 1F1 1F2 1F3 1B1 1B2 1B3 / 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"
)
"""Device 0 receives 1B0 long after it was sent, and first needs what device 1 computes next, by way of device 2."""


def test_no_wait_for_a_send_around_a_ring() -> None:
    schedule = make_schedule(AROUND, num_devices=3, num_microbatches=4)
    steps = device_steps(schedule)
    assert run(steps, schedule, random.Random(0)) == [len(own) for own in steps]
    place = next(x.end for x in sends(schedule, 1) if str(x.made) == "1B0")
    assert place == len(schedule.orders[1]), "nothing that device 1 receives tells it that 1B0 was received"


@given(schedules, st.booleans())
def test_actions_keep_their_order(schedule: Schedule, in_pairs: bool) -> None:
    for steps, order in zip(device_steps(schedule, in_pairs=in_pairs), schedule.orders, strict=True):
        assert tuple(x for x in steps if isinstance(x, Action)) == order


@given(schedules, st.booleans())
def test_what_is_sent_is_received_in_that_order(schedule: Schedule, in_pairs: bool) -> None:
    lists = device_steps(schedule, in_pairs=in_pairs)
    for a in range(schedule.num_devices):
        for b in range(schedule.num_devices):
            sent = [x.made for x in lists[a] if isinstance(x, Send) and target(x, schedule) == b]
            assert [x.made for x in lists[b] if isinstance(x, Receive) and source(x, schedule) == a] == sent


@given(schedules)
def test_pairs_issue_transfers_in_one_order(schedule: Schedule) -> None:
    """NCCL runs the transfers between two ranks one after the other, in the order in which each rank issues them."""
    lists = device_steps(schedule, in_pairs=True)
    for a in range(schedule.num_devices):
        for b in range(a):

            def between(steps: list[Step], a: int = a, b: int = b) -> list[Action]:
                found = (x for x in steps if isinstance(x, Send | Receive))
                return [x.made for x in found if {source(x, schedule), target(x, schedule)} == {a, b}]

            assert between(lists[a]) == between(lists[b])


@given(trained)
def test_pairs_receive_no_earlier(schedule: Schedule) -> None:
    for device, steps in enumerate(device_steps(schedule, in_pairs=True)):
        starts, num_begun = {x.made: x.start for x in receives(schedule, device)}, 0
        for step in steps:
            num_begun += isinstance(step, Action)
            if isinstance(step, Receive):
                assert num_begun >= starts[step.made]


@given(schedules, st.booleans())
def test_what_is_needed_is_awaited_right_before(schedule: Schedule, in_pairs: bool) -> None:
    awaited = dependencies_of([x for order in schedule.orders for x in order], schedule.num_stages)
    for steps in device_steps(schedule, in_pairs=in_pairs):
        begun, there = set[Action](), set[Action]()
        for step in steps:
            if isinstance(step, Receive):
                begun.add(step.made)
            elif isinstance(step, Await):
                assert step.made in begun
                there.add(step.made)
            elif isinstance(step, Action) and step in awaited:
                made = awaited[step]
                assert made in there or schedule.devices[made.stage] == schedule.devices[step.stage]
        assert begun == there


@given(schedules)
def test_what_was_sent_is_freed_once(schedule: Schedule) -> None:
    for device, steps in enumerate(device_steps(schedule)):
        sent = Counter(x.made for x in steps if isinstance(x, Send))
        freed = Counter(x.made for x in steps if isinstance(x, Free))
        at_end = Counter(x.made for x in sends(schedule, device) if x.end == len(schedule.orders[device]))
        assert freed + at_end == sent
        assert set(sent.values()) <= {1}


@given(st.sampled_from(["gpipe", "1f1b", "eager-1f1b", "zb-h1"]), st.integers(1, 5), st.integers(1, 8))
def test_receives_are_some_passes_early(name: str, k: int, m: int) -> None:
    """Here all are needed in the order in which they are sent."""
    schedule = make_schedule(name, num_devices=k, num_microbatches=m)
    for device, order in enumerate(schedule.orders):
        passes = [i for i, x in enumerate(order) if x.kind is not ActionKind.WEIGHT_GRADIENT]
        for x in receives(schedule, device):
            assert passes.index(x.end) - passes.index(x.start) == min(RECEIVES_AHEAD, passes.index(x.end))


@pytest.mark.parametrize("name", ["1f1b", "eager-1f1b", "zb-h1"])
def test_gradients_that_were_sent_are_few(name: str) -> None:
    """A stage that keeps receiving activations does not pile up what it sent."""
    schedule = make_schedule(name, num_devices=4, num_microbatches=40)
    for device in range(1, 4):
        order = schedule.orders[device]
        last = max(i for i, x in enumerate(order) if x.kind is ActionKind.FORWARD)
        gradients = [x for x in sends(schedule, device) if x.made.kind is not ActionKind.FORWARD]
        kept = [x.end - x.start for x in gradients if x.end <= last]
        assert len(kept) >= 30
        assert set(kept) <= set(range(1 + SENT_FOR, 7))


def test_steps_of_1f1b() -> None:
    schedule = make_schedule("1f1b", num_devices=2, num_microbatches=2)
    early, paired = (
        [
            " ".join(str(x) for x in steps if not isinstance(x, Await | Free))
            for steps in device_steps(schedule, in_pairs=x)
        ]
        for x in (False, True)
    )
    assert early == [
        "0RECV_B0 0RECV_B1 0F0 0SEND_F0 0F1 0SEND_F1 0B0 0B1",
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
    ]
    assert paired == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
    ]


def test_no_sends_within_a_rank() -> None:
    schedule = make_schedule("zb-v", num_devices=2, num_microbatches=2)
    assert schedule.devices == (0, 1, 1, 0)
    sent = {str(x)[:-1] for x in device_steps(schedule)[1] if isinstance(x, Send)}
    assert sent == {"1SEND_B", "2SEND_F"}


@pytest.mark.parametrize("kind", ["F", "B", "I"])
def test_names_of_transfers_are_torchs(kind: str) -> None:
    made = Action.parse(f"2{kind}5")
    letter = "F" if kind == "F" else "B"
    assert str(Send(made)) == f"2SEND_{letter}5"
    assert str(Receive(made)) == (f"3RECV_{letter}5" if kind == "F" else f"1RECV_{letter}5")
