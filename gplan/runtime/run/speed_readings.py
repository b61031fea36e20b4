"""When the ranks of a run read the yardstick: one after the other, before some steps."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from gplan.core import YardstickTimes
from profiler.timing.clock import CpuClock, CudaClock, Samples
from profiler.timing.yardstick import MOST_SHARE, Yardstick, yardstick_parts


class SpeedReadings:
    """Reads the yardstick as a profile does: once at a time, while no other rank works.

    Before some steps all ranks wait for each other and read one after the other. The slowest rank's step and reading
    decide which step is next, so that readings take at most MOST_SHARE of the time.
    """

    def __init__(self, device: torch.device, *, rank: int, num_ranks: int, first_step: int) -> None:
        self._device, self._rank, self._num_ranks = device, rank, num_ranks
        clock = CpuClock() if device.type == "cpu" else CudaClock()
        self._yardstick = Yardstick(clock, lambda _: Samples(), yardstick_parts(str(device)))
        self._next_step = first_step

    def before_step(self, index: int, *, last_step_s: float) -> YardstickTimes | None:
        """This rank's reading before a step, if there is one; `last_step_s` is how long the step before took."""
        if index < self._next_step:
            return None
        times = None
        for rank in range(self._num_ranks):
            reading_s, step_s = self._slowest(self._yardstick.reading_s, last_step_s)
            if rank == self._rank:
                times = self._yardstick.times()
        num_steps = self._num_ranks * reading_s / MOST_SHARE / step_s if step_s > 0 else 1.0
        self._next_step = index + max(1, math.ceil(num_steps))
        return times

    def _slowest(self, *seconds: float) -> list[float]:
        """The largest over the ranks; all of them have come when it returns."""
        if self._num_ranks == 1:
            return list(seconds)
        values = torch.tensor(seconds, device=self._device, dtype=torch.float64)
        dist.all_reduce(values, dist.ReduceOp.MAX)
        largest: list[float] = values.tolist()
        return largest
