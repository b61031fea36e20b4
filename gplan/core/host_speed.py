"""How fast a host was: the times of a yardstick, fixed work in three parts, in windows of a profile or of a run.

The slowdown is found from the three parts' times over their references (`slowdown_of`). A part is read in less than a
millisecond, and a disturbance of that length seldom hits two of them. A profile brings its samples to the reference,
its mean speed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from gplan.core.checks import check_not_negative, check_positive
from gplan.core.host_load import HostLoad
from gplan.core.units import seconds_text

ONE_PHASE = 1.15
"""The largest ratio of slowdowns within a phase."""

LEAST_RESPONSE, MOST_RESPONSE = 0.25, 2.0
"""The smallest and the largest response."""

_MOST_CHANGE = 2.0  # of the slowdown within a profile, before a warning


@dataclass(frozen=True, slots=True, kw_only=True)
class YardstickTimes:
    """Seconds of the three parts of the yardstick: means."""

    compute_s: float  # products: of matrices in a core's caches, and with weights that are not
    memory_s: float  # sums of vectors that are not in the caches
    interpreter_s: float  # Python; on a GPU launches of small kernels

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


def response_within_bounds(response: float) -> float:
    """The nearest response."""
    return float(min(MOST_RESPONSE, max(LEAST_RESPONSE, response)))


def check_response(response: float) -> None:
    """Raise ValueError unless it is within its bounds."""
    if not LEAST_RESPONSE <= response <= MOST_RESPONSE:
        raise ValueError(f"response is {response!r}; expected {LEAST_RESPONSE} to {MOST_RESPONSE:g}")


SlowdownRule: TypeAlias = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""The slowdowns of some work by the times of the three parts over their references, compute first: [3, ...] to [...]."""


def slowdown_of(ratios: NDArray[np.float64]) -> NDArray[np.float64]:
    """The `SlowdownRule` for forwards and backwards, which are mostly products of matrices.

    Compute counts two thirds and the median of the three a third. While other work slows memory and the interpreter by
    1.3 but compute by 1.1, a step takes about 1.15 times as long.

    >>> float(slowdown_of(np.array([1.0, 8.0, 1.0]))), float(slowdown_of(np.array([1.0, 8.0, 8.0])))
    (1.0, 2.0)
    """
    slowdowns: NDArray[np.float64] = np.cbrt(ratios[0] ** 2 * np.median(ratios, axis=0))
    return slowdowns


def update_slowdown_of(ratios: NDArray[np.float64]) -> NDArray[np.float64]:
    """The `SlowdownRule` for updates of weights, which compute little for the memory that they read and write.

    Compute and memory count half each.

    >>> float(update_slowdown_of(np.array([1.0, 4.0, 1.0])))
    2.0
    """
    slowdowns: NDArray[np.float64] = np.sqrt(ratios[0] * ratios[1])
    return slowdowns


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpeed:
    """The speed that the times of a profile belong to, and how it changed while the profile was measured."""

    reference: YardstickTimes
    windows: tuple[SpeedWindow, ...] = ()  # left out of plans
    load: HostLoad | None = None  # evidence of other work while layers were timed; None: not measured
    beside: YardstickTimes | None = None  # the reference beside other processes that compute; None: the same
    response: float = 1.0  # an exponent: of the yardstick's slowdown, to give that of the model

    def __post_init__(self) -> None:
        check_response(self.response)

    def slowdown(self, times: YardstickTimes, *, num_devices: int = 1, rule: SlowdownRule = slowdown_of) -> float:
        """How many times as long the model's work takes at these times of the yardstick as at the reference.

        `num_devices` computed at the same time. `rule` says for which work: by default `slowdown_of`, of passes.

        >>> once = YardstickTimes(compute_s=1e-3, memory_s=1e-3, interpreter_s=1e-3)
        >>> slow = YardstickTimes(compute_s=4e-3, memory_s=4e-3, interpreter_s=9e-3)
        >>> HostSpeed(reference=once).slowdown(slow), HostSpeed(reference=once, response=0.5).slowdown(slow)
        (4.0, 2.0)
        """
        return float(self.yardstick_slowdown(times, num_devices=num_devices, rule=rule) ** self.response)

    def yardstick_slowdown(
        self, times: YardstickTimes, *, num_devices: int = 1, rule: SlowdownRule = slowdown_of
    ) -> float:
        """How many times as long the yardstick takes as at the reference: `slowdown` without the response."""
        return float(rule(np.array(self.ratios(times, num_devices=num_devices))))

    def slowed_by(self, slowdown: float) -> HostSpeed:
        """The speed at which the model's work takes `slowdown` times as long, without windows."""
        factor = slowdown ** (1.0 / self.response)
        beside = self.beside and self.beside.times(factor)
        return replace(self, reference=self.reference.times(factor), beside=beside, windows=())

    def ratios(self, times: YardstickTimes, *, num_devices: int = 1) -> tuple[float, float, float]:
        """The times of the compute, memory and interpreter parts over their references."""
        of = self.reference if num_devices == 1 or self.beside is None else self.beside
        return (
            times.compute_s / of.compute_s,
            times.memory_s / of.memory_s,
            times.interpreter_s / of.interpreter_s,
        )

    def slowdowns(
        self, steps: Sequence[StepSpeed], *, rule: SlowdownRule = slowdown_of
    ) -> tuple[tuple[float, ...], ...]:
        """By rank the slowdown in each window of steps, see `slowdown`; () unless every rank has a reading.

        A window's share is its compute time over the mean of the windows. The middle mean of reading over share is the
        slowdown of the run: what disturbs a reading need not disturb the steps. Times the share it is that of the window.
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
                (self.slowdown(times, num_devices=num_ranks, rule=rule), share)
                for x, share in zip(steps, shares, strict=True)
                if (times := x.ranks[rank]) is not None
            ]
            if not read:
                return ()
            least, most = (end(reading for reading, _ in read) for end in (min, max))
            whole = middle_mean([reading / share for reading, share in read])
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


def middle_mean(values: Sequence[float]) -> float:
    """The mean without the lowest and the highest quarter, which leaves out bursts.

    >>> middle_mean([1.0, 1.0, 1.2, 9.0])
    1.1
    """
    quarter = len(values) // 4
    return fmean(sorted(values)[quarter : len(values) - quarter])


def mean_over_lower_quartile(values: Sequence[float]) -> float:
    """At least 1: how much longer work took in the mean than in its quick moments.

    >>> mean_over_lower_quartile([1.0, 1.0, 1.0, 2.0])
    1.25
    """
    return max(1.0, fmean(values) / float(np.quantile(values, 0.25)))


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
