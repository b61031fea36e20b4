"""Roofline model: operations are counted under a dispatch mode (kind, FLOPs, bytes moved), and turned into seconds.

FLOPs of products are by torch.utils.flop_counter; causal attention counts in full. A gradient of a convolution counts
as its forward, because torch's formula ignores groups. Other operations count one FLOP per element read or written.
Bytes are each operand and result once, without caches or fusion; an expanded operand counts its storage, a lookup only
the rows read. Views, empty tensors and shape queries are no work. Products without a formula (FFTs, solvers) count as
pointwise.

Operations of one kind take max(FLOPs / peak, bytes / bandwidth), each times the efficiency of the kind (Williams et al.,
Roofline, CACM 2009); kinds add up. A product whose shape has a measured share of the peak on the device takes its FLOPs
at that share instead, and a kernel with rates of its own takes those; of products without one, large ones reach more. Each operation costs one launch: added on a CPU;
on a GPU or TPU, where launches run ahead, their sum is a lower bound. Left out: caches, overlap of kinds, and small
operations that leave a device idle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from gplan.core import OperationKind, Work
from gplan_profiler.analytic.hardware import KINDS, PRODUCTS, Hardware, KernelName
from gplan_profiler.analytic.shapes import AttentionShape, Direction, Layout, MatmulShape, Shape, dtype_name
from gplan_profiler.memory.allocations import storage_key, tensors_in

_ATEN = torch.ops.aten
_USUAL_PRODUCT = 1e12  # FLOPs of a product that reaches the share of its kind
_SIZE_EXPONENT = (
    0.04  # smaller ones reach less: on A100, 0.66 of the peak at 0.14 TFLOP and 0.75 at 3.2 (published runs)
)
_MATMULS = {
    "mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "mv", "addmv", "dot", "mkldnn_rnn_layer",
    "mkldnn_rnn_layer_backward",
}  # fmt: skip
_NORMS = {"linalg_vector_norm", "norm", "_foreach_norm"}  # they reduce, others with "norm" in their names normalize
_REDUCTIONS = {
    "sum", "mean", "prod", "var", "std", "var_mean", "std_mean", "amax", "amin", "max", "min", "argmax", "argmin",
    "any", "all", "logsumexp", "cumsum", "cumprod",
}  # fmt: skip
_INDEXINGS = (
    "embedding", "index", "gather", "scatter", "nll_loss", "select_backward", "slice_backward", "sort", "topk",
    "upsample", "grid_sampler",
)  # fmt: skip
_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_OVERWRITING = {"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_"}
_MATMUL_OPERANDS = {"mm": slice(0, 2), "bmm": slice(0, 2), "addmm": slice(1, 3), "baddbmm": slice(1, 3)}
_LAYOUTS: dict[tuple[bool, bool], Layout] = {
    (True, False): "TN",
    (False, False): "NN",
    (False, True): "NT",
    (True, True): "NT",  # rare, and not measured
}


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


class WorkCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations inside the block, each with its time on the clock `now`."""

    supports_higher_order_operators = True

    def __init__(self, now: Callable[[], int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._now = now
        self._operations: list[Operation] = []

    def between(self, start: int, end: int) -> tuple[Operation, ...]:
        """The operations of a window, in their order."""
        return tuple(x for x in self._operations if start <= x.time < end)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count it."""
        result = func(*args, **(kwargs or {}))
        if isinstance(func, HigherOrderOperator):
            return result
        num_bytes = _moved_bytes(func, args, kwargs, result)
        if num_bytes:
            kind = operation_kind(_name(func))
            if kind in PRODUCTS and (formula := _FORMULAS.get(func.overloadpacket)):
                num_flops = int(formula(*args, **(kwargs or {}), out_val=result))
            else:
                num_flops = 0 if kind == "indexing" else max(x.numel() for x in tensors_in((args, kwargs, result)))
            work = Work(kind=kind, num_operations=1, num_flops=num_flops, num_bytes=num_bytes)
            first = next(tensors_in((args, kwargs, result)))
            self._operations.append(
                Operation(
                    work=work,
                    dtype=dtype_name(first),
                    shape=_shape(func, args, kwargs or {}, result),
                    time=self._now(),
                )
            )
        return result


def operation_kind(name: str) -> OperationKind:
    """The kind of an operation by its name in torch.ops.aten.

    >>> [operation_kind(x) for x in ("addmm", "convolution_backward", "native_layer_norm", "gelu", "embedding")]
    ['matmul', 'convolution', 'normalization', 'pointwise', 'indexing']
    """
    if name in _MATMULS:
        return "matmul"
    if "attention" in name:
        return "attention"
    if "conv" in name:
        return "convolution"
    if name in _REDUCTIONS or name in _NORMS or "pool" in name:
        return "reduction"
    if "norm" in name or "softmax" in name:
        return "normalization"
    return "indexing" if any(x in name for x in _INDEXINGS) else "pointwise"


def product_dtype(operations: Sequence[Operation]) -> str:
    """The dtype of most FLOPs of products; float32 without products."""
    flops: dict[str, int] = {}
    for operation in operations:
        if operation.work.kind in PRODUCTS:
            flops[operation.dtype] = flops.get(operation.dtype, 0) + operation.work.num_flops
    return max(flops, key=flops.__getitem__, default="float32")


def _name(func: Any) -> str:
    return str(func._schema.name).partition("::")[2]


def _moved_bytes(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Bytes read and written; 0 for views, empty tensors and queries."""
    operands, written = list(tensors_in((args, kwargs))), list(tensors_in(result))
    if not written and func._schema.is_mutable:  # in-place operations on lists return nothing
        written = list(tensors_in(args[0]))
    name, before = _name(func), {storage_key(x) for x in operands}
    is_view = not func._schema.is_mutable and all(storage_key(x) in before for x in written)
    if is_view or name in _EMPTY:
        return 0
    read = operands[1:] if name in _OVERWRITING else operands
    written_bytes = sum(_size(x) for x in written)
    if operation_kind(name) == "indexing":  # of a table only the rows read
        return written_bytes + sum(min(_size(x), written_bytes) for x in read)
    return written_bytes + sum(_size(x) for x in read)


def _size(tensor: Tensor) -> int:
    """Bytes of the distinct elements: a dimension of stride 0 repeats the same ones."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return prod(size for size, stride in sizes if stride) * tensor.element_size() if tensor.numel() else 0


def _shape(func: Any, args: Any, kwargs: Any, result: Any) -> Shape | None:
    """The shape of a matrix product, or of a fused causal attention; None for others."""
    name = _name(func)
    if name in _MATMUL_OPERANDS:
        a, b = args[_MATMUL_OPERANDS[name]]
        return MatmulShape(
            groups=prod(a.shape[:-2]),
            m=a.shape[-2],
            k=a.shape[-1],
            n=b.shape[-1],
            layout=_LAYOUTS[_is_transposed(b), _is_transposed(a)],
            dtype=dtype_name(a),
            out_dtype=dtype_name(result),
        )
    if "attention" not in name:
        return None
    given = dict(zip((x.name for x in func._schema.arguments), args, strict=False)) | kwargs
    if not given.get("is_causal") or given["query"].shape[-2] != given["key"].shape[-2]:
        return None
    direction: Direction = "backward" if "backward" in name else "forward"
    return AttentionShape.of(given["query"], given["key"], given["value"], direction)


def _is_transposed(matrix: Tensor) -> bool:
    return matrix.stride(-1) != 1 and matrix.stride(-2) == 1


def _gradients_of_convolution(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any, out_val: Any, **_: Any) -> int:
    """Each of the gradients of input and weight takes as many FLOPs as the forward."""
    bias, stride, padding, dilation, transposed, *_unused, output_mask = rest
    forward = flop_registry[_ATEN.convolution](x, weight, bias, stride, padding, dilation, transposed, out_val=grad)
    return int(forward * sum(output_mask[:2]))


def _matrix_vector(*tensors: Any, out_val: Any, **_: Any) -> int:
    """mv, addmv and dot: a multiplication and an addition for each element of the largest operand."""
    return int(2 * max(x.numel() for x in tensors if isinstance(x, Tensor)))


def _grouped(a: Tensor, b: Tensor, *rest: Any, out_val: Any, **_: Any) -> int:
    """Each expert multiplies the tokens routed to it, all experts together every token once."""
    experts_share_work = a.dim() == 2 and b.dim() == 2  # their tokens are the inner size, as in the gradient of weights
    return int(2 * a.shape[0] * a.shape[1] * b.shape[1] if experts_share_work else 2 * out_val.numel() * a.shape[-1])


def _recurrent(x: Tensor, *rest: Any, out_val: Any, **_: Any) -> int:
    """One layer over x (sequence, batch, features): both weights, of input and of state, for every vector."""
    return int(2 * x.shape[0] * x.shape[1] * (rest[0].numel() + rest[1].numel()))


_FORMULAS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    _ATEN.convolution_backward: _gradients_of_convolution,
    _ATEN._scaled_dot_product_flash_attention_for_cpu: flop_registry[_ATEN._scaled_dot_product_flash_attention],
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _ATEN._scaled_dot_product_flash_attention_backward
    ],
    _ATEN._grouped_mm: _grouped,
    _ATEN.mv: _matrix_vector,
    _ATEN.addmv: _matrix_vector,
    _ATEN.dot: _matrix_vector,
    _ATEN.mkldnn_rnn_layer: _recurrent,
    _ATEN.mkldnn_rnn_layer_backward: lambda *args, **kwargs: 2 * _recurrent(*args, **kwargs),
}
