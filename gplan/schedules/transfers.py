"""When a device posts a receive and frees what it sent: one rule, which the engines run and the memory model counts.

    1F1B, device 1 of 3                             1F0                  1F1   1B0   1F2   1B1  ..
    begins to receive, when that pass begins        0F0 0F1 2B0 0F2      2B1   0F3   2B2   0F4  ..

A pass is a forward, a backward or the first half of one. A receive is posted when the pass begins that comes
`RECEIVES_AHEAD` before the one that needs it: the sender on a CPU cannot send earlier, so a transfer has as long as three
passes take. Receives from one device are posted in the order in which it sends. The buffer is freed with the
micro-batch's backward, which needs the input too.

An output stays until its own backward begins, which cannot be before the output was received. A gradient that was sent
stays while the next action runs (`SENT_FOR`), and then until it is known that its receive is posted: the other device
has sent what it made after that. So a wait for a send waits for bytes alone, never for what another device has yet to
compute: every order that can run also runs so, at its own pace. After the last such message gradients stay until the
step ends; each then takes no more than the input that was freed with it.

Without backwards nothing comes back. A device that sends to one other alone may then wait for it: all that the other
waits for from this device comes after what is waited for, and is posted with it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from gplan.core import Action, ActionKind, Schedule

RECEIVES_AHEAD = 3
"""Passes before the one that needs it that the engine posts a receive.

With 2, 1F1B steps of very small actions took longer on a busy host than with 12; with 3 they did not.
"""

SENT_FOR = 1
"""Actions, at least, for which a gradient stays after it was sent."""


class Transfer(NamedTuple):
    """What a device sends to or receives from another one, with places in the device's own order."""

    made: Action  # whose output it is
    start: int  # of a receive: posted before this action; of a send: sent after this action
    end: int  # of a receive: needed by this action; of a send: freed before this action; the order's length: at the end


@lru_cache(maxsize=64)
def receives(schedule: Schedule, device: int, *, ahead: int = RECEIVES_AHEAD) -> tuple[Transfer, ...]:
    """What a device receives, in the order in which it posts that; `ahead` in passes.

    >>> from gplan.schedules.registry import make_schedule
    >>> [(str(x.made), x.start, x.end) for x in receives(make_schedule("1f1b", num_devices=2, num_microbatches=4), 1)]
    [('0F0', 0, 0), ('0F1', 0, 2), ('0F2', 1, 4), ('0F3', 3, 6)]
    """
    passes = [i for i, x in enumerate(schedule.orders[device]) if x.kind is not ActionKind.WEIGHT_GRADIENT]
    ranks = {place: rank for rank, place in enumerate(passes)}
    found = list[Transfer]()
    for sender, messages in _messages(schedule, device).items():
        messages.sort()  # as they are sent
        order, needed, own = schedule.orders[sender], len(passes), list[Transfer]()
        for made, end in reversed(messages):
            needed = min(needed, ranks[end])  # by this one, or by one that is sent after it
            own.append(Transfer(order[made], passes[max(0, needed - ahead)], end))
        found += reversed(own)
    return tuple(sorted(found, key=lambda x: x.start))  # which keeps the order of each sender


@lru_cache(maxsize=64)
def sends(schedule: Schedule, device: int) -> tuple[Transfer, ...]:
    """What a device sends, in that order.

    >>> from gplan.schedules.registry import make_schedule
    >>> [(str(x.made), x.start, x.end) for x in sends(make_schedule("1f1b", num_devices=2, num_microbatches=4), 1)]
    [('1B0', 1, 3), ('1B1', 3, 5), ('1B2', 5, 7), ('1B3', 7, 8)]
    """
    order, devices, places = schedule.orders[device], schedule.devices, _places(schedule, device)
    sent = dict[int, list[int]]()  # by receiver: places in the order
    for place in places.values():
        stage = order[place].receiver
        if 0 <= stage < schedule.num_stages and devices[stage] != device:
            sent.setdefault(devices[stage], []).append(place)
    trains = any(x.kind is not ActionKind.FORWARD for x in order)
    messages, found = _messages(schedule, device) if trains else {}, list[Transfer]()
    for receiver, own in sent.items():
        if trains:
            came = sorted((needed, made) for made, needed in messages.get(receiver, ()))
            ends = [*(needed for needed, _ in came), len(order)]
            latest = list(accumulate([*(made for _, made in came), len(schedule.orders[receiver])], max))
            starts = _starts(schedule, receiver)
        for place in own:
            action = order[place]
            if not trains:
                end = place + 1 + SENT_FOR if len(sent) == 1 else len(order)
            elif action.kind is ActionKind.FORWARD:
                end = places[action.stage, False, action.microbatch]
            else:
                known = ends[bisect_left(latest, starts[action])]
                end = max(known, place + 1 + SENT_FOR)
            found.append(Transfer(action, place, min(end, len(order))))
    return tuple(sorted(found, key=lambda x: x.start))


_Key: TypeAlias = tuple[int, bool, int]
"""Stage, whether it is a forward, and micro-batch of a pass that has an output for another stage."""


@lru_cache(maxsize=64)
def _places(schedule: Schedule, device: int) -> Mapping[_Key, int]:
    """Where in its order a device has each forward and each backward, or its first half."""
    return {
        (x.stage, x.kind is ActionKind.FORWARD, x.microbatch): i
        for i, x in enumerate(schedule.orders[device])
        if x.kind is not ActionKind.WEIGHT_GRADIENT
    }


def _messages(schedule: Schedule, device: int) -> dict[int, list[tuple[int, int]]]:
    """By sender, in the order in which a device needs them: where each is made, and where it is needed."""
    devices, found = schedule.devices, dict[int, list[tuple[int, int]]]()
    for (stage, is_forward, microbatch), needed in _places(schedule, device).items():
        source = stage - 1 if is_forward else stage + 1
        if 0 <= source < schedule.num_stages and devices[source] != device:
            made = _places(schedule, devices[source])[source, is_forward, microbatch]
            found.setdefault(devices[source], []).append((made, needed))
    return found


@lru_cache(maxsize=64)
def _starts(schedule: Schedule, device: int) -> Mapping[Action, int]:
    """Before which of its actions a device posts the receive of each output."""
    return {x.made: x.start for x in receives(schedule, device)}
