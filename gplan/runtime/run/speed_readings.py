"""When the ranks of a run read the yardstick: before some steps, while no rank does anything else."""

from __future__ import annotations

import math
import time

import torch
import torch.distributed as dist

from gplan.core import YardstickTimes
from profiler.timing.clock import CpuClock, CudaClock, Samples
from profiler.timing.yardstick import BESIDE, MOST_SHARE, Yardstick, known_times, yardstick_parts

_MOST_READINGS = 9  # at a stop


class SpeedReadings:
    """Reads the yardstick between steps, so that it shows how fast the host is while all ranks compute.

    Before some steps all ranks touch the yardstick's pages, wait for each other, read the parts of BESIDE at the same
    time, and memory one after the other: as often as MOST_SHARE of the time since the start allows, up to `_MOST_READINGS` times.
    """

    def __init__(self, device: torch.device, *, rank: int, num_ranks: int, first_step: int, start_s: float) -> None:
        """`start_s`: when the run began, by time.monotonic."""
        self._device, self._rank, self._num_ranks = device, rank, num_ranks
        clock = CpuClock() if device.type == "cpu" else CudaClock()
        self._yardstick = Yardstick(clock, lambda _: Samples(), yardstick_parts(str(device)))
        self._start_s = start_s
        self._next_step, self._spent_s, self._num_read = first_step, 0.0, 0

    def before_step(self, index: int, *, last_step_s: float) -> YardstickTimes | None:
        """This rank's reading before a step, if there is one; `last_step_s` is how long the step before took."""
        if index < self._next_step:
            return None
        # the same on all ranks, as they must read as often
        own = self._spent_s, time.monotonic() - self._start_s, last_step_s
        touch_s = time.monotonic()
        self._yardstick.touch_pages()
        self._spent_s += time.monotonic() - touch_s
        spent_s, since_s, step_s = self._slowest(*own)
        reading_s, num = spent_s / self._num_read if self._num_read else 0.0, 1
        if reading_s:  # as many as one step allows: a host may change before the next
            num = min(_MOST_READINGS, 1 + int(MOST_SHARE * step_s / reading_s))
        start_s = time.monotonic()
        compute_s, interpreter_s = self._yardstick.seconds(*BESIDE, num_readings=num)
        memory_s = None
        for rank in range(self._num_ranks):
            self._slowest()
            if rank == self._rank:
                (memory_s,) = self._yardstick.seconds("memory", num_readings=num)
        wait_s = (spent_s + num * reading_s) / MOST_SHARE - since_s
        self._next_step = index + max(1, math.ceil(wait_s / step_s) if step_s > 0 else 1)
        self._spent_s += time.monotonic() - start_s
        self._num_read += num
        return known_times([compute_s, memory_s, interpreter_s])

    def _slowest(self, *seconds: float) -> list[float]:
        """The largest over the ranks; all of them have come when it returns.

        A core computes while it waits, as in a step: one that has slept may be slower for a while.
        """
        if self._num_ranks == 1:
            return list(seconds)
        values = torch.tensor((*seconds, 0.0), device=self._device, dtype=torch.float64)
        work = dist.all_reduce(values, dist.ReduceOp.MAX, async_op=True)
        while not work.is_completed():
            time.sleep(0)
        work.wait()
        largest: list[float] = values.tolist()
        return largest[:-1]
