"""Times the update of norms' moving averages at the end of a step.

A stage needs a fixed time, and one in proportion to the channels of its norms. The fixed time is known from an update of
one norm beside one of all norms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from profiler.capture.moving_averages import MovingAverages
from profiler.capture.running_norms import RunningNorm
from profiler.timing.clock import AtOneSpeed, Clock, Samples
from profiler.timing.optimizer_step import MICROBATCHES, SWEPT_BYTES, Update

_NUM_STEPS = 8
_WARMUP = 2
_CHANGE = 1e-3  # of the buffers by a micro-batch; an unchanged norm would not count


SampledAverages: TypeAlias = Callable[[AtOneSpeed, Update], Update]
"""Adds the update of the moving averages to that of the optimizer, once the speed of the host is known."""


def sample_averages(
    norms: Sequence[RunningNorm],
    clock: Clock,
    *,
    device: str = "cpu",
    read_yardstick: Callable[[], object] = lambda: None,
) -> SampledAverages:
    """Sample it on copies of the norms' buffers, as between two steps: with what it reads not in the caches."""
    if not norms:
        return lambda _, update: update
    fewest = min(norms, key=_num_channels)
    of_all, of_one = (
        _sampled([_copy(x, device) for x in some], clock, device, read_yardstick) for some in (norms, [fewest])
    )

    def added(at_one_speed: AtOneSpeed, update: Update) -> Update:
        all_s, one_s = (at_one_speed(x).timing().median_s for x in (of_all, of_one))
        channels = {x.running_mean: _num_channels(x) for x in norms}
        others = sum(channels.values()) - _num_channels(fewest)
        s_per_channel = max(0.0, all_s - one_s) / others if others else 0.0
        fixed_s = max(0.0, one_s - s_per_channel * _num_channels(fewest))
        each_s = {x: s_per_channel * num for x, num in channels.items()}
        step, updates_s = update
        return step.plus(fixed_s=fixed_s, spread_s=sum(each_s.values())), {**updates_s, **each_s}

    return added


def _num_channels(norm: RunningNorm) -> int:
    return norm.running_mean.numel()


def _copy(norm: RunningNorm, device: str) -> RunningNorm:
    """The norm on real buffers of its own; those of the model may be fake tensors."""
    held = [x for x in (norm.running_mean, norm.running_var, norm.num_batches_tracked) if x is not None]
    return norm.backed_by({id(x): torch.ones(x.shape, dtype=x.dtype, device=device) for x in held})


def _sampled(norms: Sequence[RunningNorm], clock: Clock, device: str, read_yardstick: Callable[[], object]) -> Samples:
    averages, samples = MovingAverages(norms), Samples()
    swept = torch.zeros(SWEPT_BYTES if device == "cpu" else 0, dtype=torch.uint8)
    for i in range(_WARMUP + _NUM_STEPS):
        read_yardstick()
        for _ in range(MICROBATCHES):
            with averages.microbatch(norms):
                for norm in norms:
                    norm.running_mean.add_(_CHANGE)
        swept.add_(1)
        clock.time(Samples() if i < _WARMUP else samples, averages.finish)
    clock.flush()
    return samples
