"""Schedules as a user names them: by name, or by a file with an order."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from gplan.errors import UsageError
from gplan.schedules import SCHEDULES, canonical, flow_of, is_own_order, make_schedule, named, read_own_order

SCHEDULE_HELP = f"{', '.join(SCHEDULES)}; name:4 has 4 chunks a device; or a file with an order."


def schedule_named(text: str) -> str:
    """The schedule of that name, or in that file; raises UsageError for what is neither or can never finish."""
    path = Path(text)
    is_file = text.partition(":")[0] not in SCHEDULES and not is_own_order(text) and (path.suffix or _is_file(path))
    name = read_own_order(path) if is_file else text
    try:
        said = named(name)
        if said.num_devices is not None and said.num_microbatches is not None:
            flow_of(make_schedule(name, num_devices=said.num_devices, num_microbatches=said.num_microbatches))
    except ValueError as error:
        raise UsageError(f"{text if is_file else '--schedule'}: {error}") from error
    return canonical(name)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # such as a name that is too long
        return False


NumberT = TypeVar("NumberT", int | None, int | str | None)


def agreed(option: str, given: NumberT, *, schedule: str, of_order: int | None) -> NumberT:
    """The number (or "auto") that was given, or else that of an own order; raises UsageError where they differ."""
    is_fewer = option == "--microbatches" and isinstance(given, int) and of_order is not None and given < of_order
    if given is not None and of_order is not None and given != of_order and not is_fewer:
        raise UsageError(f"{option} {given}: the {named(schedule).title} is for {of_order}; leave the option out")
    return of_order if given is None else given
