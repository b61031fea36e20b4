"""Efficiencies published for SimuMax (MooreThreads/SimuMax, docs/system.md) as a hardware file of gplan.

    python benchmarks/simumax.py b200_efficiency.json > b200.json
    gplan profile model.py --device meta --hardware b200.json

Such a system file holds, for one device, the peak flop rate, shares of it by the shapes of matrix products, grouped products
and fused attention, the memory bandwidth with shares for some kernels, and rates of collectives. Its rates of bytes are
in GiB per second, and each operation that is bound by memory takes `latency_us` beside its bytes. A grouped product is
named by the sizes of its forward in all three stages. What the file leaves out (rates of other dtypes, memory) is that
of the built-in device whose name its `sys_name` begins with; without one, other dtypes run at the same rate.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from gplan.core.errors import FileError
from gplan_profiler.analytic.hardware import hardware_table

_GIB = 2**30
_LAUNCH_S = 4e-6  # as the built-in GPUs
_DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}
_NODE = "high_intra_node"


class _Op(msgspec.Struct):
    tflops: float
    efficient_factor: float
    accurate_efficient_factor: dict[str, float] | None = None

    @property
    def shapes(self) -> Iterator[tuple[dict[str, str], float]]:
        """The shapes by their keys, with their shares."""
        for text, share in (self.accurate_efficient_factor or {}).items():
            yield dict(part.strip().split("=", 1) for part in text.split(",")), share


class _Bandwidth(msgspec.Struct):
    gbps: float
    efficient_factor: float
    latency_us: float

    def shares(self, bytes_per_s: float) -> dict[str, float]:
        bandwidth = self.gbps * _GIB * self.efficient_factor / bytes_per_s
        return {"flops": 1.0, "bandwidth": bandwidth, "latency_s": self.latency_us / 1e6}


class _NetworkOp(msgspec.Struct):
    efficient_factor: float | None = None
    latency_us: float | None = None
    fixed_latency_us: float = 0.0


class _Network(msgspec.Struct):
    bandwidth: _Bandwidth
    op: dict[str, _NetworkOp] = {}

    def link(self, name: str) -> dict[str, float]:
        """A link at the rate of one kind of transfer."""
        found, base = self.op.get(name, _NetworkOp()), self.bandwidth
        share = base.efficient_factor if found.efficient_factor is None else found.efficient_factor
        latency_us = base.latency_us if found.latency_us is None else found.latency_us
        return {"latency_s": latency_us / 1e6, "bytes_per_s": base.gbps * _GIB * share}

    def collectives(self) -> dict[str, dict[str, float]]:
        """The rates of collectives, as shares of the rate of transfers between neighbours."""
        rate, names = self.link("p2p")["bytes_per_s"], ("all_reduce", "all_gather", "reduce_scatter", "all2all")
        return {
            name.replace("2", "_to_"): {
                "share": self.link(name)["bytes_per_s"] / rate,
                "start_s": self.op[name].fixed_latency_us / 1e6,
                "rank_s": self.link(name)["latency_s"],
            }
            for name in names
            if name in self.op
        }


class _Accelerator(msgspec.Struct):
    mem_gbs: float
    op: dict[str, _Op]
    bandwidth: dict[str, _Bandwidth]


class _System(msgspec.Struct):
    sys_name: str
    accelerator: _Accelerator
    networks: dict[str, Any] = {}
    num_per_node: int = 8


def read_system_file(path: Path) -> dict[str, Any]:
    """The file as an entry of the hardware table; raises FileError for a file that is no such file."""
    built_in = hardware_table()
    try:
        system = msgspec.json.decode(path.read_bytes(), type=_System)
        ops, bandwidth = system.accelerator.op, system.accelerator.bandwidth
        product, memory = ops["matmul"], bandwidth["default"]
        network = msgspec.convert(system.networks.get(_NODE) or system.networks["inter_node"], _Network)
        base = built_in.get(max((x for x in built_in if system.sys_name.startswith(x)), key=len, default=""), {})
        bytes_per_s = max(x.gbps for x in bandwidth.values()) * _GIB
        if not 0 < bytes_per_s < float("inf"):
            raise ValueError(f"accelerator.bandwidth is {bytes_per_s / _GIB:g} GiB/s")
        products = [
            {
                "groups": int(x["b"]),
                **{size: int(x[size]) for size in ("m", "k", "n")},
                "layout": x["layout"],
                "accumulate": x["accumulate"] == "True",
                "out_dtype": _DTYPES.get(x["out_dtype"], x["out_dtype"]),
                "flops": share,
            }
            for x, share in product.shapes
        ]
        shapes = {"matmul": [*products, *_grouped(ops.get("group_matmul"))], "attention": _attention(ops)}
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}; expected a published efficiency file") from error
    except (msgspec.DecodeError, msgspec.ValidationError, KeyError, ValueError) as error:
        missing = f"has no {error}" if isinstance(error, KeyError) else f"is wrong: {error}"
        raise FileError(
            f"{path} {missing}; expected a SimuMax system file with accelerator.op.matmul, "
            "accelerator.bandwidth.default, and networks"
        ) from error
    peak = product.tflops * 1e12
    of_bytes = memory.shares(bytes_per_s)
    attention = min(1.0, ops["sdp_fwd"].efficient_factor if "sdp_fwd" in ops else product.efficient_factor)
    efficiency = {
        "matmul": {"flops": product.efficient_factor, "bandwidth": of_bytes["bandwidth"]},
        "convolution": {"flops": ops.get("default", product).efficient_factor, "bandwidth": of_bytes["bandwidth"]},
        "attention": {"flops": attention, "bandwidth": of_bytes["bandwidth"]},
    }
    others = dict.fromkeys(("normalization", "pointwise", "reduction", "indexing"), of_bytes)
    kernels = {
        "ce_fusion": "cross-entropy", "ce": "unfused-cross-entropy",
        "permute_fwd": "permute-forward", "permute_bwd": "permute-backward",
    }  # fmt: skip
    return {
        "kind": "cuda",
        "memory_bytes": base.get("memory_bytes", system.accelerator.mem_gbs * 1e9),
        "bytes_per_s": bytes_per_s,
        "launch_s": base.get("launch_s", _LAUNCH_S),
        "flops_per_s": {"float32": peak, "float16": peak, **base.get("flops_per_s", {}), "bfloat16": peak},
        "link": network.link("p2p"),
        "network": base.get("network", network.link("p2p")),
        "devices_per_node": system.num_per_node,
        "collectives": network.collectives(),
        "efficiency": efficiency | others,
        "kernels": {name: bandwidth[key].shares(bytes_per_s) for key, name in kernels.items() if key in bandwidth},
        "shapes": shapes,
        "sources": dict.fromkeys(
            ("flops", "link", "efficiency", "memory"), f"measured, by {path.name} ({system.sys_name})"
        ),
    }


def _grouped(op: _Op | None) -> Iterator[dict[str, Any]]:
    """The sizes are those of the forward; here they are those of the product itself."""
    for x, share in op.shapes if op else ():
        rows, inner, columns = int(x["M"]), int(x["K"]), int(x["N"])
        sizes = {
            "fwd": (rows, inner, columns, "TN", x["out_dtype"]),
            "bwd_grad_act": (rows, columns, inner, "NN", x["out_dtype"]),
            "bwd_grad_w": (columns, rows, inner, "NT", x["main_grad_dtype"]),
        }
        m, k, n, layout, dtype = sizes[x["stage"]]
        yield {
            "groups": int(x["ng"]), "m": m, "k": k, "n": n, "layout": layout, "accumulate": x["accumulate"] == "True",
            "dtype": _DTYPES.get(x["dtype"], x["dtype"]), "out_dtype": _DTYPES.get(dtype, dtype), "flops": share,
        }  # fmt: skip


def _attention(ops: Mapping[str, _Op]) -> list[dict[str, Any]]:
    """Of queries, keys and values that are contiguous, as a trainer makes them; others where there are none."""
    found: dict[tuple[object, ...], dict[str, Any]] = {}
    for name, direction in (("sdp_fwd", "forward"), ("sdp_bwd", "backward")):
        for x, share in ops[name].shapes if name in ops else ():
            row = {
                "batch": int(x["batch"]), "sequence": int(x["seq_len"]), "heads": int(x["head_num"]),
                "kv_heads": int(x["kv_head_num"]), "qk_dim": int(x["qk_head_dim"]), "v_dim": int(x["v_head_dim"]),
                "direction": direction,
            }  # fmt: skip
            if x["qkv_contiguous"] == "True" or tuple(row.values()) not in found:
                found[tuple(row.values())] = {**row, "flops": share}
    return list(found.values())


def main() -> None:
    """Print the hardware file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    print(json.dumps(read_system_file(parser.parse_args().file), indent=1, default=list))


if __name__ == "__main__":
    main()
