"""A custom order: one line of actions for every device, as text.

    # two devices of one stage
    0F0 0F1 0B0 0B1
    1F0 1B0 1F1 1B1

`3F0` is stage 3, forward, micro-batch 0; B is a backward, I and W its halves (input and weight gradients). Actions are
separated by spaces, commas or semicolons. Empty lines, empty cells (torch's CSV has them where a device waits) and what
follows a # are passed over.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from gplan.core import Action
from gplan.core.errors import UsageError
from gplan.schedules.dependencies import OrderError, check_orders

PREFIX = "custom:"
"""What the name of a schedule begins with that is an order itself, in one line, devices separated by slashes."""

_MOST_CHARACTERS = 20_000_000
_EXPECTED = "expected one line of actions a device, such as 0F0 0F1 0B0 0B1"


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomOrder:
    """Orders that can be carried out, and what they are for."""

    orders: tuple[tuple[Action, ...], ...]
    num_stages: int
    num_microbatches: int


def is_custom_order(name: str) -> bool:
    """Whether the name of a schedule is an order itself."""
    return name.startswith(PREFIX)


def read_custom_order(path: Path) -> str:
    """The name of the schedule whose order is in a file; raises UsageError for a file that is none,
    with line and reason."""
    lines = [line.partition("#")[0].strip() for line in _text_of(path).split("\n")]
    numbers = [number for number, line in enumerate(lines, 1) if line]
    rows = [[x for x in re.split(r"[\s,;]+", lines[number - 1]) if x] for number in numbers]
    if not rows:
        raise UsageError(f"{path} has no actions; {_EXPECTED}")
    try:
        made = _made(rows)
    except OrderError as error:
        line = "" if error.device is None else f", line {numbers[error.device]}"
        raise UsageError(f"{path}{line}: {error}") from error
    return PREFIX + " / ".join(" ".join(map(str, order)) for order in made.orders)


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


@lru_cache(maxsize=16)
def custom_order(name: str) -> CustomOrder:
    """The order that the name of a schedule is; raises UsageError for text that is none.

    >>> [[str(action) for action in order] for order in custom_order("custom:0F0 0B0 / 1F0 1B0").orders]
    [['0F0', '0B0'], ['1F0', '1B0']]
    """
    try:
        return _made([row.split() for row in name.removeprefix(PREFIX).split("/")])
    except OrderError as error:
        where = "" if error.device is None else f", device {error.device}"
        raise UsageError(f"custom order{where}: {error}") from error


def _made(rows: Sequence[Sequence[str]]) -> CustomOrder:
    """The order with these words; raises OrderError."""
    orders = tuple(_parsed(row, device) for device, row in enumerate(rows))
    num_stages, num_microbatches = check_orders(orders)
    return CustomOrder(orders=orders, num_stages=num_stages, num_microbatches=num_microbatches)


def _parsed(words: Sequence[str], device: int) -> tuple[Action, ...]:
    try:
        return tuple(Action.parse(word) for word in words)
    except ValueError as error:
        raise OrderError(f"{error}; list only what is computed, transfers follow from it", device=device) from error
