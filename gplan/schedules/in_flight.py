"""How many micro-batches are in flight, in closed form: forwards before the first backward, and activations kept.

The orders of 1F1B, eager and interleaved 1F1B are made from these numbers. The search over settings uses them for bounds
and estimates. What a plan keeps at each moment is counted in its order (`gplan/cost/memory_moments.py`).
"""

from __future__ import annotations

from collections.abc import Callable

NUM_WARMUP: dict[str, Callable[[int], int]] = {"1f1b": lambda left: left, "eager-1f1b": lambda left: 2 * left - 1}
"""Forwards on a stage before its first backward, by how many stages are left from it on (K - s)."""

_MAX_IN_FLIGHT: dict[str, Callable[[int, int, int], int]] = {
    "1f1b": lambda k, m, v: min(m, NUM_WARMUP["1f1b"](k)),
    "eager-1f1b": lambda k, m, v: min(m, NUM_WARMUP["eager-1f1b"](k)),
    "interleaved-1f1b": lambda k, m, v: min(m * v, num_interleaved_warmup(k, v, device=0)),
    "zb-h1": lambda k, m, v: min(m, k),
    "zb-v": lambda k, m, v: min(2 * m, 2 * k),
}


def num_interleaved_warmup(num_devices: int, num_chunks: int, *, device: int) -> int:
    """Forwards of interleaved 1F1B on a device before its first backward."""
    if num_chunks == 1:
        return NUM_WARMUP["1f1b"](num_devices - device)
    return 2 * (num_devices - device - 1) + (num_chunks - 1) * num_devices + 1


def max_in_flight(schedule: str, *, num_devices: int, num_microbatches: int, num_chunks: int) -> int:
    """Pairs of micro-batch and stage that the fullest device keeps activations of; all, where a schedule has no formula.

    >>> max_in_flight("1f1b", num_devices=4, num_microbatches=16, num_chunks=1)
    4
    """
    of_schedule = _MAX_IN_FLIGHT.get(schedule.partition(":")[0])
    if of_schedule is None:
        return num_microbatches * num_chunks
    return of_schedule(num_devices, num_microbatches, num_chunks)
