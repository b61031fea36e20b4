"""Checks that the nouns share: each raises ValueError with the field, what was found and what was expected."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

Origin: TypeAlias = Literal["measured", "computed", "given"]
"""Where a figure comes from: a clock or an allocator, a formula, or the user."""

RecomputeMode: TypeAlias = Literal["never", "always", "except-last", "selected"]
"""What a stage recomputes in the backward pass instead of keeping it: the whole stage, for no micro-batch, for all or
for all but the last; or the layers that each stage names (`Stage.recompute_layers`), one by one, for every
micro-batch."""

Objective: TypeAlias = Literal["step-time", "max-stage", "max-device-load", "max-compute"]
"""What the balancer minimises: the simulated step; the largest stage with its transfers hop by hop; with direct
transfers between any two devices, on at most K devices (dnn-partitioning); without any transfers (PipeDream's
planner)."""

Granularity: TypeAlias = Literal["layer", "op"]
"""What a layer of a profile is: what the author wrote as a unit, or one operation."""

LossReduction: TypeAlias = Literal["mean", "sum"]
"""How the loss combines the samples of a batch."""

OperationKind: TypeAlias = Literal[
    "matmul", "convolution", "attention", "normalization", "pointwise", "reduction", "indexing"
]
"""Operations that reach a like share of what a device can do."""

RECOMPUTE_MODES: tuple[str, ...] = get_args(RecomputeMode)
OBJECTIVES: tuple[str, ...] = get_args(Objective)


def check_not_negative(noun: object, *fields: str) -> None:
    """Each field is a finite number of 0 or more."""
    for field in fields:
        value = getattr(noun, field)
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"{field} is {value!r}; expected a finite number of 0 or more")


def check_positive(noun: object, *fields: str) -> None:
    """Each field is a finite number above 0."""
    for field in fields:
        value = getattr(noun, field)
        if not math.isfinite(value) or value <= 0:
            raise ValueError(f"{field} is {value!r}; expected a finite number above 0")


def check_not_empty(field: str, values: Sequence[object]) -> None:
    """The sequence has at least one member."""
    if not values:
        raise ValueError(f"{field} is empty; expected at least one entry")
