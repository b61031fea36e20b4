"""Times what a run does for norms' moving averages: keep them around each forward, and update them once a step.

For the update a stage takes a fixed time and a time per channel. Both follow from timing one norm alone and all norms
together. Everything here works on copies of the norms' buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import TypeAlias

import torch

from profiler.capture.chain import Chain
from profiler.capture.moving_averages import MovingAverages, RunningNorm
from profiler.timing.clock import Clock, Samples, cold_caches
from profiler.timing.optimizer_step import MICROBATCHES, WARMUP

_NUM_STEPS = 8
_CHANGE = 1e-3  # of the buffers by a micro-batch; an unchanged norm would not count


Around: TypeAlias = Callable[[], AbstractContextManager[None]]
"""Returns the context manager around a forward."""


def keeping_averages(norms: Iterable[RunningNorm]) -> Around:
    """What a run has around each forward with these norms: keep their averages, then restore them."""
    copies = [_copy(x, x.running_mean.device) for x in {id(x.running_mean): x for x in norms}.values()]
    if not copies:
        return nullcontext
    averages, calls = MovingAverages(copies), count()

    def around() -> AbstractContextManager[None]:
        if next(calls) % MICROBATCHES == 0:
            averages.discard()  # the next step begins
        return averages.microbatch(copies)

    return around


def time_averages(chain: Chain, clock: Clock, *, device: str = "cpu") -> tuple[float, list[float]]:
    """Time the update with cold caches, as at the end of a step: the fixed seconds of a stage, and those of each layer."""
    by_layer = _norms_of_layers(chain)
    norms = [norm for some in by_layer for norm in some]
    channels = [sum(map(_num_channels, some)) for some in by_layer]
    if not norms:
        return 0.0, [0.0] * len(chain)
    fewest = min(norms, key=_num_channels)
    all_s, one_s = (
        _sampled([_copy(x, device) for x in some], clock, device).timing().median_s for some in (norms, [fewest])
    )
    others = sum(channels) - _num_channels(fewest)
    s_per_channel = max(0.0, all_s - one_s) / others if others else 0.0
    return max(0.0, one_s - s_per_channel * _num_channels(fewest)), [s_per_channel * x for x in channels]


def _norms_of_layers(chain: Chain) -> list[list[RunningNorm]]:
    """By layer its norms; a norm of several layers counts in the first one."""
    seen, found = set[int](), []
    for layer in range(len(chain)):
        found.append([x for x in chain.norms(layer, layer + 1) if id(x.running_mean) not in seen])
        seen.update(id(x.running_mean) for x in found[-1])
    return found


def _num_channels(norm: RunningNorm) -> int:
    return norm.running_mean.numel()


def _copy(norm: RunningNorm, device: str | torch.device) -> RunningNorm:
    """The norm on real buffers of its own; those of the model may be fake tensors."""
    return norm.backed_by({id(x): torch.ones(x.shape, dtype=x.dtype, device=device) for x in norm.buffers})


def _sampled(norms: Sequence[RunningNorm], clock: Clock, device: str) -> Samples:
    averages, samples, cool = MovingAverages(norms), Samples(), cold_caches(device)
    for i in range(WARMUP + _NUM_STEPS):
        for _ in range(MICROBATCHES):
            with averages.microbatch(norms):
                for norm in norms:
                    norm.running_mean.add_(_CHANGE)
        cool()
        clock.time(Samples() if i < WARMUP else samples, averages.finish)
    clock.flush()
    return samples
