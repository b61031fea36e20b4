"""Schedules as a user names them: by name, or by a file with an order."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from gplan.errors import UsageError
from gplan.schedules import (
    SCHEDULES,
    canonical,
    check_own_counts,
    flow_of,
    is_own_order,
    make_schedule,
    named,
    read_own_order,
)

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


def agreed(schedule: str, num_devices: NumberT, num_microbatches: NumberT) -> tuple[NumberT, NumberT]:
    """The numbers (or "auto") that were given, or else those of an own order; raises UsageError where they differ."""
    check_own_counts(schedule, num_devices=num_devices, num_microbatches=num_microbatches)
    said = named(schedule)
    return (
        said.num_devices if num_devices is None else num_devices,
        said.num_microbatches if num_microbatches is None else num_microbatches,
    )
