"""Devices and links as text: one of them, and a machine with its devices by host, its links and its collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from typing import SupportsFloat

from rich.console import Group, RenderableType

from gplan.core import Device, Link, Machine
from gplan.core.units import bytes_text, counted, seconds_text
from gplan.reporting.text.fitted_table import FittedTable, Line, note_lines

_SIZES = (2**10, 2**16, 2**20, 2**26)


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
        num_devices = counted(len(devices), "device")
        cells = {"host": host, "devices": num_devices, "memory": memory_text, "hardware": hardware}
        lines.append(Line(cells=cells))
    hosts = FittedTable(title="devices", lines=tuple(lines), left=("devices", "hardware"))
    links = FittedTable(title="seconds by bytes", lines=tuple(_link_lines(machine)))
    return Group(hosts, links, *note_lines(machine.notes))


def _link_lines(machine: Machine) -> Iterator[Line]:
    links = [("devices of a host", machine.within)]
    if len({x.host for x in machine.devices}) > 1:
        links.append(("hosts", machine.between))
    for name, link in links:
        yield _line(name, link, link.transfer_s)
        for x in link.collectives:
            seconds = partial(link.collectives_s, x.kind, num_devices=x.num_devices)
            yield _line(f"  {x.kind.replace('_', '-')} of {x.num_devices}", None, seconds)
    for special in machine.links:
        yield _line(" and ".join(dict.fromkeys(special.hosts)), special.link, special.link.transfer_s)


def _line(name: str, link: Link | None, seconds: Callable[[int], SupportsFloat]) -> Line:
    """A link, or without one a collective, with the seconds by bytes."""
    latency, rate = (seconds_text(link.latency_s), f"{bytes_text(link.bytes_per_s)}/s") if link else ("", "")
    times = {bytes_text(x): seconds_text(float(seconds(x))) for x in _SIZES}
    cells = {"between": name, "latency": latency, "rate": rate, **times}
    return Line(cells=cells, style="" if link else "dim")


def device_text(device: Device) -> str:
    """A device's name, and the threads of a CPU."""
    return f"{device.name}, threads: {device.num_threads}" if device.kind == "cpu" else device.name


def link_text(link: Link) -> str:
    """A link's latency, rate and origin."""
    points = f" at {len(link.points)} sizes" if link.points else ""
    return f"{seconds_text(link.latency_s)} + {bytes_text(link.bytes_per_s)}/s ({link.origin}{points})"
