"""The readings of the yardstick in a run: between actions, so that they see the speeds that the actions see."""

from __future__ import annotations

import time
from collections import defaultdict
from itertools import pairwise

import torch

from gplan.core.host_speed import YardstickTimes
from profiler.timing.clock import CpuClock, CudaClock, Samples
from profiler.timing.yardstick import Yardstick, mean_of_samples, yardstick_parts

_MOST_SHARE = 0.008  # of the time from one reading to the next


class SpeedReadings:
    """Reads the yardstick between the actions of a rank, while the other ranks compute.

    A host can change its speed several times in a step. So a step has many short readings, each right before the action
    that follows a backward, when its gradients are on their way. Before, the rank that waits for them does not compute, and
    if its core and this one share a core of the host, a reading would be too fast. Readings are in no action's time. With
    the torch engine they lengthen a step by up to `_MOST_SHARE`, and a run of less than a second by one, 10 to 15 ms.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock = CpuClock() if device.type == "cpu" else CudaClock()
        self._samples = defaultdict[str, Samples](Samples)
        self._ends_s = [time.time()]  # the start, then the end of each reading; its samples lie between two of these
        self._yardstick = Yardstick(
            self._clock,
            lambda name: self._samples[name],
            yardstick_parts(str(device)),
            share=_MOST_SHARE,
        )

    def between_actions(self) -> None:
        """Read the yardstick, unless it was read a short time ago."""
        if self._yardstick.read_if_due():
            self._ends_s.append(time.time())

    def take(self) -> tuple[YardstickTimes, ...]:
        """The readings since the last call. Waits for the device."""
        self._clock.flush()
        means = [
            mean_of_samples([part.between(start_s, end_s) for part in self._yardstick.parts])
            for start_s, end_s in pairwise(self._ends_s)
        ]
        self._samples.clear()
        del self._ends_s[:-1]
        return tuple(times for times in means if times is not None)
