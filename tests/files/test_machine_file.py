"""Machine files: what they give, and every mistake in them with its place."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from gplan.core import Collective, HostLink, Link, LinkPoint, Machine, MachineDevice
from gplan.core.errors import FileError
from gplan.files import machine_file
from gplan.files.machine_file import load_machine, save_machine

GIB = 2**30
PROFILED = Link(latency_s=1e-3, bytes_per_s=1e9, origin="measured")
LINKS = """
[links]
within = "300GB/s,3us"
between = "25GB/s,5us"
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "machine.toml"
    path.write_text(textwrap.dedent(text))
    return path


def test_counted_devices_are_alike_and_numbered_within_their_host(tmp_path: Path) -> None:
    text = '[[host]]\nname = "a"\ndevices = 2\nmemory = "80GiB"\nspeed = 2\n[[host]]\nname = "b"\n' + LINKS
    machine = load_machine(written(tmp_path, text))
    assert machine.devices == (
        MachineDevice(name="a:0", host="a", speed=2.0, memory_bytes=80 * GIB),
        MachineDevice(name="a:1", host="a", speed=2.0, memory_bytes=80 * GIB),
        MachineDevice(name="b:0", host="b", speed=1.0, memory_bytes=None),
    )


def test_listed_devices_take_from_their_host_what_they_do_not_say(tmp_path: Path) -> None:
    text = """
        [[host]]
        name = "b"
        memory = "24GiB"
        speed = 0.75
        [[host.device]]
        name = "b0"
        speed = 0.5
        [[host.device]]
        name = "b1"
        memory = "16GiB"
        """
    machine = load_machine(written(tmp_path, text), default_link=PROFILED)
    assert [(x.name, x.speed, x.memory_bytes) for x in machine.devices] == [
        ("b0", 0.5, 24 * GIB),
        ("b1", 0.75, 16 * GIB),
    ]


def test_a_link_between_two_named_hosts_goes_before_the_general_ones(tmp_path: Path) -> None:
    hosts = "".join(f'[[host]]\nname = "{name}"\ndevices = 2\n' for name in "abc")
    text = hosts + LINKS + '[[link]]\nhosts = ["b", "a"]\nlink = "10GB/s,20us"\n'
    machine = load_machine(written(tmp_path, text))
    slow = Link(latency_s=2e-5, bytes_per_s=1e10)
    assert machine.links == (HostLink(hosts=("b", "a"), link=slow),)
    a, a1, b, _, c, _ = machine.devices
    assert machine.link(a, b) == slow
    assert machine.link(a, a1) == Link(latency_s=3e-6, bytes_per_s=3e11)
    assert machine.link(a, c) == Link(latency_s=5e-6, bytes_per_s=2.5e10)


def test_links_that_are_left_out_are_the_profiled_one(tmp_path: Path) -> None:
    text = '[[host]]\nname = "a"\n[links]\nbetween = "25GB/s"\n'
    machine = load_machine(written(tmp_path, text), default_link=PROFILED)
    assert machine.within == PROFILED
    assert machine.between == Link(latency_s=0.0, bytes_per_s=2.5e10)


def test_the_file_in_the_docstring_is_a_machine(tmp_path: Path) -> None:
    assert machine_file.__doc__ is not None
    example = "\n".join(x for x in machine_file.__doc__.splitlines() if x.startswith("    "))
    machine = load_machine(written(tmp_path, example))
    assert [x.name for x in machine.devices] == ["a:0", "a:1", "a:2", "a:3", "b0", "b1"]
    assert [x.memory_bytes for x in machine.devices] == [80 * GIB] * 4 + [24 * GIB, 16 * GIB]


