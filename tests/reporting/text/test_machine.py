"""Machines as tables."""

from __future__ import annotations

import pytest

from gplan.core import Link, Machine, MachineDevice
from gplan.reporting.text.machine import machine_view
from tests.reporting.text.printed import printed


@pytest.mark.parametrize(("hosts", "has_row"), [(("a", "a"), False), (("a", "b"), True)])
def test_one_host_has_no_link_between_hosts(hosts: tuple[str, ...], has_row: bool) -> None:
    devices = tuple(MachineDevice(name=f"{host}:{i}", host=host) for i, host in enumerate(hosts))
    link = Link(latency_s=1e-5, bytes_per_s=1e9)
    lines = printed(machine_view(Machine(devices=devices, within=link, between=link)))
    assert any(x.startswith("hosts ") for x in lines) is has_row


@pytest.mark.parametrize(
    ("gib", "text"),
    [((16, 16), "16.0 GiB each"), ((24, 16), "16.0 GiB to 24.0 GiB"), ((16, 0), "2 devices  16.0 GiB")],
)
def test_memories_of_a_host(gib: tuple[int, ...], text: str) -> None:
    devices = tuple(MachineDevice(name=f"a:{i}", host="a", memory_bytes=x * 2**30 or None) for i, x in enumerate(gib))
    link = Link(latency_s=1e-5, bytes_per_s=1e9)
    lines = printed(machine_view(Machine(devices=devices, within=link, between=link)))
    assert any(x.rstrip().endswith(text) for x in lines)
