"""Machine files: a cluster of devices that may differ, described in TOML by hosts, their devices, and links.

    [[host]]
    name = "a"
    devices = 4                # number of equal devices; default 1
    memory = "80GiB"           # of each device; default no limit
    speed = 1.0                # relative to the profiled device

    [[host]]
    name = "b"
    memory = "24GiB"           # default for the devices below
    [[host.device]]            # devices that differ, one by one
    name = "b0"
    speed = 0.5
    [[host.device]]
    name = "b1"
    memory = "16GiB"

    [links]
    within = "300GB/s,3us"     # between two devices of one host
    between = "25GB/s,5us"     # between devices of two hosts

    [[link]]                   # an exception, between two hosts or within one (named twice)
    hosts = ["a", "b"]
    link = "10GB/s,20us"

Devices are in the order of the file. Counted devices are named a:0, a:1 and so on. `gplan cluster` writes the same file
with measured links, which are tables: seconds by message size, and by size of a message in the ring of a collective.

    [[link]]
    hosts = ["b", "b"]
    [link.link]
    latency_s = 5e-6
    bytes_per_s = 25e9
    points = [[1024, 5.1e-6], [1048576, 4.7e-5]]
    [[link.link.collective]]
    kind = "all_reduce"        # or all_gather, reduce_scatter
    num_devices = 4
    message = { latency_s = 9e-6, bytes_per_s = 22e9, points = [[1024, 9.1e-6]] }
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import msgspec

from gplan.core import Collective, CollectiveKind, HostLink, Link, LinkPoint, Machine, MachineDevice
from gplan.core.checks import Origin
from gplan.core.errors import FileError, UsageError
from gplan.core.units import parse_link, parse_memory
from gplan.files.json_files import similar_file_text, write_bytes

_REMEDY = (
    "known are [[host]] with name, devices, memory, speed, hardware and [[host.device]], [links] with within and between, "
    "[[link]] with hosts and link, and notes"
)


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


class _Device(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    memory: str | None = None
    speed: float | None = None
    hardware: str | None = None


class _Host(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    devices: int | None = None
    memory: str | None = None
    speed: float = 1.0
    hardware: str = ""
    device: list[_Device] = []


class _Links(msgspec.Struct, forbid_unknown_fields=True):
    within: str | LinkTable | None = None
    between: str | LinkTable | None = None


class _HostLink(msgspec.Struct, forbid_unknown_fields=True):
    hosts: tuple[str, str]
    link: str | LinkTable


class _Content(msgspec.Struct, forbid_unknown_fields=True):
    host: list[_Host]
    links: _Links = msgspec.field(default_factory=_Links)
    link: list[_HostLink] = []
    notes: list[str] = []


def load_machine(path: Path, *, default_link: Link | None = None) -> Machine:
    """The machine described by a TOML file.

    `default_link` is used for `within` and `between` if the file lacks them; without it both are required.
    Raises FileError with the file, the path inside it, what was found and what was expected.
    """
    content = _read(path)
    with _located(path, "$.host"):
        _check_distinct((host.name for host in content.host), what="hosts")
        devices = tuple(x for i, host in enumerate(content.host) for x in _devices(host, path, f"$.host[{i}]"))
        return Machine(
            devices=devices,
            within=_default(content.links.within, default_link, path, "$.links.within"),
            between=_default(content.links.between, default_link, path, "$.links.between"),
            links=_host_links(content, path),
            notes=tuple(content.notes),
        )


def save_machine(machine: Machine, path: Path) -> None:
    """Write a machine file, whole or not at all; `load_machine` reads the same machine from it.

    Devices of a host stay together, in the order of the hosts. Raises FileError where it cannot be written.
    """
    lines = [f"notes = {json.dumps(machine.notes, ensure_ascii=False)}"] if machine.notes else []
    for host, devices in groupby(machine.devices, key=lambda x: x.host):
        lines += ["", "[[host]]", f"name = {_text(host)}"]
        for device in devices:
            lines += ["[[host.device]]", f"name = {_text(device.name)}", f"speed = {device.speed!r}"]
            lines += [f'memory = "{device.memory_bytes}"'] if device.memory_bytes is not None else []
            lines += [f"hardware = {_text(device.hardware)}"] if device.hardware else []
    for name, link in (("within", machine.within), ("between", machine.between)):
        lines += ["", f"[links.{name}]", *_link_lines(link, f"links.{name}")]
    for special in machine.links:
        hosts = ", ".join(map(_text, special.hosts))
        lines += ["", "[[link]]", f"hosts = [{hosts}]", "[link.link]", *_link_lines(special.link, "link.link")]
    write_bytes(path, "\n".join([*lines, ""]).encode())


def _link_lines(link: Link, name: str) -> Iterator[str]:
    """The keys of a link's table, and the tables of its collectives."""
    for key, value in _message_values(link).items():
        yield f"{key} = {value}"
    for x in link.collectives:
        message = ", ".join(f"{key} = {value}" for key, value in _message_values(x.message).items())
        yield from (f"[[{name}.collective]]", f"kind = {_text(x.kind)}", f"num_devices = {x.num_devices}")
        yield f"message = {{ {message} }}"


