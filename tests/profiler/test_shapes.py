"""Shares by shape: exact, interpolated, in TOML, and from a published efficiency file; kernels with rates of their own."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.nn import functional as F

from gplan.core import Work
from gplan.core.errors import FileError
from profiler.analytic.hardware import load_hardware
from profiler.analytic.roofline import Operation, WorkCounter, operations_seconds, roofline_seconds
from profiler.analytic.shapes import AttentionShape, MatmulShape, Shape, ShapeTable
from tests.profiler.test_hardware import MINE, written

MEASURED = MatmulShape(m=4096, k=1024, n=2048)
SYSTEM: dict[str, Any] = {
    "sys_name": "b200_of_ours",
    "accelerator": {
        "mem_gbs": 80,
        "op": {
            "matmul": {
                "tflops": 2000.0,
                "efficient_factor": 0.5,
                "accurate_efficient_factor": {
                    "b=1, m=64, k=32, n=16, layout=TN, accumulate=False, out_dtype=bf16": 0.4,
                    "b=1, m=16, k=64, n=32, layout=NT, accumulate=True, out_dtype=fp32": 0.3,
                },
            },
            "group_matmul": {
                "tflops": 2000.0,
                "efficient_factor": 0.3,
                "accurate_efficient_factor": {
                    "ng=4, M=64, N=16, K=32, dtype=bf16, out_dtype=bf16, main_grad_dtype=fp32, stage=bwd_grad_w, "
                    "grad=True, accumulate=True, use_split_accumulator=True, single_output=False": 0.2,
                },
            },
            "sdp_fwd": {
                "tflops": 2000.0,
                "efficient_factor": 0.7,
                "accurate_efficient_factor": {
                    f"batch=1, seq_len=64, head_num=8, kv_head_num=2, qk_head_dim=16, v_head_dim=16, qkv_contiguous={x}": y
                    for x, y in (("True", 0.9), ("False", 0.8))
                },
            },
        },
        "bandwidth": {
            "default": {"gbps": 8000.0, "efficient_factor": 0.5, "latency_us": 30},
            "ce_fusion": {"gbps": 8000.0, "efficient_factor": 0.25, "latency_us": 20},
        },
    },
    "networks": {
        "high_intra_node": {
            "bandwidth": {"gbps": 900.0, "efficient_factor": 1.0, "latency_us": 35},
            "op": {"p2p": {"efficient_factor": 0.5, "latency_us": 16.0}, "reduce_scatter": {}},
        },
    },
}


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
        'fused = ["attention", "cross-entropy"]\nall_to_all = { latency_s = 2e-5, bytes_per_s = 5e9 }\n'
        "[shapes]\nmatmul = [{ m = 64, k = 32, n = 16, flops = 0.25 }]\n"
        "attention = [{ batch = 1, sequence = 64, heads = 8, qk_dim = 16, v_dim = 16, flops = 1.25 }]\n"
        "[kernels]\ncross-entropy = { flops = 1.0, bandwidth = 0.2, latency_s = 1e-5 }\n[efficiency]",
    )
    hardware = load_hardware(written(tmp_path, text))
    assert hardware.fused == ("attention", "cross-entropy")
    assert hardware.all_to_all is not None
    assert hardware.all_to_all.bytes_per_s == 5e9
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
    for wrong in ("flops = 3.0", "m = 0, flops = 0.25"):
        with pytest.raises(FileError, match="shapes has .* expected sizes of 1 or more"):
            load_hardware(written(tmp_path, text.replace("m = 64, k = 32, n = 16, flops = 0.25", f"k = 32, n = 16, {wrong}" if "m =" in wrong else f"m = 64, k = 32, n = 16, {wrong}")))  # fmt: skip


def test_a_published_efficiency_file_is_hardware(tmp_path: Path) -> None:
    path = tmp_path / "published.json"
    path.write_text(json.dumps(SYSTEM))
    hardware = load_hardware(str(path))
    shares: dict[Shape, float] = {
        MatmulShape(m=64, k=32, n=16): 0.4,
        MatmulShape(m=16, k=64, n=32, layout="NT", accumulate=True, out_dtype="float32"): 0.3,
        MatmulShape(m=16, k=64, n=32, groups=4, layout="NT", accumulate=True, out_dtype="float32"): 0.2,
        AttentionShape(batch=1, sequence=64, heads=8, kv_heads=2, qk_dim=16, v_dim=16): 0.9,
    }
    assert hardware.shapes.shares == shares
    assert hardware.peak_flops_per_s("matmul", "bfloat16") == 2e15
    assert hardware.memory_bytes == 180_000_000_000  # as b200 of the table
    assert hardware.bytes_per_s == 8000 * 2**30
    assert hardware.efficiency("pointwise").latency_s == 3e-5
    assert hardware.efficiency("reduction", "cross-entropy").bandwidth == 0.25
    assert hardware.link.bytes_per_s == 450 * 2**30
    assert hardware.link.ring_message("reduce_scatter", 4).latency_s == 3.5e-5
    path.write_text(json.dumps({**SYSTEM, "networks": {}}))
    with pytest.raises(FileError, match="has no 'inter_node'; expected a SimuMax system file"):
        load_hardware(str(path))
    path.write_text("{}")
    with pytest.raises(FileError, match="missing required field `sys_name`"):
        load_hardware(str(path))


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
