"""How fast a host was: the times of a yardstick, fixed work in three parts, in windows of a profile or of a run.

The slowdown is a weighted geometric mean of the three parts' times over their references (`slowdown_of`). A profile
brings its samples to the reference, its mean speed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gplan.core.checks import check_not_negative, check_positive
from gplan.core.host_load import HostLoad
from gplan.core.units import seconds_text

EQUAL_SPEED = "at equal host speed"
"""Said of an error whose prediction is at the speed that the host had in the run."""
ONE_PHASE = 1.15
"""The largest ratio of slowdowns within a phase."""

_MOST_OFF = 1.4  # times the median of the windows of a run, for which one counts as it is
_MOST_CHANGE = 2.0  # of the slowdown within a profile, before a warning


@dataclass(frozen=True, slots=True, kw_only=True)
class YardstickTimes:
    """Seconds of the three parts of the yardstick: means."""

    compute_s: float  # products: of matrices in a core's caches, and with weights that are not
    memory_s: float  # sums of vectors that are not in the caches
    interpreter_s: float  # passes of a tiny model: Python and PyTorch's own code; on a GPU launches of small kernels

    def __post_init__(self) -> None:
        check_positive(self, "compute_s", "memory_s", "interpreter_s")

    def times(self, factor: float) -> YardstickTimes:
        """Every part times a factor."""
        return YardstickTimes(
            compute_s=factor * self.compute_s,
            memory_s=factor * self.memory_s,
            interpreter_s=factor * self.interpreter_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedWindow:
    """The yardstick in one window of a profile."""

    start_s: float  # since the profile began
    end_s: float
    times: YardstickTimes
    num_readings: int

    def __post_init__(self) -> None:
        check_not_negative(self, "start_s", "end_s", "num_readings")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpeed:
    """The yardstick in one window of a run's steps, read by each rank between its actions."""

    first_step: int
    end_step: int
    ranks: tuple[YardstickTimes | None, ...]  # None for one without a reading
    compute_s: tuple[float, ...]  # by rank the processor time of its actions in such a step

    def __post_init__(self) -> None:
        check_not_negative(self, "first_step", "end_step")
        if len(self.compute_s) != len(self.ranks) or not all(math.isfinite(x) and x > 0 for x in self.compute_s):
            raise ValueError(
                f"compute_s is {self.compute_s}; expected seconds above 0 for each of the {len(self.ranks)} ranks"
            )
        if self.end_step <= self.first_step:
            raise ValueError(f"end_step is {self.end_step}; expected more than first_step, {self.first_step}")


PartWeights: TypeAlias = tuple[float, float, float]
"""How much compute, memory and interpreter count in the slowdown of some work; 1 together."""

PASS_WEIGHTS: PartWeights = (1 / 3, 1 / 3, 1 / 3)
"""For forwards and backwards on a CPU if the model's operations were not counted."""
GPU_PASS_WEIGHTS: PartWeights = (2 / 3, 1 / 3, 0.0)
"""For forwards and backwards on a GPU, whose host launches kernels while earlier ones run; assumed, not fitted."""
UPDATE_WEIGHTS: PartWeights = (1 / 2, 1 / 2, 0.0)
"""For updates of weights, which compute little for the memory that they read and write."""


