"""An estimate of a good plan's step, which decides the strategies to solve first; it proves nothing.

It assumes equal stages: M micro-batches on every device and the bubble of equal stages. Where the memory is too small
for the activations of the fullest device, as many layers as needed are recomputed, or all if layers cannot be selected.
"""

from __future__ import annotations

import numpy as np

from gplan.partition.validation import why_not_selected
from gplan.schedules.in_flight import max_in_flight
from gplan.schedules.registry import schedule_info
from gplan.strategy_search.bounds import StrategyBounds

_SHARE_OF_WAITS = {"zb-h1": 1 / 3, "zb-v": 1 / 3}
"""The bubble of equal stages as a share of (K-1) micro-batches on a device, over its chunks; 1 for other schedules."""


def estimated_step_s(bounds: StrategyBounds, *, memory_bytes: int | None) -> float:
    """Seconds of a step; at least its bound."""
    problem = bounds.problem
    num_devices, num_chunks = problem.num_devices, problem.num_stages / problem.num_devices
    waits = (num_devices - 1) / num_chunks * _SHARE_OF_WAITS.get(problem.schedule, 1.0)
    again_s = 0.0 if problem.recompute == "always" else bounds.whole_recompute_s  # else it is in `through_s`
    through_s = bounds.through_s + _recomputed_share(bounds, memory_bytes) * again_s
    balanced_s = max(through_s / num_devices, bounds.largest_s if num_chunks == 1 else 0.0)
    loop_s = (problem.num_microbatches + waits) * balanced_s + bounds.transfers_s / num_chunks
    return max(loop_s + bounds.tail_s / num_devices, bounds.step_s)


def _recomputed_share(bounds: StrategyBounds, memory_bytes: int | None) -> float:
    """The share of the recompute that is needed."""
    problem = bounds.problem
    if problem.recompute == "except-last":
        return 1 - 1 / problem.num_microbatches
    missing = 0.0 if memory_bytes is None else _missing_share(bounds, memory_bytes)
    return 1.0 if missing and why_not_selected(problem.schedule) else missing


def _missing_share(bounds: StrategyBounds, memory_bytes: int) -> float:
    """The share of the activations that exceeds the memory of the fullest device, with equal stages."""
    problem, whole = bounds.problem, bounds.whole_parts
    num_stages, num_devices, num_microbatches = problem.num_stages, problem.num_devices, problem.num_microbatches
    num_chunks = schedule_info(problem.schedule).num_chunks
    num_in_flight = max_in_flight(
        problem.schedule, num_devices=num_devices, num_microbatches=num_microbatches, num_chunks=num_chunks
    )
    kept = num_in_flight * float(whole.stash[0]) / num_stages
    always = float(whole.weight[0] + whole.gradient[0] + whole.optimizer[0]) / num_devices
    if num_devices > 1:
        crossing = problem.costs.crossing.activation_bytes + problem.costs.crossing.gradient_bytes
        always += problem.costs.num_buffers * num_chunks * float(np.median(crossing[1:-1]))  # buffers to receive in
    return min(1.0, max(0.0, (always + kept - memory_bytes) / kept)) if kept else 0.0
