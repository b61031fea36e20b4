"""Every schedule by its name: from K devices and M micro-batches to the ordered actions of every device.

A name is a rule (`gpipe`), a rule with a number, such as that of chunks on each device (`interleaved-1f1b:4`; 2 if it is left
out), or a custom order (`custom.py`). A new rule is one entry of `SCHEDULES`; the simulator, the memory model, the planner, the
charts and the engines all read the orders made here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

from gplan.core import Action, ActionKind, Schedule
from gplan.core.errors import UsageError
from gplan.core.units import counted
from gplan.schedules.custom import custom_order, is_custom_order
from gplan.schedules.gpipe import looped_bfs
from gplan.schedules.one_f_one_b import interleaved_1f1b, one_f_one_b
from gplan.schedules.zero_bubble import zb_h1, zb_v

Number = TypeVar("Number", bound=int | str | None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRule:
    """How to make a schedule: `make(K, M, n)` returns the orders for K devices and M micro-batches.

    n is the number after the name, such as the chunks a device; without one it is the rule's number of chunks.
    """

    make: Callable[[int, int, int], list[list[Action]]]
    num_chunks: int | None = 1  # stages on each device; None: the number after the name
    number: str = ""  # what the number after the name counts; "": there is none
    default_number: int | None = None  # None: the number must be given
    splits_backward: bool = False
    turns_back: bool = False  # whether a micro-batch's second way is from the last device to the first


_CHUNKS: Any = {"num_chunks": None, "number": "chunks a device", "default_number": 2}

SCHEDULES: dict[str, ScheduleRule] = {
    "gpipe": ScheduleRule(make=looped_bfs),
    "1f1b": ScheduleRule(make=lambda k, m, _: one_f_one_b(k, m)),
    "eager-1f1b": ScheduleRule(make=lambda k, m, _: one_f_one_b(k, m, schedule="eager-1f1b")),
    "interleaved-1f1b": ScheduleRule(make=interleaved_1f1b, **_CHUNKS),
    "looped-bfs": ScheduleRule(make=looped_bfs, **_CHUNKS),
    "zb-h1": ScheduleRule(make=lambda k, m, _: zb_h1(k, m), splits_backward=True),
    "zb-v": ScheduleRule(make=lambda k, m, _: zb_v(k, m), num_chunks=2, splits_backward=True, turns_back=True),
    "1f1b-cap": ScheduleRule(
        make=lambda k, m, n: one_f_one_b(k, m, most_in_flight=n), number="micro-batches in flight on a stage"
    ),
}

MOST_ACTIONS = 5_000_000
"""The limit for a schedule; so many actions take a gigabyte of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleInfo:
    """Properties of a schedule that follow from its name."""

    title: str  # to show; the name of a custom order is too long
    num_chunks: int  # stages on each device; for a custom order the largest number on any device
    number: int = 1  # after the name, or by default; for rules without one that of chunks
    splits_backward: bool
    num_devices: int | None = None  # fixed by a custom order; None: any
    num_microbatches: int | None = None  # the same


def default_num_microbatches(num_devices: int) -> int:
    """The micro-batches per step and pipeline where no number is given."""
    return 4 * num_devices


@lru_cache(maxsize=64)
def schedule_info(name: str) -> ScheduleInfo:
    """The properties of a schedule; raises UsageError for an unknown name or an invalid custom order."""
    if is_custom_order(name):
        custom = custom_order(name)
        return ScheduleInfo(
            title="custom order",
            num_chunks=max(len({x.stage for x in order}) for order in custom.orders),
            splits_backward=any(x.kind is ActionKind.WEIGHT_GRADIENT for order in custom.orders for x in order),
            num_devices=len(custom.orders),
            num_microbatches=custom.num_microbatches,
        )
    word, colon, number = name.partition(":")
    rule = SCHEDULES.get(word)
    if rule is None:
        raise UsageError(
            f"schedule {name[:60]!r} is not known; expected one of {', '.join(SCHEDULES)}, or a file with a custom order"
        )
    if colon and not rule.number:
        raise UsageError(f"schedule {name!r}: {word} has {rule.num_chunks} chunks a device; expected no number")
    if colon and not re.fullmatch("0*[1-9][0-9]{0,3}", number):
        raise UsageError(f"schedule {name!r} has {number!r} {rule.number}; expected a number, such as {word}:2")
    count = int(number) if colon else rule.default_number
    if rule.number and count is None:
        raise UsageError(f"schedule {name!r} does not say how many {rule.number}; expected a number, such as {word}:2")
    return ScheduleInfo(
        title=f"{word}:{count}" if rule.number else word,
        num_chunks=rule.num_chunks or count or 1,
        number=count or rule.num_chunks or 1,
        splits_backward=rule.splits_backward,
    )


