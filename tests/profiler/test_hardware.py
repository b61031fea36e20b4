"""Hardware: the built-in table is complete, and errors in own files name the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from gplan.core.errors import FileError, UsageError
from gplan_profiler.analytic.hardware import KINDS, hardware_table, load_hardware

MINE = """
kind = "cuda"
memory_bytes = 24e9
bytes_per_s = 1e12
launch_s = 3e-6
flops_per_s = { float32 = 30e12, bfloat16 = 120e12 }
link = { latency_s = 1e-5, bytes_per_s = 10e9 }
[efficiency]
matmul = { flops = 0.5, bandwidth = 0.8 }
convolution = { flops = 0.5, bandwidth = 0.8 }
attention = { flops = 0.5, bandwidth = 0.8 }
normalization = { flops = 0.5, bandwidth = 0.8 }
pointwise = { flops = 0.5, bandwidth = 0.8 }
reduction = { flops = 0.5, bandwidth = 0.8 }
indexing = { flops = 0.5, bandwidth = 0.4 }
[sources]
memory = "the maker"
flops = "the maker"
link = "the maker"
efficiency = "assumed"
"""


def written(place: Path, text: str) -> str:
    path = place / "mine.toml"
    path.write_text(text)
    return str(path)


def test_sources_are_optional(tmp_path: Path) -> None:
    hardware = load_hardware(written(tmp_path, MINE.partition("[sources]")[0]))
    assert dict(hardware.sources)["flops"] == "not given"


@pytest.mark.parametrize("name", list(hardware_table()))
def test_built_in_devices_are_complete(name: str) -> None:
    hardware = load_hardware(name)
    assert hardware.name == name
    assert all(0 < x.flops <= 1 and 0 < x.bandwidth <= 1 for x in hardware.efficiencies.values())
    assert all(len(source) >= len("assumed") for _, source in hardware.sources)
    assert hardware.device().memory_bytes == hardware.memory_bytes
    assert name in hardware_table()


def test_float32_runs_as_torch_runs_it_by_default() -> None:
    h100, tpu = load_hardware("h100"), load_hardware("TPU-v3")
    assert h100.peak_flops_per_s("matmul", "float32") == 67e12
    assert h100.peak_flops_per_s("convolution", "float32") == 494.7e12  # TF32
    assert h100.peak_flops_per_s("matmul", "bfloat16") == 989.4e12
    assert h100.peak_flops_per_s("pointwise", "bfloat16") == 67e12
    assert tpu.peak_flops_per_s("matmul", "float32") == tpu.peak_flops_per_s("matmul", "bfloat16")


def test_a_dtype_that_the_device_cannot_multiply_in_is_named() -> None:
    with pytest.raises(UsageError, match="multiplies in bfloat16, for which v100 has no flop rate; it has float64"):
        load_hardware("v100").peak_flops_per_s("attention", "bfloat16")


def test_a_file_of_ones_own_is_a_device(tmp_path: Path) -> None:
    hardware = load_hardware(written(tmp_path, MINE))
    assert (hardware.name, hardware.memory_bytes, hardware.launch_s) == ("mine", 24_000_000_000, 3e-6)
    assert hardware.efficiency("indexing").bandwidth == 0.4
    assert tuple(hardware.efficiencies) == KINDS


@pytest.mark.parametrize(
    ("found", "instead", "message"),
    [
        ("launch_s = 3e-6\n", "", "`launch_s`; expected keys are like, kind, bytes_per_s, .*, memory_bytes, "),
        ("launch_s = 3e-6", "launch = 3e-6\nlaunch_s = 3e-6", "unknown field `launch`"),
        ("launch_s = 3e-6", "launch_s = 3", "launch_s is 3; expected seconds from 0 to 1"),
        ("24e9", '"24GB"', r"Expected `float \| null`, got `str` - at `\$.memory_bytes`"),
        ("24e9", "24", "memory_bytes is 24; expected 1e.06 or more: bytes and flops, not GB or Tflop"),
        ("bfloat16 = 120e12", "bfloat16 = 120", "flops_per_s.bfloat16 is 120; expected"),
        ("bytes_per_s = 10e9", "bytes_per_s = 10", "link.bytes_per_s is 10; expected"),
        ("memory_bytes = 24e9", "", "no memory_bytes"),
        ("float32 = 30e12, ", "", "no flops_per_s.float32"),
        ("reduction = { flops = 0.5, bandwidth = 0.8 }", "", "no efficiency.reduction"),
        ("bandwidth = 0.4", "bandwidth = 40", "efficiency.indexing is .* shares above 0 and at most 1"),
        ('kind = "cuda"', 'kind = "gpu"', "Invalid enum value 'gpu'"),
        ("[sources]", "[sources", "cannot be parsed as TOML"),
        ("bytes_per_s = 10e9", "bytes_per_s = 10e9, points = [[2048, 2e-5], [1024, 1e-5]]", "points"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_the_key(tmp_path: Path, found: str, instead: str, message: str) -> None:
    assert found in MINE
    with pytest.raises(FileError, match=message):
        load_hardware(written(tmp_path, MINE.replace(found, instead)))


def test_names_of_drivers_and_files_that_are_like_a_device(tmp_path: Path) -> None:
    for name, plain in (
        ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA A100-SXM4-40GB", "a100-40gb"), ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"), ("Tesla V100-SXM2-32GB", "v100"),
    ):  # fmt: skip
        assert load_hardware(name) == load_hardware(plain)
    for name, plain in (("NVIDIA RTX A6000", "a6000"), ("H200 SXM 141GB", "h200"), ("NVIDIA H100 PCIe", "h100-pcie")):
        assert load_hardware(name).name == plain
    for name in ("H100 NVL", "A100 80GB PCIe"):  # other links
        with pytest.raises(UsageError, match=f"no hardware is called {name}"):
            load_hardware(name)
    a100, mine = load_hardware("a100"), load_hardware(written(tmp_path, 'like = "a100"\nlink = { bytes_per_s = 25e9 }'))
    assert (mine.link.bytes_per_s, mine.link.latency_s) == (25e9, a100.link.latency_s)
    assert (mine.memory_bytes, mine.efficiencies) == (a100.memory_bytes, a100.efficiencies)
    with pytest.raises(FileError, match="is like b900, which is no device; expected one of b200"):
        load_hardware(written(tmp_path, 'like = "b900"'))


def test_memory_is_what_cuda_gives_to_processes() -> None:
    totals = {"h100": 79.1, "h200": 139.8, "a100": 79.15, "a100-40gb": 39.4, "rtx4090": 23.64, "v100": 31.74}
    assert {x: round((load_hardware(x).memory_bytes or 0) / 2**30, 2) for x in totals} == totals


def test_a_link_and_a_network_may_be_text(tmp_path: Path) -> None:
    text = 'like = "a100"\ndevices_per_node = 4\nlink = "25GB/s,7us"\nnetwork = "400Gb/s*2"'
    mine, a100 = load_hardware(written(tmp_path, text)), load_hardware("a100")
    assert (mine.link.bytes_per_s, mine.link.latency_s) == (25e9, 7e-6)
    assert (mine.network.bytes_per_s, mine.network.latency_s) == (25e9, a100.network.latency_s)
    for wrong, message in (
        ("network = { bytes_per_s = 400e9 }", 'if these are bits, write network = "400Gb/s"'),
        ('network = "400GB/s"', r"mine.toml: .* did you mean 400Gb/s \(bits\)?"),
        ('link = "fast"', "mine.toml: 'fast' is not a link"),
    ):
        with pytest.raises(FileError, match=message):
            load_hardware(written(tmp_path, f'like = "a100"\n{wrong}'))


def test_rates_that_are_not_given_are_those_of_the_other_device(tmp_path: Path) -> None:
    mine = load_hardware(written(tmp_path, 'like = "rtx4090"\nflops_per_s = { bfloat16 = 100e12 }'))
    assert dict(mine.flops_per_s) == {**dict(load_hardware("rtx4090").flops_per_s), "bfloat16": 100e12}


def test_unknown_name_lists_known_names(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no hardware is called b300; expected b200, h100, h200, a100"):
        load_hardware("b300")
    with pytest.raises(FileError, match="cannot be read"):
        load_hardware(str(tmp_path / "none.toml"))
