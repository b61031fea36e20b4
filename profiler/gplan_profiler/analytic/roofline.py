"""Roofline model: counted operations (`work_counter`) turned into seconds.

Operations of one kind take max(FLOPs / peak, bytes / bandwidth), each times the efficiency of the kind (Williams et al.,
Roofline, CACM 2009); kinds add up. A product whose shape has a measured share of the peak on the device takes its FLOPs
at that share instead, and a kernel with rates of its own takes those; of products without one, large ones reach
more. Each operation costs one launch: added on a CPU; on a GPU or TPU, where launches run ahead, their sum is a lower
bound. Left out: caches, overlap of kinds, and small operations that leave a device idle. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from gplan.core import OperationKind, Work
from gplan_profiler.analytic.hardware import KINDS, PRODUCTS, Hardware, KernelName
from gplan_profiler.analytic.shapes import MatmulShape, Shape

_USUAL_PRODUCT = 1e12  # FLOPs of a product that reaches the share of its kind
_SIZE_EXPONENT = 0.04
"""Smaller products reach less: on A100, 0.66 of the peak at 0.14 TFLOP and 0.75 at 3.2 (published runs)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """Operations of one kind that were counted: one, or some that are alike."""

    work: Work
    dtype: str = "bfloat16"  # of its first operand
    shape: Shape | None = None  # of a product
    kernel: KernelName | None = None  # whose rates count, where the hardware has them
    time: int = 0  # when it ended, on the counter's clock


def total_work(operations: Iterable[Operation]) -> tuple[Work, ...]:
    """The total work of some operations by kind."""
    totals: dict[OperationKind, Work] = {}
    for operation in operations:
        kind = operation.work.kind
        totals[kind] = totals[kind] + operation.work if kind in totals else operation.work
    return tuple(totals[kind] for kind in KINDS if kind in totals)


def kind_seconds(work: Work, hardware: Hardware, *, dtype: str, kernel: KernelName | None = None) -> float:
    """Seconds of the operations of one kind without launches; `dtype` is that of the products.

    Raises UsageError if the hardware has no flop rate for it.
    """
    reached = hardware.efficiency(work.kind, kernel)
    flops_s = work.num_flops / (hardware.peak_flops_per_s(work.kind, dtype) * reached.flops)
    bytes_s = work.num_bytes / (hardware.bytes_per_s * reached.bandwidth)
    return max(flops_s, bytes_s) + work.num_operations * reached.latency_s


def roofline_seconds(work: Sequence[Work], hardware: Hardware, *, dtype: str) -> float:
    """Seconds of all operations of a layer in one direction, with their launches."""
    device_s = sum(kind_seconds(x, hardware, dtype=dtype) for x in work)
    return _with_launches(device_s, sum(x.num_operations for x in work), hardware)


def operations_seconds(operations: Sequence[Operation], hardware: Hardware, *, dtype: str) -> float:
    """As `roofline_seconds`, with shares by shape and rates by kernel where the hardware has them."""
    own_s, others = 0.0, list[Operation]()
    for x in operations:
        share = hardware.shapes.share(x.shape) if x.shape else None
        if x.shape is not None and share is not None:
            rate = hardware.peak_flops_per_s(x.work.kind, x.shape.dtype) * share
            own_s += x.work.num_operations * x.shape.num_flops / rate
        elif x.kernel in hardware.kernels:
            own_s += kind_seconds(x.work, hardware, dtype=dtype, kernel=x.kernel)
        elif isinstance(x.shape, MatmulShape):
            size = (x.shape.num_flops / x.shape.groups / _USUAL_PRODUCT) ** _SIZE_EXPONENT
            work = replace(x.work, num_flops=round(x.work.num_flops / size))
            own_s += kind_seconds(work, hardware, dtype=x.dtype)
        else:
            others.append(x)
    device_s = own_s + sum(kind_seconds(x, hardware, dtype=dtype) for x in total_work(others))
    return _with_launches(device_s, sum(x.work.num_operations for x in operations), hardware)


def _with_launches(device_s: float, num_operations: int, hardware: Hardware) -> float:
    launch_s = hardware.launch_s * num_operations
    return device_s + launch_s if hardware.kind == "cpu" else max(device_s, launch_s)


def product_dtype(operations: Sequence[Operation]) -> str:
    """The dtype of most FLOPs of products; float32 without products."""
    flops: dict[str, int] = {}
    for operation in operations:
        if operation.work.kind in PRODUCTS:
            flops[operation.dtype] = flops.get(operation.dtype, 0) + operation.work.num_flops
    return max(flops, key=flops.__getitem__, default="float32")
