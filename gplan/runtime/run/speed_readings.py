"""When the ranks of a run read the yardstick: before some steps, while no rank does anything else."""

from __future__ import annotations

import math
import time

import torch
import torch.distributed as dist

from gplan.core import YardstickTimes
from profiler.timing.clock import CpuClock, CudaClock, Samples
from profiler.timing.yardstick import BESIDE, MOST_SHARE, Yardstick, yardstick_parts


class SpeedReadings:
    """Reads the yardstick between steps, so that it shows how fast the host is while all ranks compute.

    Before some steps all ranks wait for each other, read the parts of BESIDE at the same time, and memory one after the
    other. The slowest rank's step and stop decide which step is next, so that stops take at most MOST_SHARE of the time.
    """

    def __init__(self, device: torch.device, *, rank: int, num_ranks: int, first_step: int) -> None:
        self._device, self._rank, self._num_ranks = device, rank, num_ranks
        clock = CpuClock() if device.type == "cpu" else CudaClock()
        self._yardstick = Yardstick(clock, lambda _: Samples(), yardstick_parts(str(device)))
        self._next_step, self._stop_s = first_step, 0.0

    def before_step(self, index: int, *, last_step_s: float) -> YardstickTimes | None:
        """This rank's reading before a step, if there is one; `last_step_s` is how long the step before took."""
        if index < self._next_step:
            return None
        stop_s, step_s = self._slowest(self._stop_s, last_step_s)
        start_s = time.monotonic()
        compute_s, interpreter_s = self._yardstick.seconds(*BESIDE)
        memory_s = None
        for rank in range(self._num_ranks):
            self._slowest()
            if rank == self._rank:
                (memory_s,) = self._yardstick.seconds("memory")
        self._next_step = index + max(1, math.ceil(stop_s / MOST_SHARE / step_s) if step_s > 0 else 1)
        self._stop_s = time.monotonic() - start_s
        if compute_s is None or memory_s is None or interpreter_s is None:
            return None
        return YardstickTimes(compute_s=compute_s, memory_s=memory_s, interpreter_s=interpreter_s)

    def _slowest(self, *seconds: float) -> list[float]:
        """The largest over the ranks; all of them have come when it returns."""
        if self._num_ranks == 1:
            return list(seconds)
        values = torch.tensor((*seconds, 0.0), device=self._device, dtype=torch.float64)
        dist.all_reduce(values, dist.ReduceOp.MAX)
        largest: list[float] = values.tolist()
        return largest[:-1]
