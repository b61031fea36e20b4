"""Links as tables of TOML files, in machine files and in hardware files: see `gplan/files/machine_file.py`."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from gplan.core import Collective, CollectiveKind, Link, LinkPoint
from gplan.core.checks import Origin


class MessageTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of one message by its size."""

    latency_s: float
    bytes_per_s: float
    points: list[tuple[int, float]] = []  # bytes and seconds

    def link(self, origin: Origin = "given") -> Link:
        """The link; raises ValueError for figures that no link has."""
        points = tuple(LinkPoint(num_bytes=n, seconds=s) for n, s in self.points)
        return Link(latency_s=self.latency_s, bytes_per_s=self.bytes_per_s, points=points, origin=origin)


class CollectiveTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of one message in the ring of a collective."""

    kind: CollectiveKind
    num_devices: int
    message: MessageTable


class LinkTable(MessageTable, frozen=True, forbid_unknown_fields=True):
    """A link with its measured collectives."""

    collective: list[CollectiveTable] = []

    def link(self, origin: Origin = "given") -> Link:
        """The link with its collectives; raises ValueError for figures that no link has."""
        collectives = (
            Collective(kind=x.kind, num_devices=x.num_devices, message=x.message.link(origin)) for x in self.collective
        )
        return replace(super().link(origin), collectives=tuple(collectives))
