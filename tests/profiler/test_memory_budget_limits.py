"""What memory is left, by each limit that can be set on a process."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import pytest

from profiler.model import memory_budget
from profiler.model.memory_budget import available_bytes

GIB = 2**30


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with 16 GiB left, whose files a test may add to."""
    for name, file in (
        ("_HOST", "meminfo"),
        ("_STATUS", "status"),
        ("_MEMBERSHIP", "membership"),
        ("_GROUPS", "groups"),
    ):
        monkeypatch.setattr(memory_budget, name, tmp_path / file)
    (tmp_path / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:   {16 * 2**20} kB\n")
    return tmp_path


def write_group(folder: Path, **values: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in values.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def test_without_limits_it_is_what_the_host_has_left(host: Path) -> None:
    assert available_bytes() == 16 * GIB


def test_where_the_system_tells_nothing_memory_is_unlimited(host: Path) -> None:
    (host / "meminfo").unlink()
    assert available_bytes() == sys.maxsize


def test_a_control_group_leaves_its_limit_less_what_is_used_but_for_what_can_be_freed(host: Path) -> None:
    (host / "membership").write_text("0::/a/b\n")
    write_group(
        host / "groups" / "a", memory__max=8 * GIB, memory__current=5 * GIB, memory__stat=f"inactive_file {GIB}"
    )
    write_group(host / "groups" / "a" / "b", memory__max="max", memory__current=GIB)
    assert available_bytes() == 4 * GIB


def test_a_control_group_of_the_first_version_is_read_too(host: Path) -> None:
    (host / "membership").write_text("4:memory:/box\n3:cpuset:/\n")
    files = {"memory__limit_in_bytes": 3 * GIB, "memory__usage_in_bytes": 2 * GIB}
    write_group(host / "groups" / "memory" / "box", **files)
    assert available_bytes() == GIB


def test_a_group_that_is_over_its_limit_leaves_nothing(host: Path) -> None:
    (host / "membership").write_text("0::/\n")
    write_group(host / "groups", memory__max=GIB, memory__current=2 * GIB)
    assert available_bytes() == 0


@pytest.mark.parametrize(("limit", "usage"), [("RLIMIT_AS", "VmSize"), ("RLIMIT_DATA", "VmData")])
def test_a_limit_of_the_process_leaves_what_it_has_not_mapped(
    host: Path, monkeypatch: pytest.MonkeyPatch, limit: str, usage: str
) -> None:
    (host / "status").write_text(f"VmPeak:\t 9 kB\n{usage}:\t {2**20} kB\n")
    limits = {getattr(resource, limit): (5 * GIB, resource.RLIM_INFINITY)}
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits.get(which, unlimited))
    assert available_bytes() == 4 * GIB


def test_what_a_system_really_tells_can_be_read() -> None:
    assert available_bytes() > 0
