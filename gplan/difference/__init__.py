"""Two profiles held against each other: what became slower or faster, beyond the noise, and what became larger."""

from gplan.difference.changes import (
    BytesChange,
    Change,
    Difference,
    LayerDifference,
    SizeDifference,
    TimeChange,
    Verdict,
)
from gplan.difference.profiles import difference, profile_in

__all__ = [
    "BytesChange",
    "Change",
    "Difference",
    "LayerDifference",
    "SizeDifference",
    "TimeChange",
    "Verdict",
    "difference",
    "profile_in",
]
