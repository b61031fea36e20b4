"""Devices and links as text: one of them, and a machine with its devices by host, its links and its collectives."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from rich.console import Group, RenderableType

from gplan.core import Device, Link, Machine
from gplan.core.units import bytes_text, counted, seconds_text
from gplan.reporting.text.fitted_table import Column, FittedTable, Line, note_lines

_SIZES = (2**10, 2**16, 2**20, 2**26)
_DEVICES = (
    Column(key="host", is_left=True, is_flexible=True),
    Column(key="devices", is_left=True),
    Column(key="memory"),
    Column(key="hardware", is_left=True),
)
_LINKS = (
    Column(key="between", is_left=True, is_flexible=True),
    Column(key="latency"),
    Column(key="rate"),
    *(Column(key=bytes_text(x)) for x in _SIZES),
)


def machine_view(machine: Machine) -> RenderableType:
    """Tables of hosts and links; collectives with the seconds for whole tensors of these sizes."""
    lines = []
    for host, group in groupby(machine.devices, key=lambda x: x.host):
        devices = list(group)
        known = [x.memory_bytes for x in devices if x.memory_bytes is not None]
        sizes = list(dict.fromkeys(bytes_text(end(known)) for end in (min, max))) if known else []
        is_each = len(sizes) == 1 and len(known) == len(devices)
        memory_text = f"{sizes[0]} each" if is_each else " to ".join(sizes)
        hardware = ", ".join(dict.fromkeys(x.hardware for x in devices))
        lines.append(Line(cells=(host, counted(len(devices), "device"), memory_text, hardware)))
    hosts = FittedTable(title="devices", columns=_DEVICES, lines=tuple(lines))
    links = FittedTable(title="seconds by bytes", columns=_LINKS, lines=tuple(_link_lines(machine)))
    return Group(hosts, links, *note_lines(machine.notes))


def _link_lines(machine: Machine) -> Iterator[Line]:
    links = [("devices of a host", machine.within)]
    if len({x.host for x in machine.devices}) > 1:
        links.append(("hosts", machine.between))
    for name, link in links:
        yield _line(name, link)
        for x in link.collectives:
            seconds = (float(link.collectives_s(x.kind, size, x.num_devices)) for size in _SIZES)
            kind = x.kind.replace("_", "-")
            yield Line(cells=(f"  {kind} of {x.num_devices}", "", "", *map(seconds_text, seconds)), style="dim")
    for special in machine.links:
        yield _line(" and ".join(dict.fromkeys(special.hosts)), special.link)


def _line(name: str, link: Link) -> Line:
    rate = f"{bytes_text(link.bytes_per_s)}/s"
    return Line(cells=(name, seconds_text(link.latency_s), rate, *(seconds_text(link.transfer_s(x)) for x in _SIZES)))


def device_text(device: Device) -> str:
    """A device's name, and the threads of a CPU."""
    return f"{device.name}, threads: {device.num_threads}" if device.kind == "cpu" else device.name


def link_text(link: Link) -> str:
    """A link's latency, rate and origin."""
    points = f" at {len(link.points)} sizes" if link.points else ""
    return f"{seconds_text(link.latency_s)} + {bytes_text(link.bytes_per_s)}/s ({link.origin}{points})"