def _message_values(link: Link) -> Mapping[str, str]:
    points = [[x.num_bytes, x.seconds] for x in link.points]
    return {"latency_s": repr(link.latency_s), "bytes_per_s": repr(float(link.bytes_per_s)), "points": repr(points)}


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _read(path: Path) -> _Content:
    try:
        return msgspec.toml.decode(path.read_bytes(), type=_Content)
    except FileNotFoundError as error:
        raise FileError(
            f"{path} is not there{similar_file_text(path)}; expected a machine file in TOML; {_REMEDY}"
        ) from error
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}; expected a machine file in TOML") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FileError(f"{path} does not describe a machine: {error}; {_REMEDY}") from error


@contextmanager
def _located(path: Path, where: str) -> Iterator[None]:
    """Adds the file and the path inside it to any error, once."""
    try:
        yield
    except (ValueError, UsageError) as error:
        raise FileError(f"{path}, {where}: {error}") from error


def _devices(host: _Host, path: Path, where: str) -> list[MachineDevice]:
    """The devices of one host, listed or counted."""
    with _located(path, where):
        if host.devices is not None and host.device:
            raise ValueError(
                f"{host.name} has both devices = {host.devices} and {len(host.device)} [[host.device]]; expected one of them"
            )
        num_devices = 1 if host.devices is None else host.devices
        if num_devices < 1:
            raise ValueError(f"devices is {num_devices}; expected at least 1")
    if not host.device:
        return [_device(_Device(f"{host.name}:{i}"), host, path, where) for i in range(num_devices)]
    return [_device(device, host, path, f"{where}.device[{i}]") for i, device in enumerate(host.device)]


def _device(device: _Device, host: _Host, path: Path, where: str) -> MachineDevice:
    with _located(path, where):
        memory = host.memory if device.memory is None else device.memory
        return MachineDevice(
            name=device.name,
            host=host.name,
            speed=host.speed if device.speed is None else device.speed,
            memory_bytes=None if memory is None else parse_memory(memory),
            hardware=host.hardware if device.hardware is None else device.hardware,
        )


def _host_links(content: _Content, path: Path) -> tuple[HostLink, ...]:
    known = [host.name for host in content.host]
    links = []
    for i, entry in enumerate(content.link):
        for name in entry.hosts:
            if name not in known:
                raise FileError(
                    f"{path}, $.link[{i}].hosts: {name!r} is not a host; expected two of {', '.join(known)}"
                )
        links.append(HostLink(hosts=entry.hosts, link=_link(entry.link, path, f"$.link[{i}].link")))
    with _located(path, "$.link"):
        _check_distinct((" and ".join(sorted(x.hosts)) for x in links), what="links")
    return tuple(links)


def _default(text: str | LinkTable | None, default_link: Link | None, path: Path, where: str) -> Link:
    if text is not None:
        return _link(text, path, where)
    if default_link is None:
        raise FileError(f"{path}, {where}: missing; expected a link such as 25GB/s,5us")
    return default_link


def _link(found: str | LinkTable, path: Path, where: str) -> Link:
    with _located(path, where):
        if isinstance(found, str):
            bytes_per_s, latency_s = parse_link(found)
            return Link(bytes_per_s=bytes_per_s, latency_s=latency_s)
        return found.link("measured")


def _check_distinct(names: Iterable[str], *, what: str) -> None:
    seen = set[str]()
    for name in names:
        if name in seen:
            raise ValueError(f"{name} appears twice among the {what}; expected each once")
        seen.add(name)
