"""Published system files of SimuMax are hardware."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.simumax import read_system_file
from gplan.core.errors import FileError
from gplan_profiler.analytic.hardware import Hardware, described_hardware, load_hardware
from gplan_profiler.analytic.shapes import AttentionShape, MatmulShape, Shape

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


def hardware_of(path: Path) -> Hardware:
    return described_hardware(read_system_file(path), name=path.stem, place=str(path))


def test_a_published_efficiency_file_is_hardware(tmp_path: Path) -> None:
    path = tmp_path / "published.json"
    path.write_text(json.dumps(SYSTEM))
    hardware = hardware_of(path)
    shares: dict[Shape, float] = {
        MatmulShape(m=64, k=32, n=16): 0.4,
        MatmulShape(m=16, k=64, n=32, layout="NT", accumulate=True, out_dtype="float32"): 0.3,
        MatmulShape(m=16, k=64, n=32, groups=4, layout="NT", accumulate=True, out_dtype="float32"): 0.2,
        AttentionShape(batch=1, sequence=64, heads=8, kv_heads=2, qk_dim=16, v_dim=16): 0.9,
    }
    assert hardware.shapes.shares == shares
    assert hardware.peak_flops_per_s("matmul", "bfloat16") == 2e15
    assert hardware.memory_bytes == load_hardware("b200").memory_bytes
    assert hardware.bytes_per_s == 8000 * 2**30
    assert hardware.efficiency("pointwise").latency_s == 3e-5
    assert hardware.efficiency("reduction", "cross-entropy").bandwidth == 0.25
    assert hardware.link.bytes_per_s == 450 * 2**30
    scattered = hardware.collectives["reduce_scatter"]
    assert (scattered.share, scattered.rank_s) == (2.0, 3.5e-5)  # of the rate between neighbours
    path.write_text(json.dumps({**SYSTEM, "networks": {}}))
    with pytest.raises(FileError, match="has no 'inter_node'; expected a SimuMax system file"):
        hardware_of(path)
    path.write_text("{}")
    with pytest.raises(FileError, match="missing required field `sys_name`"):
        hardware_of(path)
