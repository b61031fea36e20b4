"""The roofline by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gplan.core import Link, OperationKind, Work
from profiler.analytic.hardware import KINDS, Efficiency, Hardware
from profiler.analytic.roofline import roofline_seconds

CPU = Hardware(
    name="made",
    kind="cpu",
    memory_bytes=None,
    bytes_per_s=1e10,
    flops_per_s=(("float32", 1e11), ("bfloat16", 2e11)),
    launch_s=1e-5,
    link=Link(latency_s=0.0, bytes_per_s=1e9),
    efficiencies={kind: Efficiency(flops=0.5, bandwidth=0.25) for kind in KINDS},
    sources=(("memory", "made"),),
)
GPU = replace(CPU, kind="cuda", memory_bytes=2**30)


def work(kind: OperationKind, *, flops: int = 0, moved: int = 0, count: int = 1) -> Work:
    return Work(kind=kind, num_operations=count, num_flops=flops, num_bytes=moved)


def test_a_kind_takes_the_longer_of_its_flops_and_its_bytes() -> None:
    hardware = replace(CPU, launch_s=0.0)
    of_flops, of_bytes = work("matmul", flops=10**9, moved=10**6), work("matmul", flops=10**6, moved=10**8)
    assert roofline_seconds([of_flops], hardware, dtype="float32") == pytest.approx(1e9 / 0.5e11)
    assert roofline_seconds([of_flops], hardware, dtype="bfloat16") == pytest.approx(1e9 / 1e11)
    assert roofline_seconds([of_bytes], hardware, dtype="float32") == pytest.approx(1e8 / 0.25e10)
    other = work("pointwise", moved=10**8)
    assert roofline_seconds([of_flops, other], hardware, dtype="float32") == pytest.approx(0.02 + 0.04)


def test_launches_on_cpu_and_gpu() -> None:
    large, small = work("matmul", flops=10**9, count=10), work("pointwise", moved=100, count=10)
    assert roofline_seconds([large], CPU, dtype="float32") == pytest.approx(0.02 + 1e-4)
    assert roofline_seconds([large], GPU, dtype="float32") == pytest.approx(0.02)
    assert roofline_seconds([small], GPU, dtype="float32") == pytest.approx(1e-4)
    assert roofline_seconds([], GPU, dtype="float32") == 0.0


def test_more_work_never_takes_less_time() -> None:
    part = work("convolution", flops=10**8, moved=10**6, count=3)
    assert roofline_seconds([part + part], CPU, dtype="float32") == pytest.approx(
        2 * roofline_seconds([part], CPU, dtype="float32")
    )
