"""The roofline by hand, and calibration that recovers known efficiencies."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from gplan.core import Link, OperationKind, Profile, Timing, Work
from gplan.core.errors import UsageError
from profiler.analytic.hardware import KINDS, Efficiency, Hardware
from profiler.analytic.roofline import calibrated, roofline_seconds
from tests.made import make_profile

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


def mixed_work(kinds: Sequence[OperationKind], draw: random.Random) -> tuple[Work, ...]:
    return tuple(
        work(x, flops=draw.randrange(10**7, 10**9), moved=draw.randrange(10**5, 10**8), count=draw.randrange(1, 40))
        for x in kinds
        if draw.random() < 0.8
    ) or (work(kinds[0], flops=10**8),)


def profile_of(truth: Hardware, works: Sequence[tuple[Work, ...]], *, noise: float = 0.0) -> Profile:
    """A measured profile whose layers, with one work forward and one backward each, took what `truth` says."""
    draw = random.Random(1)
    seconds = [roofline_seconds(x, truth, dtype="float32") * (1 + noise * draw.uniform(-1, 1)) for x in works]
    made = make_profile(seconds[0::2], seconds[1::2])
    layers = [
        replace(x, costs=(replace(x.costs[0], forward_work=forward, backward_work=backward),))
        for x, forward, backward in zip(made.layers, works[0::2], works[1::2], strict=True)
    ]
    return replace(made, layers=tuple(layers), origin="measured")


def scaled(hardware: Hardware, factors: dict[OperationKind, float], launch: float) -> Hardware:
    efficiencies = {
        kind: Efficiency(flops=x.flops * factors.get(kind, 1.0), bandwidth=x.bandwidth * factors.get(kind, 1.0))
        for kind, x in hardware.efficiencies.items()
    }
    return replace(hardware, efficiencies=efficiencies, launch_s=hardware.launch_s * launch)


@pytest.mark.parametrize("hardware", [CPU, GPU], ids=["cpu", "gpu"])
def test_calibration_recovers_efficiencies(hardware: Hardware) -> None:
    draw = random.Random(0)
    truth = scaled(hardware, {"matmul": 1.6, "pointwise": 0.4, "normalization": 2.0}, 1.5)
    works = [mixed_work(("matmul", "pointwise", "normalization"), draw) for _ in range(40)]
    works += [(work("pointwise", moved=1000, count=500),), (work("pointwise", moved=2000, count=900),)]
    found = calibrated(hardware, profile_of(truth, works))
    assert found.kinds == ("matmul", "normalization", "pointwise")
    for kind in found.kinds:
        assert found.hardware.efficiency(kind).flops == pytest.approx(truth.efficiency(kind).flops, rel=0.01)
        assert found.hardware.efficiency(kind).bandwidth == pytest.approx(truth.efficiency(kind).bandwidth, rel=0.01)
    assert found.hardware.launch_s == pytest.approx(truth.launch_s, rel=0.01)
    assert found.after.worst_error < 0.01 < found.before.median_error
    assert found.num_samples == 42


def test_missing_kinds_keep_their_efficiencies() -> None:
    works = [mixed_work(("matmul",), random.Random(i)) for i in range(10)]
    found = calibrated(CPU, profile_of(scaled(CPU, {"matmul": 0.5}, 1.0), works))
    assert found.kinds == ("matmul",)
    assert found.hardware.efficiency("attention").flops == pytest.approx(0.5, rel=1e-9)
    assert found.hardware.efficiency("matmul").flops == pytest.approx(0.25, rel=0.01)


def test_noise_moves_the_figures_little() -> None:
    truth = scaled(CPU, {"matmul": 1.3, "convolution": 0.5}, 1.0)
    works = [mixed_work(("matmul", "convolution"), random.Random(i)) for i in range(40)]
    found = calibrated(CPU, profile_of(truth, works, noise=0.05))
    assert found.hardware.efficiency("matmul").flops == pytest.approx(0.65, rel=0.05)
    assert found.after.median_error < 0.05


def test_calibration_is_robust_to_outliers() -> None:
    works = [mixed_work(("matmul", "convolution"), random.Random(i)) for i in range(40)]
    made = profile_of(scaled(CPU, {"matmul": 0.5}, 1.0), works)
    cost = made.layers[0].costs[0]
    disturbed = replace(cost, forward=Timing.exactly(5 * cost.forward.median_s))
    layers = (replace(made.layers[0], costs=(disturbed,)), *made.layers[1:])
    assert calibrated(CPU, replace(made, layers=layers)).hardware.efficiency("matmul").flops == pytest.approx(
        0.25, rel=0.03
    )


def test_a_kind_without_seconds_of_its_own_stays_above_zero() -> None:
    works = [(work("matmul", flops=10**9), work("reduction", moved=10**7 * (i + 1))) for i in range(10)]
    found = calibrated(replace(CPU, launch_s=0.0), profile_of(scaled(CPU, {"reduction": 1e6}, 0.0), works))
    assert all(x.flops > 0 and x.bandwidth > 0 for x in found.hardware.efficiencies.values())
    assert found.after.worst_error < found.before.worst_error


def test_repeated_layers_count_once_in_calibration() -> None:
    made = profile_of(CPU, [mixed_work(("matmul",), random.Random(i)) for i in range(12)])
    repeated = replace(made.layers[1], name="again", same_as=1)
    assert calibrated(CPU, replace(made, layers=(*made.layers, repeated))).num_samples == 12


def test_a_profile_that_cannot_calibrate_is_refused() -> None:
    made = profile_of(CPU, [mixed_work(("matmul",), random.Random(i)) for i in range(12)])
    with pytest.raises(UsageError, match="is computed; expected a measured one"):
        calibrated(CPU, replace(made, origin="computed"))
    with pytest.raises(UsageError, match="has 4 layer timings with work; expected at least 8"):
        calibrated(CPU, replace(made, layers=made.layers[:2]))
    with pytest.raises(UsageError, match="carries no counted work"):
        calibrated(CPU, replace(make_profile([1.0] * 9), origin="measured"))
