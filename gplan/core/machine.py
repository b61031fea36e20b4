"""The hardware of a plan: devices, and the links between them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gplan.core.checks import (
    COLLECTIVE_KINDS,
    CollectiveKind,
    Origin,
    check_amounts,
    check_factor,
    check_not_empty,
    check_not_negative,
    check_positive,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The profiled device. On a CPU it is a share of the cores; `memory_bytes` is None if no limit is known."""

    name: str
    kind: str  # "cpu", "cuda" or "tpu"; "given" if unknown
    num_threads: int = 1
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        check_positive(self, "num_threads")
        if self.memory_bytes is not None:
            check_positive(self, "memory_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineDevice:
    """One device of a machine. Times on it are those of the profiled device divided by `speed`."""

    name: str
    host: str
    speed: float = 1.0
    memory_bytes: int | None = None  # None: no limit is known
    hardware: str = ""  # such as "NVIDIA H100 80GB HBM3"

    def __post_init__(self) -> None:
        check_factor(self, "speed")
        if self.memory_bytes is not None:
            check_positive(self, "memory_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPoint:
    """A measured message size, and the seconds of one transfer."""

    num_bytes: int
    seconds: float

    def __post_init__(self) -> None:
        check_positive(self, "num_bytes")
        check_not_negative(self, "seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Transfer time between two devices: latency_s + n / bytes_per_s, or interpolated between measured points.

    With points, n bytes take the time of the smallest point up to its size, a linear interpolation between points, and
    additional bytes at bytes_per_s beyond the largest one.
    """

    latency_s: float
    bytes_per_s: float
    points: tuple[LinkPoint, ...] = ()  # sizes rise, seconds never fall
    origin: Origin = "given"
    collectives: tuple[Collective, ...] = ()  # measured over the link; none: computed from messages
    replica_link: Link | None = None  # between the replicas of a stage; None: this one

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
        """Seconds to transfer `num_bytes`; 0 for no bytes.

        >>> points = (LinkPoint(num_bytes=100, seconds=1.0), LinkPoint(num_bytes=300, seconds=2.0))
        >>> link = Link(latency_s=1.0, bytes_per_s=100.0, points=points)
        >>> [link.transfer_s(x) for x in (0, 50, 200, 400)]
        [0.0, 1.0, 1.5, 3.0]
        """
        return float(self.transfers_s(num_bytes))

    def transfers_s(self, num_bytes: ArrayLike) -> NDArray[np.float64]:
        """Seconds to transfer each of several sizes, in an array of their shape."""
        sizes = np.asarray(num_bytes, dtype=np.float64)
        known_bytes = [x.num_bytes for x in self.points] or [0]
        known_s = [x.seconds for x in self.points] or [self.latency_s]
        beyond_s = np.maximum(sizes - known_bytes[-1], 0.0) / self.bytes_per_s
        return np.where(sizes > 0, np.interp(sizes, known_bytes, known_s) + beyond_s, 0.0)

    @property
    def of_replicas(self) -> Link:
        """The link over which the replicas of a stage sum its gradients."""
        return self if self.replica_link is None else self.replica_link

    @property
    def least_s_per_byte(self) -> float:
        """The least time per byte over all message sizes."""
        return min([1 / self.bytes_per_s, *(x.seconds / x.num_bytes for x in self.points)])

    def times(self, factor: float) -> Link:
        """The link with all times multiplied by `factor`, above 0."""
        return replace(
            self,
            latency_s=self.latency_s * factor,
            bytes_per_s=self.bytes_per_s / factor,
            points=tuple(replace(x, seconds=x.seconds * factor) for x in self.points),
            collectives=tuple(replace(x, message=x.message.times(factor)) for x in self.collectives),
            replica_link=self.replica_link and self.replica_link.times(factor),
        )

    def collectives_s(self, kind: CollectiveKind, num_bytes: ArrayLike, num_devices: int) -> NDArray[np.float64]:
        """Seconds in which a ring of devices reduces or gathers tensors of these sizes, whole, in an array of their shape.

        Of R devices each sends R - 1 messages of a share of 1 / R, for an all-reduce twice as many.

        >>> link = Link(latency_s=0.0, bytes_per_s=100.0)
        >>> [float(link.collectives_s(kind, 400, 4)) for kind in ("all_reduce", "all_gather")]
        [6.0, 3.0]
        """
        shares = np.asarray(num_bytes, dtype=np.float64) / num_devices
        return num_messages(kind, num_devices) * self.ring_message(kind, num_devices).transfers_s(shares)

    def ring_message(self, kind: CollectiveKind, num_devices: int) -> Link:
        """What a message of a collective's ring takes: as measured with the most similar number of devices, else this link."""
        known = [x for x in self.collectives if x.kind == kind]
        if not known:
            return self
        return min(known, key=lambda x: abs(np.log(x.num_devices / num_devices))).message


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """A measured collective of some devices: its seconds by bytes, both divided among the messages of a ring."""

    kind: CollectiveKind
    num_devices: int
    message: Link

    def __post_init__(self) -> None:
        if self.kind not in COLLECTIVE_KINDS:
            raise ValueError(f"kind is {self.kind!r}; expected one of {', '.join(COLLECTIVE_KINDS)}")
        if self.num_devices < 2:
            raise ValueError(f"num_devices is {self.num_devices}; expected at least 2")


def num_messages(kind: CollectiveKind, num_devices: int) -> int:
    """Messages that each device of a ring sends."""
    return (num_devices - 1) * (2 if kind == "all_reduce" else 1)


FREE_LINK = Link(latency_s=0.0, bytes_per_s=1e30)
"""A link over which everything arrives at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCost:
    """Overhead of the engine on a device, measured with a pipeline of dummy stages between two processes."""

    action_s: float  # from the end of an action to the earliest start of the next, if nothing is sent
    sending: Link  # additional time of the device for sending an output, by bytes
    step_s: float = 0.0  # of a step before the first action and after the last, without the update

    def __post_init__(self) -> None:
        check_amounts(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLink:
    """The link between the devices of two hosts, or of one with itself."""

    hosts: tuple[str, str]
    link: Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A cluster of devices on one or more hosts; speeds, memories and links may differ."""

    devices: tuple[MachineDevice, ...]
    within: Link  # between two devices of one host, unless in `links`
    between: Link  # between devices of two hosts, unless in `links`
    links: tuple[HostLink, ...] = ()
    notes: tuple[str, ...] = ()  # such as when it was measured, and links that are slow

    def __post_init__(self) -> None:
        check_not_empty("devices", self.devices)
        names = [device.name for device in self.devices]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"devices has {twice[0]} twice; expected a different name for every device")

    def link(self, first: MachineDevice, second: MachineDevice) -> Link:
        """The link between two devices."""
        for special in self.links:
            if sorted(special.hosts) == sorted((first.host, second.host)):
                return special.link
        return self.within if first.host == second.host else self.between
