"""Schedules: from K devices and M micro-batches to the ordered actions of every device.

A schedule is defined once, here; the simulator, the memory model, the planner, the charts and the engine read it. It is
named by its rule (`gpipe`), where a device holds several chunks with their number (`interleaved-1f1b:4`; 2 where it is
left out), or it is a custom order (`own.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from gplan.core import Action, ActionKind, Schedule
from gplan.core.errors import UsageError
from gplan.core.units import counted
from gplan.schedules.custom import custom_order, is_custom_order
from gplan.schedules.gpipe import gpipe, looped_bfs
from gplan.schedules.one_f_one_b import eager_1f1b, interleaved_1f1b, one_f_one_b
from gplan.schedules.zero_bubble import zb_h1, zb_v


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How a schedule is made: orders for K devices, M micro-batches and v chunks a device."""

    make: Callable[[int, int, int], list[list[Action]]]
    num_chunks: int | None = 1  # None: any number
    splits_backward: bool = False


SCHEDULES: dict[str, Rule] = {
    "gpipe": Rule(make=lambda k, m, _: gpipe(k, m)),
    "1f1b": Rule(make=lambda k, m, _: one_f_one_b(k, m)),
    "eager-1f1b": Rule(make=lambda k, m, _: eager_1f1b(k, m)),
    "interleaved-1f1b": Rule(make=interleaved_1f1b, num_chunks=None),
    "looped-bfs": Rule(make=looped_bfs, num_chunks=None),
    "zb-h1": Rule(make=lambda k, m, _: zb_h1(k, m), splits_backward=True),
    "zb-v": Rule(make=lambda k, m, _: zb_v(k, m), num_chunks=2, splits_backward=True),
}

MOST_ACTIONS = 5_000_000
"""Of a schedule that is made: they take a gigabyte."""

_USUAL_CHUNKS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleInfo:
    """What the name of a schedule says."""

    title: str  # for people: custom orders are long
    num_chunks: int  # stages on each device; of a custom order the most on any
    splits_backward: bool
    num_devices: int | None = None  # of a custom order
    num_microbatches: int | None = None


@lru_cache(maxsize=64)
def schedule_info(name: str) -> ScheduleInfo:
    """What the name of a schedule says;
    raises UsageError for a name that is not known and for a custom order that is none."""
    if is_custom_order(name):
        own = custom_order(name)
        return ScheduleInfo(
            title="custom order",
            num_chunks=max(len({x.stage for x in order}) for order in own.orders),
            splits_backward=any(x.kind is ActionKind.WEIGHT_GRADIENT for order in own.orders for x in order),
            num_devices=len(own.orders),
            num_microbatches=own.num_microbatches,
        )
    word, colon, number = name.partition(":")
    rule = SCHEDULES.get(word)
    if rule is None:
        raise UsageError(
            f"schedule {name[:60]!r} is not known; expected one of {', '.join(SCHEDULES)}, or a file with an order"
        )
    if rule.num_chunks is not None and colon:
        raise UsageError(f"schedule {name!r}: {word} has {rule.num_chunks} chunks a device; expected no number")
    if colon and not re.fullmatch("0*[1-9][0-9]{0,3}", number):
        raise UsageError(f"schedule {name!r} has {number!r} chunks a device; expected a number, such as {word}:2")
    num_chunks = rule.num_chunks or (int(number) if colon else _USUAL_CHUNKS)
    title = word if rule.num_chunks is not None else f"{word}:{num_chunks}"
    return ScheduleInfo(title=title, num_chunks=num_chunks, splits_backward=rule.splits_backward)


def canonical(name: str) -> str:
    """The one name of a schedule, with its number of chunks; raises UsageError for a name that is not known.

    >>> canonical("1f1b"), canonical("interleaved-1f1b")
    ('1f1b', 'interleaved-1f1b:2')
    """
    return name if is_custom_order(name) else schedule_info(name).title


def num_stages_of(name: str, num_devices: int) -> int:
    """How many stages the model is cut into on K devices."""
    if is_custom_order(name):
        return custom_order(name).num_stages
    return schedule_info(name).num_chunks * num_devices


@lru_cache(maxsize=64)
def make_schedule(name: str, *, num_devices: int, num_microbatches: int) -> Schedule:
    """The schedule of that name for K devices and M micro-batches.

    A custom order serves fewer micro-batches than it has, without the others. Raises UsageError for a name that is not
    known and for numbers that the schedule cannot have.
    """
    if num_devices < 1 or num_microbatches < 1:
        raise UsageError(f"got {num_devices} devices and {num_microbatches} micro-batches; expected at least 1 of each")
    said = schedule_info(name)
    if is_custom_order(name):
        orders = _own(name, num_devices, num_microbatches)
    else:
        _check_size(name, num_devices, num_microbatches)
        orders = SCHEDULES[name.partition(":")[0]].make(num_devices, num_microbatches, said.num_chunks)
    return Schedule(
        name=said.title,
        num_stages=num_stages_of(name, num_devices),
        num_microbatches=num_microbatches,
        orders=tuple(tuple(order) for order in orders),
    )


def check_custom_counts(
    name: str, *, num_devices: int | str | None = None, num_microbatches: int | str | None = None
) -> None:
    """Raise UsageError where what is asked for is not what a custom order has; None, or another schedule,
    asks for nothing.

    >>> check_custom_counts("custom:0F0 0B0", num_devices=1, num_microbatches=1)
    """
    said = schedule_info(name)
    asked = {"device": (num_devices, said.num_devices), "micro-batch": (num_microbatches, said.num_microbatches)}
    for what, (given, own) in asked.items():
        if given is not None and own is not None and given != own:
            found = given if isinstance(given, str) else counted(given, what)
            raise UsageError(
                f"asked for {found}, and the custom order has {counted(own, what)}; expected just as many: give no number, or "
                "write another order"
            )


def _check_size(name: str, num_devices: int, num_microbatches: int) -> None:
    """Raise UsageError for a schedule that would fill the memory."""
    per_microbatch = num_stages_of(name, num_devices) * (3 if schedule_info(name).splits_backward else 2)
    if num_microbatches * per_microbatch > MOST_ACTIONS:
        raise UsageError(
            f"{schedule_info(name).title} with {num_devices} devices and {num_microbatches} micro-batches has "
            f"{num_microbatches * per_microbatch} actions; expected at most {MOST_ACTIONS}: take fewer micro-batches or devices"
        )


def _own(name: str, num_devices: int, num_microbatches: int) -> list[list[Action]]:
    own = custom_order(name)
    check_custom_counts(name, num_devices=num_devices, num_microbatches=max(num_microbatches, own.num_microbatches))
    return [[x for x in order if x.microbatch < num_microbatches] for order in own.orders]