def every_schedule(num_chunks: int = 1) -> list[str]:
    """The schedules by rule, with so many chunks a device where their number is free, if that is more than one.

    Those whose number counts something else are left out.

    >>> [x for x in every_schedule(3) if schedule_info(x).num_chunks == 3]
    ['interleaved-1f1b:3', 'looped-bfs:3']
    """
    chunks = f":{num_chunks}" if num_chunks > 1 else ""
    rules = ((word, rule) for word, rule in SCHEDULES.items() if rule.num_chunks is None or not rule.number)
    return [canonical(word + chunks if rule.num_chunks is None else word) for word, rule in rules]


def canonical(name: str) -> str:
    """The full name of a schedule, with its number of chunks; raises UsageError for an unknown name.

    >>> canonical("1f1b"), canonical("interleaved-1f1b")
    ('1f1b', 'interleaved-1f1b:2')
    """
    return name if is_custom_order(name) else schedule_info(name).title


def num_stages_of(name: str, num_devices: int) -> int:
    """The number of stages that the schedule has on K devices."""
    if is_custom_order(name):
        return custom_order(name).num_stages
    return schedule_info(name).num_chunks * num_devices


def num_devices_of(name: str, num_stages: int) -> int:
    """The number of devices on which the schedule has so many stages: the inverse of `num_stages_of`."""
    info = schedule_info(name)
    return info.num_devices or num_stages // info.num_chunks


def stage_devices(name: str, *, num_devices: int) -> tuple[int, ...]:
    """The device of each stage under a schedule by rule, as in its orders.

    >>> stage_devices("zb-v", num_devices=2), stage_devices("interleaved-1f1b:2", num_devices=2)
    ((0, 1, 1, 0), (0, 1, 0, 1))
    """
    if SCHEDULES[name.partition(":")[0]].turns_back:
        return (*range(num_devices), *reversed(range(num_devices)))
    return (*range(num_devices),) * schedule_info(name).num_chunks


@lru_cache(maxsize=64)
def make_schedule(name: str, *, num_devices: int, num_microbatches: int) -> Schedule:
    """The schedule of that name for K devices and M micro-batches.

    A custom order also serves fewer micro-batches than it lists: the others are dropped. Raises UsageError for an
    unknown name and for numbers that the schedule does not allow.
    """
    if num_devices < 1 or num_microbatches < 1:
        raise UsageError(f"got {num_devices} devices and {num_microbatches} micro-batches; expected at least 1 of each")
    info = schedule_info(name)
    if is_custom_order(name):
        most = custom_order(name).num_microbatches
        custom_counts(name, num_devices=num_devices, num_microbatches=max(num_microbatches, most))
        orders = [[x for x in order if x.microbatch < num_microbatches] for order in custom_order(name).orders]
    else:
        num_actions = num_microbatches * num_stages_of(name, num_devices) * (3 if info.splits_backward else 2)
        if num_actions > MOST_ACTIONS:
            raise UsageError(
                f"{info.title} with {num_devices} devices and {num_microbatches} micro-batches has {num_actions} actions; "
                f"expected at most {MOST_ACTIONS}: use fewer micro-batches or devices"
            )
        orders = SCHEDULES[name.partition(":")[0]].make(num_devices, num_microbatches, info.number)
    return Schedule(
        name=info.title,
        num_stages=num_stages_of(name, num_devices),
        num_microbatches=num_microbatches,
        orders=tuple(tuple(order) for order in orders),
    )


def custom_counts(
    name: str, *, num_devices: Number, num_microbatches: Number
) -> tuple[Number | int | None, Number | int | None]:
    """The numbers of devices and micro-batches as requested, else those of a custom order; None requests nothing.

    Raises UsageError where both are there and differ.

    >>> custom_counts("custom:0F0 0B0", num_devices=None, num_microbatches=1)
    (1, 1)
    """
    info = schedule_info(name)
    pairs = {"device": (num_devices, info.num_devices), "micro-batch": (num_microbatches, info.num_microbatches)}
    for what, (requested, fixed) in pairs.items():
        if requested is not None and fixed is not None and requested != fixed:
            found = requested if isinstance(requested, str) else counted(requested, what)
            raise UsageError(
                f"asked for {found}, but the custom order has {counted(fixed, what)}; leave the number out, or write "
                "another order"
            )
    return (
        info.num_devices if num_devices is None else num_devices,
        info.num_microbatches if num_microbatches is None else num_microbatches,
    )
