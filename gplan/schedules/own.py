"""A user's own order: one line of actions for every device, as text.

    0F0 0F1 0B0 0B1
    1F0 1B0 1F1 1B1

`3F0` is stage 3, forward, micro-batch 0; B is a backward, I and W its halves (input and weight gradients). Actions are
separated by spaces, commas or semicolons; empty ones (torch's CSV has them where a device waits), empty lines at the end
and what follows a # are passed over.
"""

from __future__ import annotations

import re
from pathlib import Path

from gplan.errors import UsageError
from gplan.nouns import Action
from gplan.schedules.needs import check_orders

PREFIX = "own:"
"""What the name of a schedule begins with that is an order itself, in one line, devices separated by slashes."""

_MOST_BYTES = 20_000_000


def is_own_order(name: str) -> bool:
    """Whether the name of a schedule is an order itself."""
    return name.startswith(PREFIX)


def read_own_order(path: Path) -> str:
    """The name of the schedule whose order is in a file; raises UsageError for a file that is none, with line and reason."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise UsageError(f"{path} has {path.stat().st_size} bytes; expected an order, one line of actions a device")
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read as an order: {error}") from error
    lines = [line.partition("#")[0] for line in text.splitlines()]
    rows = [[x for x in re.split(r"[\s,;]+", line) if x] for line in lines]
    while rows and not rows[-1]:
        rows.pop()
    if not rows:
        raise UsageError(f"{path} is empty; expected one line of actions a device, such as 0F0 0F1 0B0 0B1")
    for number, row in enumerate(rows, 1):
        for word in row:
            try:
                Action.parse(word)
            except ValueError as error:
                raise UsageError(f"{path}, line {number}: {error}") from error
    name = PREFIX + " / ".join(" ".join(row) for row in rows)
    try:
        check_orders(own_orders(name))
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error
    return name


def own_orders(name: str) -> list[list[Action]]:
    """The orders that the name of a schedule is; raises ValueError for text that is none.

    >>> [[str(action) for action in order] for order in own_orders("own:0F0 0B0 / 1F0 1B0")]
    [['0F0', '0B0'], ['1F0', '1B0']]
    """
    lines = name.removeprefix(PREFIX).split("/")
    return [[Action.parse(word) for word in line.split()] for line in lines]
