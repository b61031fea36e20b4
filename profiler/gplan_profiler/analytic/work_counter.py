"""Counts operations under a dispatch mode: kind, FLOPs and bytes moved of each.

FLOPs of products are by torch.utils.flop_counter; causal attention counts in full. A gradient of a convolution counts
as its forward, because torch's formula ignores groups. Other operations count one FLOP per element read or written.
Bytes are each operand and result once, without caches or fusion; an expanded operand counts its storage, a lookup only
the rows read. Views, empty tensors and shape queries are no work. Products without a formula (FFTs, solvers) count as
pointwise.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from gplan.core import OperationKind, Work
from gplan_profiler.analytic.hardware import PRODUCTS
from gplan_profiler.analytic.roofline import Operation
from gplan_profiler.analytic.shapes import AttentionShape, Direction, Layout, MatmulShape, Shape, dtype_name
from gplan_profiler.memory.allocations import storage_key, tensors_in
from gplan_profiler.torch_compat import HigherOrderOperator, TorchDispatchMode, flop_registry

_ATEN = torch.ops.aten
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


class WorkCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations inside the block, each with its time on the clock `now`."""

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
