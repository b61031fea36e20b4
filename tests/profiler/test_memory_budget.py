"""Whether a model fits in memory, with given limits, and how it is then loaded."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import pytest
import torch

from gplan.core.errors import ModelError
from gplan_profiler.model import memory_budget
from gplan_profiler.model import memory_budget as tested
from gplan_profiler.model.given_model import GivenModel
from gplan_profiler.model.load import ModelTooLargeError
from gplan_profiler.model.memory_budget import available_bytes, headroom, saved_bytes, weight_bytes
from tests.model_files import load_model_file

FILE = """
import torch
from torch import nn

calls = []

def model(width=16, reads=False):
    calls.append(width)
    made = nn.Sequential(nn.Linear(width, width), nn.Sigmoid(), nn.Linear(width, 1))
    if reads:
        made[0].weight.sum().item()
    return made

def huge():
    return nn.Linear(2**24, 2**24)  # 1 PiB

def huge_and_read():
    made = nn.Parameter(torch.empty(2**24, 2**24))
    return made.sum().item()

def on_meta():
    with torch.device("meta"):
        return nn.Linear(16, 16)

ready = nn.Linear(16, 16)

def example_inputs(batch_size, width=16):
    return torch.randn(batch_size, width)
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "some_model.py"
    path.write_text(FILE)
    return str(path)


def limit(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(tested, "available_bytes", lambda device="cpu": num_bytes)


def test_a_model_that_fits_is_the_one_that_is_loaded_today(file: str) -> None:
    found, expected = GivenModel(model=file, seed=3).load_for_measuring(), load_model_file(file, seed=3)
    assert not found.is_lazy and found.notes == ()
    pairs = zip(found.model.parameters(), expected.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_model_that_does_not_fit_is_lazy_and_says_why(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, 1024)
    found = GivenModel(model=file).load_for_measuring()
    assert found.is_lazy
    assert found.notes[0].startswith("measured layer by layer") and found.notes[0].endswith("and 1.00 KiB are free")
    assert GivenModel(model=f"{file}:huge").load_for_measuring().is_lazy


def test_a_model_whose_estimate_was_too_low_is_lazy_after_all(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, 2**63)
    assert GivenModel(model=f"{file}:huge").load_for_measuring().is_lazy


def test_a_model_that_can_only_be_built_for_real_is(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, 1000)
    assert not GivenModel(model=file, settings={"reads": True}).load_for_measuring().is_lazy
    with pytest.raises(ModelError, match="cannot be built without its weights"):
        load_model_file(file, settings={"reads": True}, lazy=True)
    with pytest.raises(ModelTooLargeError, match=r"not enough memory .*torch.device\(\"meta\"\)"):
        GivenModel(model=f"{file}:huge_and_read").load_for_measuring()


def test_a_model_that_its_file_builds_without_weights_is_lazy(file: str) -> None:
    found = GivenModel(model=f"{file}:on_meta").load_for_measuring()
    assert found.is_lazy and "itself builds the model without weights" in found.notes[0]


def test_a_model_that_is_there_already_stays_real(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, 0)
    assert not GivenModel(model=f"{file}:ready").load_for_measuring().is_lazy


def test_what_is_needed_counts_weights_gradients_and_a_step(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tested, "_RESERVE", 1)
    limit(monkeypatch, 2**40)
    lazy = load_model_file(file, lazy=True)
    weights = 4 * (16 * 16 + 16 + 16 + 1)
    assert weight_bytes(lazy) == weights
    kept = 4 * (16 + 16)  # the input and the sigmoid's output, for each sample
    assert saved_bytes(lazy, 8) == 8 * kept
    small, large = (headroom(lazy, batch_size=size)[0] for size in (1, 1000))
    assert small == 2 * weights + 5 * weights
    assert large == 2 * weights + 1000 * kept
    assert headroom(lazy, batch_size=1000, num_copies=2)[0] == 2 * large


def test_nothing_is_known_of_a_step_that_decides_by_values(tmp_path: Path) -> None:
    path = tmp_path / "branching.py"
    path.write_text(
        "from tests.profiler.models import Branching as model\nimport torch\n"
        "def example_inputs(batch_size): return torch.ones(batch_size, 4)"
    )
    assert saved_bytes(load_model_file(str(path), lazy=True), 2) == 0


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


def test_control_group_limit_less_usage(host: Path) -> None:
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
