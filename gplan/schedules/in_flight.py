"""How many forwards a device runs before its first backward, in closed form.

The orders of 1F1B, eager and interleaved 1F1B are made from these numbers. What a plan keeps at each moment is counted in its order (`gplan/cost/memory_moments.py`).
"""

from __future__ import annotations

from collections.abc import Callable

NUM_WARMUP: dict[str, Callable[[int], int]] = {"1f1b": lambda left: left, "eager-1f1b": lambda left: 2 * left - 1}
"""Forwards on a stage before its first backward, by how many stages are left from it on (K - s)."""


def num_interleaved_warmup(num_devices: int, num_chunks: int, *, device: int) -> int:
    """Forwards of interleaved 1F1B on a device before its first backward."""
    if num_chunks == 1:
        return NUM_WARMUP["1f1b"](num_devices - device)
    return 2 * (num_devices - device - 1) + (num_chunks - 1) * num_devices + 1
