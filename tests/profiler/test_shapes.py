"""Shares by shape: exact, interpolated, in TOML and JSON; kernels with rates of their own."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import msgspec
import pytest
import torch
from torch.nn import functional as F

from gplan.core import Work
from gplan.core.errors import FileError
from gplan_profiler.analytic.hardware import load_hardware
from gplan_profiler.analytic.roofline import Operation, operations_seconds, roofline_seconds
from gplan_profiler.analytic.shapes import AttentionShape, MatmulShape, ShapeTable
from gplan_profiler.analytic.work_counter import WorkCounter
from tests.profiler.test_hardware import MINE, written

MEASURED = MatmulShape(m=4096, k=1024, n=2048)


def test_a_measured_shape_has_its_share_and_others_lie_between_the_nearest() -> None:
    other = msgspec.structs.replace(MEASURED, n=8192)
    table = ShapeTable({MEASURED: 0.4, other: 0.6, msgspec.structs.replace(MEASURED, layout="NN"): 0.1})
    assert table.share(MEASURED) == 0.4
    between = table.share(msgspec.structs.replace(MEASURED, n=4096))
    assert between == pytest.approx(1 / (0.5 / 0.4 + 0.5 / 0.6))  # the mean of the seconds
    assert table.share(msgspec.structs.replace(MEASURED, n=4096, out_dtype="float32")) == pytest.approx(between)
    assert table.share(msgspec.structs.replace(MEASURED, dtype="float32")) is None
    assert table.share(msgspec.structs.replace(MEASURED, layout="NT")) is None


def test_flops_of_shapes_are_those_of_the_products() -> None:
    assert MatmulShape(m=2, k=3, n=5, groups=7).num_flops == 2 * 2 * 3 * 5 * 7
    attention = AttentionShape(batch=2, sequence=8, heads=4, kv_heads=2, qk_dim=6, v_dim=5)
    assert attention.num_flops == 2 * 2 * 4 * 8 * 8 * (6 + 5)
    assert msgspec.structs.replace(attention, direction="backward").num_flops == 2 * 2 * 4 * 8 * 8 * (3 * 6 + 2 * 5)


def test_a_file_of_ones_own_has_shapes_kernels_and_links(tmp_path: Path) -> None:
    text = MINE.replace(
        "[efficiency]",
        "network = { latency_s = 2e-5, bytes_per_s = 5e9 }\ncollectives = { all_to_all = { share = 0.5 } }\n"
        "[shapes]\nmatmul = [{ m = 64, k = 32, n = 16, flops = 0.25 }]\n"
        "attention = [{ batch = 1, sequence = 64, heads = 8, qk_dim = 16, v_dim = 16, flops = 1.25 }]\n"
        "[kernels]\ncross-entropy = { flops = 1.0, bandwidth = 0.2, latency_s = 1e-5 }\n[efficiency]",
    )
    hardware = load_hardware(written(tmp_path, text))
    assert hardware.network.bytes_per_s == 5e9
    assert (hardware.collectives["all_to_all"].share, hardware.collectives["all_gather"].share) == (0.5, 0.674)
    shape = MatmulShape(m=64, k=32, n=16)
    flops = shape.num_flops
    product = Operation(work=Work(kind="matmul", num_operations=1, num_flops=flops, num_bytes=1), shape=shape)
    fast = dataclasses.replace(hardware, launch_s=0.0)
    assert operations_seconds([product], fast, dtype="bfloat16") == pytest.approx(flops / (120e12 * 0.25))
    moved = Work(kind="reduction", num_operations=1, num_flops=1, num_bytes=10**9)
    rate = operations_seconds([Operation(work=moved, kernel="cross-entropy")], fast, dtype="bfloat16")
    assert rate == pytest.approx(1e9 / (1e12 * 0.2) + 1e-5)
    plain = [Operation(work=moved), Operation(work=product.work)]
    assert operations_seconds(plain, fast, dtype="bfloat16") == roofline_seconds(
        [product.work, moved], fast, dtype="bfloat16"
    )
    as_json = tmp_path / "mine.json"
    as_json.write_text(json.dumps(msgspec.toml.decode(text)))
    assert dataclasses.replace(load_hardware(str(as_json)), shapes=hardware.shapes) == hardware
    for wrong in ("flops = 3.0", "m = 0, flops = 0.25"):
        with pytest.raises(FileError, match="shapes has .* expected sizes of 1 or more"):
            load_hardware(written(tmp_path, text.replace("m = 64, k = 32, n = 16, flops = 0.25", f"k = 32, n = 16, {wrong}" if "m =" in wrong else f"m = 64, k = 32, n = 16, {wrong}")))  # fmt: skip


def test_shapes_of_what_torch_runs() -> None:
    x, weight = torch.randn(6, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    query = torch.randn(2, 3, 8, 4, requires_grad=True)
    with WorkCounter(lambda: 0) as counter:
        F.linear(x, weight).sum().backward()  # type: ignore[no-untyped-call]
        F.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()  # type: ignore[no-untyped-call]
    found = [x.shape for x in counter.between(0, 1) if x.shape]
    matmul = [x for x in found if isinstance(x, MatmulShape)]
    assert [(x.m, x.k, x.n, x.layout) for x in matmul[:1]] == [(6, 4, 5, "TN")]
    assert {(x.m, x.k, x.n) for x in matmul[1:]} == {(6, 5, 4), (5, 6, 4)}
    attention = [x for x in found if isinstance(x, AttentionShape)]
    assert [(x.batch, x.heads, x.sequence, x.direction) for x in attention] == [
        (2, 3, 8, "forward"),
        (2, 3, 8, "backward"),
    ]
