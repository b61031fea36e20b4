"""How a host was while something was measured: time stolen by its hypervisor, waits for cores, and its speed.

The speed is known by a yardstick: a fixed piece of work that is timed beside the samples of a profile and between the
steps of a run (`gplan_profiler/host/host_load.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from gplan.core.checks import check_factor, check_not_negative, check_positive, check_share
from gplan.core.layer_cost import Timing
from gplan.core.units import percent_text

_LEAST_EVIDENCE = 0.01  # share of the time; a quiet host stays far below
LEAST_HEAVY = 0.2  # share of the time


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLoad:
    """Shares of the measured time, 0 where the system does not report them; and the seconds of the yardstick."""

    steal_share: float = 0.0  # of all cores, that the hypervisor gave to other machines
    wait_share: float = 0.0  # in which a measured thread was ready to run, but its core had other processes
    yardstick: Timing | None = None  # with the mean in place of the median; None: not read, as on a GPU

    def __post_init__(self) -> None:
        check_share(self, "steal_share", "wait_share")

    @property
    def is_evidence(self) -> bool:
        """Whether it proves other work, by either share."""
        return max(self.steal_share, self.wait_share) >= _LEAST_EVIDENCE

    @property
    def is_heavy(self) -> bool:
        """Whether either share is so large that the measured times are doubtful."""
        return max(self.steal_share, self.wait_share) >= LEAST_HEAVY

    @property
    def lost_share(self) -> float:
        """Both shares together, in the mean over all cores."""
        return min(1.0, self.steal_share + self.wait_share)

    @property
    def stretch(self) -> float:
        """How many times as long work takes that loses `lost_share` of its time.

        >>> HostLoad(wait_share=0.5).stretch
        2.0
        """
        return 1.0 / (1.0 - self.lost_share) if self.lost_share < 1.0 else math.inf

    @property
    def text(self) -> str:
        """Both figures.

        >>> HostLoad(steal_share=0.002, wait_share=0.125).text
        '12.5 % of the time waiting for a core, 0.2 % stolen by the hypervisor'
        """
        waited, stolen = percent_text(self.wait_share), percent_text(self.steal_share)
        return f"{waited} of the time waiting for a core, {stolen} stolen by the hypervisor"


def interruption_text(load: HostLoad | None) -> str:
    """What happened to samples or steps that lost their cores, with the figures; only evidence names other work.

    >>> interruption_text(HostLoad(wait_share=0.125))
    'disturbed by other work (12.5 % of the time waiting for a core, 0.0 % stolen by the hypervisor)'
    >>> interruption_text(None)
    'interrupted'
    """
    if load is None:
        return "interrupted"
    if load.is_evidence:
        return f"disturbed by other work ({load.text})"
    return f"interrupted by an unknown cause ({load.text})"


def largest_load(loads: Sequence[HostLoad]) -> HostLoad | None:
    """The largest shares of several processes, with the mean of their yardsticks; None without any."""
    if not loads:
        return None
    read = [x.yardstick for x in loads if x.yardstick is not None]
    yardstick = None
    if read:
        yardstick = Timing(
            median_s=fmean(x.median_s for x in read),
            low_s=fmean(x.low_s for x in read),
            high_s=fmean(x.high_s for x in read),
            num_samples=sum(x.num_samples for x in read),
            num_refused=sum(x.num_refused for x in read),
        )
    return HostLoad(
        steal_share=max(x.steal_share for x in loads),
        wait_share=max(x.wait_share for x in loads),
        yardstick=yardstick,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualSpeed:
    """A run's predicted step at the speed that the host had in the run."""

    ratio: float  # of the yardstick's seconds in the run to those in the profile
    uncertainty: float  # of the ratio
    step_s: float  # predicted with all times of the profile multiplied by the ratio

    def __post_init__(self) -> None:
        check_factor(self, "ratio")
        check_not_negative(self, "uncertainty")
        check_positive(self, "step_s")

    @property
    def is_certain(self) -> bool:
        """Whether the speeds differ by more than the readings can tell."""
        return abs(self.ratio - 1.0) > self.uncertainty