A = '[[host]]\nname = "a"\n'
MISTAKES = [
    ("", "missing required field `host`"),
    ("[[host]\n", "(at line 1, column"),
    ("host = []", r"$.host: devices is empty; expected at least one entry"),
    (A + "gpus = 4", "unknown field `gpus` - at `$.host[0]`"),
    (A + "devices = 1.5", "Expected `int | null`, got `float` - at `$.host[0].devices`"),
    (A + "devices = true", "Expected `int | null`, got `bool` - at `$.host[0].devices`"),
    (A + "memory = 16", "Expected `str | null`, got `int` - at `$.host[0].memory`"),
    ("[[host]]\ndevices = 1", "missing required field `name` - at `$.host[0]`"),
    (A + "devices = 0", "$.host[0]: devices is 0; expected at least 1"),
    (A + "speed = -1.0", "$.host[0]: speed is -1.0; expected a finite number above 0"),
    (A + "speed = nan", "$.host[0]: speed is nan; expected a finite number above 0"),
    (A + 'memory = "0GiB"', "$.host[0]: '0GiB' is 0 bytes; expected at least 1 byte"),
    (A + 'memory = "much"', "$.host[0]: 'much' is not a size in bytes; write it like 16GiB"),
    (A + 'devices = 2\n[[host.device]]\nname = "x"', "$.host[0]: a has both devices = 2 and 1 [[host.device]]; expected one of them"),
    (A + '[[host.device]]\nname = "x"\nspeed = 0', "$.host[0].device[0]: speed is 0"),
    (A + A, "$.host: a appears twice among the hosts; expected each once"),
    (A + '[[host.device]]\nname = "x"\n' * 2, "$.host: devices has x twice"),
    (A + '[links]\nwithin = "fast"', "$.links.within: 'fast' is not a link; write bandwidth and latency like 25GB/s,5us"),
    (A + '[links]\nacross = "1GB/s"', "unknown field `across` - at `$.links`"),
    (A + '[[link]]\nhosts = ["a", "z"]\nlink = "1GB/s"', "$.link[0].hosts: 'z' is not a host; expected two of a"),
    (A + '[[link]]\nhosts = ["a"]\nlink = "1GB/s"', "of length 2, got 1 - at `$.link[0].hosts`"),
    (A + '[[link]]\nhosts = ["a", "a"]\nlink = "100Gb/s"', "$.link[0].link: '100Gb/s' reads as bits"),
    (A + '[[link]]\nhosts = ["a", "a"]\nlink = "1GB/s"\n' * 2, "$.link: a and a appears twice among the links"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "told"), MISTAKES, ids=[told for _, told in MISTAKES])
def test_a_mistake_is_told_with_the_file_and_its_place(tmp_path: Path, text: str, told: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(FileError) as caught:
        load_machine(path, default_link=PROFILED)
    assert str(caught.value).startswith(str(path))
    assert told in str(caught.value)
    assert str(caught.value).count(str(path)) == 1


@pytest.mark.parametrize("missing", ["within", "between"])
def test_without_a_profiled_link_both_links_must_be_there(tmp_path: Path, missing: str) -> None:
    text = A + "\n".join(x for x in LINKS.splitlines() if not x.startswith(missing))
    with pytest.raises(FileError, match=rf"\$\.links\.{missing}: missing; expected a link such as 25GB/s"):
        load_machine(written(tmp_path, text))


def test_a_file_that_is_absent_or_a_folder_or_no_text_is_told(tmp_path: Path) -> None:
    for path, told in ((tmp_path / "absent.toml", "is not there"), (tmp_path, "cannot be read: Is a directory")):
        with pytest.raises(FileError, match=told):
            load_machine(path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(FileError, match=r"binary\.toml does not describe a machine"):
        load_machine(tmp_path / "binary.toml")


def measured(factor: float = 1.0, collectives: tuple[Collective, ...] = ()) -> Link:
    points = (LinkPoint(num_bytes=1024, seconds=1.5e-5 * factor), LinkPoint(num_bytes=2**20, seconds=1e-3 * factor))
    return Link(
        latency_s=1.1e-5 * factor, bytes_per_s=1e9 / factor, points=points, origin="measured", collectives=collectives
    )


def test_saved_machine_is_read_back(tmp_path: Path) -> None:
    def device(name: str, host: str, **others: Any) -> MachineDevice:
        return MachineDevice(name=name, host=host, **others)

    gathers = Collective(kind="all_gather", num_devices=4, message=measured(3.0))
    machine = Machine(
        devices=(
            device("a:0", "a", memory_bytes=80 * GIB + 1, hardware='GPU "one"'),
            device("a:1", "a", speed=0.5),
            device("b:0", "b"),
        ),
        within=measured(),
        between=measured(7.0, collectives=(gathers,)),
        links=(HostLink(hosts=("a", "b"), link=measured(9.0)),),
        notes=("measured today", 'a and "b" é'),
    )
    save_machine(machine, tmp_path / "cluster.toml")
    assert load_machine(tmp_path / "cluster.toml") == machine


def test_collectives_are_measured_or_a_ring() -> None:
    sums = Collective(kind="all_reduce", num_devices=2, message=measured(2.0))
    link = measured(collectives=(sums,))
    assert link.collectives_s("all_reduce", 2**21, 2) == pytest.approx(2 * 2e-3)
    assert link.collectives_s("all_reduce", 2**22, 4) == pytest.approx(6 * 2e-3)  # of the nearest number of devices
    assert link.collectives_s("reduce_scatter", 2**22, 4) == pytest.approx(3 * 1e-3)
    with pytest.raises(ValueError, match="num_devices is 1; expected at least 2"):
        Collective(kind="all_reduce", num_devices=1, message=measured())
