"""The hardware a plan is for: devices, and the links between them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gplan.core.checks import Origin, check_factor, check_not_empty, check_not_negative, check_positive


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One pipeline device. On a CPU it is a share of the cores; `memory_bytes` is None where no limit is known."""

    name: str
    kind: str  # "cpu", "cuda" or "tpu"; "given" where another planner's profile does not say
    num_threads: int = 1
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        check_positive(self, "num_threads")
        if self.memory_bytes is not None:
            check_positive(self, "memory_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineDevice:
    """One device of a machine: where a stage can be put. Times on it are those of the profiled device over `speed`."""

    name: str
    host: str
    speed: float = 1.0
    memory_bytes: int | None = None  # None: no limit is known

    def __post_init__(self) -> None:
        check_factor(self, "speed")
        if self.memory_bytes is not None:
            check_positive(self, "memory_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPoint:
    """A size of message that was measured, and the seconds that one transfer of it takes."""

    num_bytes: int
    seconds: float

    def __post_init__(self) -> None:
        check_positive(self, "num_bytes")
        check_not_negative(self, "seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """How long moving bytes between neighbouring devices takes: latency_s + n / bytes_per_s, or measured by size.

    With points, n bytes take what the points say: the smallest one's time up to its size, linear between neighbours,
    and bytes_per_s from the largest one on.
    """

    latency_s: float
    bytes_per_s: float
    points: tuple[LinkPoint, ...] = ()  # sizes rise, seconds never fall
    origin: Origin = "given"

    def __post_init__(self) -> None:
        check_not_negative(self, "latency_s")
        check_positive(self, "bytes_per_s")
        for low, high in pairwise(self.points):
            if low.num_bytes >= high.num_bytes or low.seconds > high.seconds:
                raise ValueError(
                    f"points has {low.num_bytes} bytes in {low.seconds!r} s before {high.num_bytes} bytes in "
                    f"{high.seconds!r} s; expected rising sizes whose seconds do not fall"
                )

    def transfer_s(self, num_bytes: float) -> float:
        """Seconds to move `num_bytes`; nothing to move takes no time.

        >>> points = (LinkPoint(num_bytes=100, seconds=1.0), LinkPoint(num_bytes=300, seconds=2.0))
        >>> link = Link(latency_s=1.0, bytes_per_s=100.0, points=points)
        >>> [link.transfer_s(x) for x in (0, 50, 200, 400)]
        [0.0, 1.0, 1.5, 3.0]
        """
        return float(self.transfers_s(num_bytes))

    def transfers_s(self, num_bytes: ArrayLike) -> NDArray[np.float64]:
        """Seconds to move each of some sizes, in an array of their shape."""
        sizes = np.asarray(num_bytes, dtype=np.float64)
        known_bytes = [x.num_bytes for x in self.points] or [0]
        known_s = [x.seconds for x in self.points] or [self.latency_s]
        beyond_s = np.maximum(sizes - known_bytes[-1], 0.0) / self.bytes_per_s
        return np.where(sizes > 0, np.interp(sizes, known_bytes, known_s) + beyond_s, 0.0)


FREE_LINK = Link(latency_s=0.0, bytes_per_s=1e30)
"""A link over which everything arrives at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCost:
    """What the engine itself takes of a device, measured on a pipeline of made-up stages between two processes."""

    action_s: float  # from the end of an action until the next one can begin, if nothing is sent
    sending: Link  # for how much longer sending what an action puts out keeps its device, by bytes
    step_s: float = 0.0  # of a step before its first action and after its last, beside the update

    def __post_init__(self) -> None:
        check_not_negative(self, "action_s", "step_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLink:
    """The link between the devices of two hosts, or of one with itself."""

    hosts: tuple[str, str]
    link: Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A cluster of devices that may differ, on hosts whose links may differ."""

    devices: tuple[MachineDevice, ...]
    within: Link  # between two devices of one host, where `links` does not say otherwise
    between: Link  # between devices of two hosts, where `links` does not say otherwise
    links: tuple[HostLink, ...] = ()

    def __post_init__(self) -> None:
        check_not_empty("devices", self.devices)
        names = [device.name for device in self.devices]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"devices has {twice[0]} twice; expected every device to have a name of its own")

    def link(self, one: MachineDevice, other: MachineDevice) -> Link:
        """The link that joins two devices."""
        for known in self.links:
            if sorted(known.hosts) == sorted((one.host, other.host)):
                return known.link
        return self.within if one.host == other.host else self.between
