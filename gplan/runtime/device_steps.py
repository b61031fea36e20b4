"""What a device does in a pass, step by step: its actions, with the transfers around each.

    1B0 of device 1 of 3    await 2B0, free what was sent long ago, post receives, 1B0, send 1B0

When receives are posted and what was sent is freed: `gplan/schedules/transfers.py`. On GPUs receives are posted later, as
NCCL runs the transfers between two ranks one after the other, in the order in which each rank issues them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from gplan.core import Action, ActionKind, Schedule
from gplan.schedules.transfers import Transfer, receives, sends
from gplan.simulation.simulator import dependency_order


@dataclass(frozen=True, slots=True)
class Send:
    """The output of an action is sent to the stage that it is for."""

    made: Action

    def __str__(self) -> str:
        return f"{self.made.stage}SEND_{_letter(self.made)}{self.made.microbatch}"


@dataclass(frozen=True, slots=True)
class Receive:
    """The output of another rank's action is received from now on; named after the stage that it is for."""

    made: Action

    def __str__(self) -> str:
        return f"{self.made.receiver}RECV_{_letter(self.made)}{self.made.microbatch}"


@dataclass(frozen=True, slots=True)
class Await:
    """The output of another rank's action must be there."""

    made: Action


@dataclass(frozen=True, slots=True)
class Free:
    """The output of an action must have been sent, and is not needed any more."""

    made: Action


Step: TypeAlias = Action | Send | Receive | Await | Free
"""What a rank does next."""


def _letter(made: Action) -> str:
    return "F" if made.kind is ActionKind.FORWARD else "B"


def device_steps(schedule: Schedule, *, in_pairs: bool = False) -> tuple[list[Step], ...]:
    """The steps of every device.

    With `in_pairs` each pair of devices issues its transfers in the same order: all are laid out in one common order, by
    time, were all actions as long, in which each receive comes with its send. So no two devices wait for each other. A
    receive is then posted where it is without, or later.
    """
    devices, every = schedule.devices, range(schedule.num_devices)
    received, sent = ([of(schedule, device) for device in every] for of in (receives, sends))
    awaited = {schedule.orders[device][x.end]: x.made for device in every for x in received[device]}
    starts = {x.made: x.start for some in received for x in some}
    posted, freed = _by_place(received, lambda x: x.start), _by_place(sent, lambda x: x.end)
    steps, places = tuple[list[Step], ...]([] for _ in every), [0] * schedule.num_devices
    waiting = [list[Action]() for _ in every]  # in pairs: what was made for a device that does not receive it yet

    def exchange(device: int, *, up_to: Action | None = None) -> None:
        """Transfer what the device receives now; else what one other device made, up to an action."""
        for made in list(waiting[device]):
            is_early = up_to in waiting[device] and up_to is not None and devices[made.stage] == devices[up_to.stage]
            if starts[made] <= places[device] or is_early:
                waiting[device].remove(made)
                steps[devices[made.stage]].append(Send(made))
                steps[device].append(Receive(made))

    for action in dependency_order(schedule) if in_pairs else (x for order in schedule.orders for x in order):
        device = devices[action.stage]
        own, place = steps[device], places[device]
        exchange(device)
        early = [] if in_pairs else [Receive(x.made) for x in posted[device].get(place, ())]
        if place == 0:
            own += early
        if action in awaited:
            own.append(Await(awaited[action]))
        for x in freed[device].get(place, ()):
            exchange(devices[x.made.receiver], up_to=x.made)  # without backwards it may be due
            own.append(Free(x.made))
        if place:
            own += early
        own.append(action)
        places[device] += 1
        if action in starts:
            receiver = devices[action.receiver]
            if in_pairs:
                waiting[receiver].append(action)
                exchange(receiver)
            else:
                own.append(Send(action))
    return steps


def _by_place(
    transfers: Sequence[Sequence[Transfer]], place: Callable[[Transfer], int]
) -> list[dict[int, list[Transfer]]]:
    """Of each device its transfers by a place in its order."""
    found = [dict[int, list[Transfer]]() for _ in transfers]
    for own, some in zip(found, transfers, strict=True):
        for x in some:
            own.setdefault(place(x), []).append(x)
    return found
