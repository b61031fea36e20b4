"""Signs of other work on a host while something was measured: time stolen by its hypervisor, and waiting for cores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gplan.core.checks import check_share
from gplan.core.units import percent_text

_LEAST_EVIDENCE = 0.01  # share of the time; a quiet host stays far below
LEAST_HEAVY = 0.2  # share of the time


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLoad:
    """Shares of the measured time; 0 where the system does not report them."""

    steal_share: float = 0.0  # of all cores, that the hypervisor gave to other machines
    wait_share: float = 0.0  # in which a measured thread was ready to run, but its core had other processes

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
    def slowdown(self) -> float:
        """How many times as long work takes that loses `lost_share` of its time.

        >>> HostLoad(wait_share=0.5).slowdown
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
    """The largest shares of several processes; None without any."""
    if not loads:
        return None
    return HostLoad(
        steal_share=max(x.steal_share for x in loads),
        wait_share=max(x.wait_share for x in loads),
    )
