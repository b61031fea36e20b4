"""Literal types, and checks of fields that the value types share: each raises ValueError with found and expected."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from typing import Literal, TypeAlias, get_args

Origin: TypeAlias = Literal["measured", "computed", "given"]
"""Where a number comes from: a clock or an allocator, a formula, or the user."""

RecomputeMode: TypeAlias = Literal["never", "always", "except-last", "selected"]
"""What a stage recomputes in the backward pass instead of keeping it: the whole stage for no micro-batch, for all, or for
all but the last; or, with "selected", the layers in `Stage.recompute_layers`, one by one, for every micro-batch."""

Objective: TypeAlias = Literal["step-time", "max-stage"]
"""What the planner minimizes: the simulated step, or the time of the slowest stage with its transfers."""

Sharding: TypeAlias = Literal["none", "optimizer", "weights"]
"""What the replicas of a stage divide among them: nothing, the optimizer's state (ZeRO-1), or parameters too (FSDP)."""

Granularity: TypeAlias = Literal["auto", "layer", "op"]
"""What a layer of a profile is: what the author wrote as a unit, or one operation."""

LossReduction: TypeAlias = Literal["mean", "sum"]
"""How the loss combines the samples of a batch."""

CollectiveKind: TypeAlias = Literal["all_reduce", "all_gather", "reduce_scatter"]
"""What several devices do with a tensor together."""

OperationKind: TypeAlias = Literal[
    "matmul", "convolution", "attention", "normalization", "pointwise", "reduction", "indexing"
]
"""Kinds of operations; those of one kind reach a similar share of the peak rates of a device."""

RECOMPUTE_MODES: tuple[RecomputeMode, ...] = get_args(RecomputeMode)
SHARDINGS: tuple[Sharding, ...] = get_args(Sharding)
OBJECTIVES: tuple[str, ...] = get_args(Objective)
COLLECTIVE_KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)


def _check(value: object, fields: Iterable[str], is_right: Callable[[float], bool], expected: str) -> None:
    for field in fields:
        number = getattr(value, field)
        if not is_right(number):
            raise ValueError(f"{field} is {number!r}; expected {expected}")


def check_not_negative(value: object, *fields: str) -> None:
    """Each field is a finite number of 0 or more."""
    _check(value, fields, lambda x: 0 <= x < math.inf, "a finite number of 0 or more")


def check_amounts(value: object, *, signed: str = "") -> None:
    """Each field that counts something, or has seconds or bytes, is a finite number of 0 or more, or None.

    The field `signed` may be negative.
    """
    for name in _amounts(type(value)):  # type: ignore[arg-type]  # a class is hashable
        number = getattr(value, name)
        if number is not None and not 0 <= number < math.inf and name != signed:
            check_not_negative(value, name)


@cache
def _amounts(kind: type) -> tuple[str, ...]:
    names = (x.name for x in fields(kind))
    return tuple(x for x in names if x.startswith("num_") or x.endswith(("_s", "_bytes")))


def check_positive(value: object, *fields: str) -> None:
    """Each field is a finite number above 0."""
    _check(value, fields, lambda x: 0 < x < math.inf, "a finite number above 0")


def check_names(field: str, *names: str) -> None:
    """No name has a control character, such as a line break, which could put code into an exported file."""
    for name in names:
        if not name.isprintable():
            raise ValueError(f"{field} is {name!r}; expected a name without control characters")


def check_not_empty(field: str, values: Sequence[object]) -> None:
    """The sequence has at least one member."""
    if not values:
        raise ValueError(f"{field} is empty; expected at least one entry")


def check_factor(value: object, *fields: str) -> None:
    """Each field is a factor from 1e-6 to 1e6."""
    check_positive(value, *fields)
    for field in fields:
        if wrong := FACTOR.violation(getattr(value, field)):
            raise ValueError(f"{field} is {wrong}")


def check_slow_down(value: object, *fields: str) -> None:
    """Each field is a finite factor of 1 or more."""
    _check(value, fields, lambda x: 1 <= x < math.inf, "a finite factor of 1 or more")


def check_share(value: object, *fields: str) -> None:
    """Each field is a number from 0 to 1."""
    _check(value, fields, lambda x: 0 <= x <= 1, "a share from 0 to 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The range of the absolute values of numbers of one kind; 0 is always allowed."""

    least: float = 0.0
    most: float
    expected: str

    def violation(self, number: float) -> str:
        """The number and what was expected instead; "" if it is within the bounds."""
        size = abs(number)
        if size == 0 or self.least <= size <= self.most:
            return ""
        is_long = isinstance(number, int) and size > 10**30
        found = f"about 2^{size.bit_length() - 1}" if isinstance(size, int) and is_long else repr(number)
        return f"{found}; expected {self.expected}"


SECONDS = Bounds(least=1e-30, most=1e12, expected="seconds, 0 or from 1e-30 to 1e12")
RATE = Bounds(least=1e-3, most=1e40, expected="bytes a second, from 1e-3 to 1e40")
BYTES = Bounds(most=2**50, expected="at most 2^50 bytes, which is 1 PiB")
FACTOR = Bounds(least=1e-6, most=1e6, expected="a factor from 1e-6 to 1e6")
COUNT = Bounds(most=2**50, expected="a count of at most 2^50")
OPERATIONS = Bounds(most=2**60, expected="a count of at most 2^60")
INTEGER = Bounds(most=2**60, expected="an integer of at most 2^60")
NUMBER = Bounds(least=1e-60, most=1e60, expected="0 or a number from 1e-60 to 1e60")


@lru_cache(maxsize=1000)
def bounds_of(field: str, *, is_integer: bool) -> Bounds:
    """The bounds of a number in a file, by the unit at the end of its field's name.

    Within them, sums over layers and micro-batches stay finite, and 8,191 of the largest sizes sum to less than 2^63.

    >>> bounds_of("forward_s", is_integer=False).violation(1e308)
    '1e+308; expected seconds, 0 or from 1e-30 to 1e12'
    """
    if field.endswith("bytes_per_s"):
        return RATE
    if field.endswith(("_s", "seconds")):
        return SECONDS
    if field in ("memory_bytes", "memory_limit_bytes"):  # only compared, never summed
        return INTEGER
    if field.endswith("bytes"):
        return BYTES
    if field == "speed":
        return FACTOR
    if field in ("num_flops", "num_operations"):
        return OPERATIONS
    if field.startswith("num_") or field == "microbatch_size":
        return COUNT
    return INTEGER if is_integer else NUMBER
