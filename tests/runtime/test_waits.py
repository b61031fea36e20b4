"""What a rank waits for between its actions, by schedule."""

from __future__ import annotations

from gplan.core import Action, Schedule
from gplan.runtime.heartbeat import PeerWait, waits_by_action
from gplan.runtime.stage_runner import forward_only
from gplan.schedules.registry import make_schedule


def wait_lines(schedule: Schedule, device: int) -> list[str]:
    """One line per action of a device (-: before the first) with the wait after it."""
    waits = waits_by_action(schedule, device)
    assert set(waits) == {None, *schedule.orders[device]}
    return [f"{action or '-'}: {_text(wait)}" for action, wait in waits.items()]


def _text(wait: PeerWait | None) -> str:
    if wait is None:
        return "nobody"
    of = f" {wait.microbatch}" if wait.microbatch >= 0 else ""
    return f"stage {wait.stage} for {wait.awaited}{of}, stage {wait.neighbour}"


def own(text: str) -> Schedule:
    orders = text.split(" / ")
    num_microbatches = 1 + max(Action.parse(x).microbatch for order in orders for x in order.split())
    return make_schedule(f"custom:{text}", num_devices=len(orders), num_microbatches=num_microbatches)


def test_wait_for_neighbours() -> None:
    schedule = make_schedule("1f1b", num_devices=3, num_microbatches=1)
    assert wait_lines(schedule, 0) == [
        "-: nobody",
        "0F0: stage 0 for gradients 0, stage 1",
        "0B0: stage 0 for receiver, stage 1",
    ]
    assert wait_lines(schedule, 1) == [
        "-: stage 1 for activations 0, stage 0",
        "1F0: stage 1 for gradients 0, stage 2",
        "1B0: stage 1 for receiver, stage 0",
    ]
    assert wait_lines(schedule, 2)[1:] == ["2F0: nobody", "2B0: stage 2 for receiver, stage 1"]


def test_chunk_waits_for_previous_stage() -> None:
    schedule = make_schedule("interleaved-1f1b:2", num_devices=2, num_microbatches=1)
    assert wait_lines(schedule, 0) == [
        "-: nobody",
        "0F0: stage 2 for activations 0, stage 1",
        "2F0: stage 2 for gradients 0, stage 3",
        "2B0: stage 0 for gradients 0, stage 1",
        "0B0: stage 2 for receiver, stage 1",
    ]


def test_no_wait_within_a_rank() -> None:
    schedule = make_schedule("zb-v", num_devices=2, num_microbatches=1)
    assert schedule.devices == (0, 1, 1, 0)
    waited = [line for line in wait_lines(schedule, 1) if "nobody" not in line]
    assert waited == [
        "-: stage 1 for activations 0, stage 0",
        "2F0: stage 2 for gradients 0, stage 3",
        *[f"{schedule.orders[1][-1]}: stage 1 for receiver, stage 0"],
    ]
    assert not any(
        x for x in waits_by_action(make_schedule("looped-bfs:3", num_devices=1, num_microbatches=2), 0).values()
    )


def test_no_wait_for_weight_gradients() -> None:
    schedule = own("0F0 0I0 0W0 / 1F0 1I0 1W0")
    assert wait_lines(schedule, 1) == [
        "-: stage 1 for activations 0, stage 0",
        "1F0: nobody",
        "1I0: nobody",
        "1W0: stage 1 for receiver, stage 0",
    ]
    assert wait_lines(schedule, 0)[1:3] == ["0F0: stage 0 for gradients 0, stage 1", "0I0: nobody"]


def test_no_wait_for_gradients_in_evaluation() -> None:
    schedule = forward_only(make_schedule("zb-v", num_devices=2, num_microbatches=2))
    assert [str(x) for x in schedule.orders[0]] == ["0F0", "0F1", "3F0", "3F1"]
    assert not any("gradients" in line for device in (0, 1) for line in wait_lines(schedule, device))