def slowdown_of(ratios: NDArray[np.float64], weights: PartWeights) -> NDArray[np.float64]:
    """The weighted geometric mean of the three ratios, times of the parts over their references: [3, ...] to [...].

    >>> float(slowdown_of(np.array([1.0, 4.0, 8.0]), UPDATE_WEIGHTS))
    2.0
    """
    slowdowns: NDArray[np.float64] = np.exp(np.tensordot(weights, np.log(ratios), 1))
    return slowdowns


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpeed:
    """The speed that the times of a profile belong to, and how it changed while the profile was measured."""

    reference: YardstickTimes
    windows: tuple[SpeedWindow, ...] = ()  # left out of plans
    load: HostLoad | None = None  # evidence of other work while layers were timed; None: not measured
    beside: YardstickTimes | None = None  # the reference beside other processes that compute; None: the same
    weights: PartWeights = PASS_WEIGHTS  # of the parts in the slowdown of passes

    def __post_init__(self) -> None:
        if not (min(self.weights) >= 0.0 and math.isclose(sum(self.weights), 1.0, abs_tol=1e-6)):
            raise ValueError(f"weights is {self.weights}; expected three numbers of 0 or more whose sum is 1")

    def slowdown(self, times: YardstickTimes, *, num_devices: int = 1, weights: PartWeights | None = None) -> float:
        """How many times as long work takes at these times of the yardstick as at the reference.

        `num_devices` computed at the same time; `weights` are those of the parts, by default of passes.

        >>> once = YardstickTimes(compute_s=1e-3, memory_s=1e-3, interpreter_s=1e-3)
        >>> round(HostSpeed(reference=once).slowdown(once.times(4.0)), 12)
        4.0
        """
        return float(slowdown_of(np.array(self.ratios(times, num_devices=num_devices)), weights or self.weights))

    def slowed_by(self, slowdown: float) -> HostSpeed:
        """The speed at which the model's work takes `slowdown` times as long, without windows."""
        beside = self.beside and self.beside.times(slowdown)
        return replace(self, reference=self.reference.times(slowdown), beside=beside, windows=())

    def ratios(self, times: YardstickTimes, *, num_devices: int = 1) -> tuple[float, float, float]:
        """The times of the compute, memory and interpreter parts over their references."""
        of = self.reference if num_devices == 1 or self.beside is None else self.beside
        return (
            times.compute_s / of.compute_s,
            times.memory_s / of.memory_s,
            times.interpreter_s / of.interpreter_s,
        )

    def slowdowns(
        self, steps: Sequence[StepSpeed], *, weights: PartWeights | None = None
    ) -> tuple[tuple[float, ...], ...]:
        """By rank the slowdown in each window of steps, see `slowdown`; () unless every rank has a reading.

        A window's share is its compute time over the mean of the windows. The mean of reading over share is the slowdown of
        the run; windows far off the median count as the median, as what disturbs a reading need not disturb the steps. Times
        the share it is that of the window.
        Steps can also differ in their work, as with inputs of several shapes: so no slowdown is outside the range of the
        readings.

        >>> once, twice = (YardstickTimes(compute_s=x, memory_s=x, interpreter_s=x) for x in (1e-3, 2e-3))
        >>> steps = [
        ...     StepSpeed(first_step=i, end_step=i + 1, ranks=(reading,), compute_s=(seconds,))
        ...     for i, (reading, seconds) in enumerate([(once, 1.0), (twice, 1.0), (once, 1.0), (twice, 2.0)])
        ... ]
        >>> HostSpeed(reference=once).slowdowns(steps)
        ((1.0, 1.0, 1.0, 2.0),)
        """
        num_ranks, found = len(steps[0].ranks) if steps else 0, []
        for rank in range(num_ranks):
            mean_s = fmean(x.compute_s[rank] for x in steps)
            shares = [x.compute_s[rank] / mean_s for x in steps]
            read = [
                (self.slowdown(times, num_devices=num_ranks, weights=weights), share)
                for x, share in zip(steps, shares, strict=True)
                if (times := x.ranks[rank]) is not None
            ]
            if not read:
                return ()
            least, most = (end(reading for reading, _ in read) for end in (min, max))
            whole = float(mean_near_median([reading / share for reading, share in read], most=_MOST_OFF))
            found.append(tuple(min(most, max(least, whole * share)) for share in shares))
        return tuple(found)

    @property
    def phases(self) -> tuple[tuple[float, float, float], ...]:
        """(start, end, slowdown) of stretches of windows of about the same speed."""
        return speed_phases([(x.start_s, x.end_s, self.slowdown(x.times)) for x in self.windows])

    @property
    def change(self) -> float:
        """The largest ratio of the slowdowns of two phases; 1 if no windows are known."""
        slowdowns = [slowdown for _, _, slowdown in self.phases]
        return max(slowdowns) / min(slowdowns) if slowdowns else 1.0

    @property
    def doubts(self) -> tuple[str, ...]:
        """A warning if the speed changed by more than a factor of 2, with the phases."""
        if self.change <= _MOST_CHANGE:
            return ()
        phases = ", ".join(
            f"{1 / x:.2f} from {seconds_text(start)} to {seconds_text(end)}" for start, end, x in self.phases
        )
        return (
            f"the speed of this host changed by a factor of {self.change:.1f} while the profile was "
            f"measured: {phases} (1 is the speed that the times are brought to); they are less certain than "
            "those of a steady host",
        )


def mean_near_median(values: ArrayLike, *, most: float) -> NDArray[np.float64]:
    """The mean along the last axis, where values more than `most` times off the median count as the median.

    So disturbances do not count, and the usual spread, which may be skewed, does.

    >>> float(mean_near_median([1.0, 1.0, 1.25, 9.0], most=2.0)), float(mean_near_median([1.0, 1.0, 1.75], most=2.0))
    (1.09375, 1.25)
    """
    found = np.asarray(values, dtype=np.float64)
    middle = np.median(found, axis=-1, keepdims=True)
    is_near = (found <= most * middle) & (middle <= most * found)
    means: NDArray[np.float64] = np.where(is_near, found, middle).mean(axis=-1)
    return means


def mean_of_times(times: Iterable[YardstickTimes]) -> YardstickTimes | None:
    """The mean of each part; None without any reading."""
    found = list(times)
    if not found:
        return None
    return YardstickTimes(
        compute_s=fmean(x.compute_s for x in found),
        memory_s=fmean(x.memory_s for x in found),
        interpreter_s=fmean(x.interpreter_s for x in found),
    )


def speed_phases(windows: Sequence[tuple[float, float, float]]) -> tuple[tuple[float, float, float], ...]:
    """Windows (start, end, slowdown) joined where the slowdown is about the same; the mean slowdown of each phase.

    >>> speed_phases([(0, 1, 1.0), (1, 2, 1.1), (2, 3, 2.0)])
    ((0, 2, 1.05), (2, 3, 2.0))
    """
    phases: list[list[tuple[float, float, float]]] = []
    for window in windows:
        found = [slowdown for _, _, slowdown in (*phases[-1], window)] if phases else []
        if found and max(found) <= ONE_PHASE * min(found):
            phases[-1].append(window)
        else:
            phases.append([window])
    return tuple((x[0][0], x[-1][1], sum(slowdown for _, _, slowdown in x) / len(x)) for x in phases)
