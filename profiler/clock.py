"""Durations with their spread, and samples that other work disturbed.

On a CPU a sample is clean if the thread that computed was on the processor for (nearly) all of the time that passed; a
sample with more waiting than that is refused and counted. With several threads only the calling one is looked at.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from gplan.nouns import Timing

_MOST_WAITING = 0.05  # share of a sample that may pass without the processor
_SHORTEST_WAIT_S = 2e-4  # below this, waiting is the clocks' own grain


@dataclass(slots=True)
class Samples:
    """Durations of one thing, clean and refused."""

    clean_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)

    def add(self, wall_s: float, busy_s: float) -> None:
        """Keep a sample, or refuse it if the processor was elsewhere for too long."""
        is_clean = is_undisturbed(wall_s, busy_s)
        (self.clean_s if is_clean else self.refused_s).append(wall_s)

    def timing(self) -> Timing:
        """Median and quartiles of the clean samples; of the shortest half of all where fewer than three are clean.

        What was never run, such as the backward of a frozen layer, takes no time.
        """
        if not self.clean_s and not self.refused_s:
            return Timing.exactly(0.0, origin="measured")
        values = self.clean_s
        if len(values) < 3:
            everything = sorted(self.clean_s + self.refused_s)
            values = everything[: max(1, (len(everything) + 1) // 2)]
        low_s, median_s, high_s = np.quantile(values, [0.25, 0.5, 0.75]).tolist()
        return Timing(
            median_s=median_s, low_s=low_s, high_s=high_s, num_samples=len(values), num_refused=len(self.refused_s)
        )

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles over the median of the clean samples; infinite below five."""
        if len(self.clean_s) < 5:
            return float("inf")
        low_s, median_s, high_s = np.quantile(self.clean_s, [0.25, 0.5, 0.75])
        return float((high_s - low_s) / 2 / median_s) if median_s else 0.0


class Stopwatch:
    """Wall time and the calling thread's processor time since it was started."""

    def __init__(self) -> None:
        self._busy_s = time.thread_time()
        self._wall_s = time.perf_counter()

    def stop(self) -> tuple[float, float]:
        """Seconds that passed, and seconds on the processor."""
        wall_s = time.perf_counter() - self._wall_s
        return wall_s, time.thread_time() - self._busy_s


def is_undisturbed(wall_s: float, busy_s: float) -> bool:
    """Whether the processor was at hand for the whole of a sample."""
    return wall_s - busy_s <= max(_MOST_WAITING * wall_s, _SHORTEST_WAIT_S)


def median_s(values: Sequence[float]) -> float:
    """The median of some durations, in seconds."""
    return float(np.median(values))
