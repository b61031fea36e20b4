"""Custom orders: a schedule written by the user, one line of actions for every device.

    # two devices of one stage
    0F0 0F1 0B0 0B1
    1F0 1B0 1F1 1B1

`3F0` is stage 3, forward, micro-batch 0; B is a backward, I and W its halves (input and weight gradients). Actions are
separated by spaces, commas or semicolons. Empty lines, empty cells (which torch's CSV writes where a device waits) and
text after a # are ignored. Inside gplan such a schedule has the name `custom:` followed by its lines, separated by
slashes, so a plan does not depend on the file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from gplan.core import Action, Schedule
from gplan.core.errors import UsageError
from gplan.schedules.dependencies import OrderError, check_orders

PREFIX = "custom:"
_MOST_CHARACTERS = 20_000_000
_EXPECTED = "expected one line of actions for each device, such as 0F0 0F1 0B0 0B1"


def is_custom_order(name: str) -> bool:
    """Whether the name of a schedule contains a custom order."""
    return name.startswith(PREFIX)


@lru_cache(maxsize=16)
def custom_order(name: str) -> Schedule:
    """The schedule in the name of a custom order; raises UsageError if it cannot be executed.

    >>> [[str(action) for action in order] for order in custom_order("custom:0F0 0B0 / 1F0 1B0").orders]
    [['0F0', '0B0'], ['1F0', '1B0']]
    """
    try:
        return _parsed([row.split() for row in name.removeprefix(PREFIX).split("/")])
    except OrderError as error:
        where = "" if error.device is None else f", device {error.device}"
        raise UsageError(f"custom order{where}: {error}") from error


def read_custom_order(path: Path) -> str:
    """The name of the schedule in a file; raises UsageError with the line and the reason if it cannot be executed."""
    lines = [line.partition("#")[0].strip() for line in _text_of(path).split("\n")]
    numbers = [number for number, line in enumerate(lines, 1) if line]
    rows = [[x for x in re.split(r"[\s,;]+", lines[number - 1]) if x] for number in numbers]
    if not rows:
        raise UsageError(f"{path} has no actions; {_EXPECTED}")
    try:
        found = _parsed(rows)
    except OrderError as error:
        line = "" if error.device is None else f", line {numbers[error.device]}"
        raise UsageError(f"{path}{line}: {error}") from error
    return PREFIX + " / ".join(" ".join(map(str, order)) for order in found.orders)


def _text_of(path: Path) -> str:
    try:
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(_MOST_CHARACTERS + 1)
    except OSError as error:
        raise UsageError(f"{path} cannot be read as an order: {error.strerror}; {_EXPECTED}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not text; {_EXPECTED}") from error
    if len(text) > _MOST_CHARACTERS:
        raise UsageError(f"{path} has more than {_MOST_CHARACTERS} characters; {_EXPECTED}")
    return text


def _parsed(rows: Sequence[Sequence[str]]) -> Schedule:
    """The schedule in rows of words, one row per device; raises OrderError."""
    orders = []
    for device, row in enumerate(rows):
        try:
            orders.append(tuple(map(Action.parse, row)))
        except ValueError as error:
            raise OrderError(f"{error}; list only computation, transfers follow from it", device=device) from error
    return check_orders(orders)
