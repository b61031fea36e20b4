"""Layers as if some of their operations were fused into one kernel, for profiles of hardware that is not here.

A fused kernel reads its inputs and writes its results once, and keeps for its backward its inputs alone (attention its
output and a sum for each query too). Its backward reads these and the gradients of its results, and writes those of its
inputs; the fused cross-entropy writes its gradient over the logits. What is fused is found in the graph of a captured
layer: the operations of a module whose class is named as a norm, an activation that is multiplied (SwiGLU, GeGLU), and
attention, written out or as torch's function. The loss is found by torch's cross_entropy. In layers that are modules,
not graphs (those of an nn.Sequential), only torch's own functions are found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from gplan.core import OperationKind, Work
from profiler.analytic.hardware import FusedKernel
from profiler.analytic.roofline import Operation
from profiler.analytic.shapes import AttentionShape, Direction, dtype_name
from profiler.memory.allocations import tensors_in

_ATEN = torch.ops.aten
_KINDS: dict[FusedKernel, OperationKind] = {
    "attention": "attention",
    "cross-entropy": "reduction",
    "normalization": "normalization",
    "activation": "pointwise",
}
_ACTIVATIONS = {_ATEN.silu.default, _ATEN.gelu.default, _ATEN.relu.default, _ATEN.sigmoid.default}
_PRODUCTS = {_ATEN.matmul.default, _ATEN.bmm.default, _ATEN.baddbmm.default}
_SOFTMAXES = {_ATEN.softmax.int, _ATEN._softmax.default}
_BETWEEN = {  # what may lie between the two products of an attention
    "mul", "div", "add", "sub", "to", "_to_copy", "dropout", "masked_fill", "where", "view", "reshape", "expand",
    "_unsafe_view", "clone", "contiguous", "type_as", "tanh",
}  # fmt: skip
_FUNCTIONS: dict[Callable[..., Any], FusedKernel] = {
    F.cross_entropy: "cross-entropy",
    F.layer_norm: "normalization",
    F.rms_norm: "normalization",
    F.group_norm: "normalization",
    F.scaled_dot_product_attention: "attention",
}
_CAUSAL = 5  # the place of is_causal among the arguments of torch's attention
_GraphNodes: TypeAlias = Sequence[fx.Node]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """What is fused while layers run on fake tensors, and how often each kernel was found."""

    kernels: tuple[FusedKernel, ...] = ()
    found: Counter[FusedKernel] = field(default_factory=Counter)


NOTHING_FUSED = Fused()


@dataclass(frozen=True, slots=True)
class _KernelCounter:
    """Counts fused kernels."""

    fused: Fused
    note: Callable[[Operation], None]

    def count(self, region: _Region, direction: Direction, inputs: Sequence[Tensor], moved: Sequence[Tensor]) -> None:
        """Count a kernel that reads or writes each of `moved` once."""
        is_attention = region.kernel == "attention" and len(inputs) >= 3 and all(x.dim() == 4 for x in inputs[:3])
        shape = AttentionShape.of(inputs[0], inputs[1], inputs[2], direction) if is_attention else None
        work = Work(
            kind=_KINDS[region.kernel],
            num_operations=1,
            num_flops=shape.num_flops if shape else max(x.numel() for x in moved),
            num_bytes=sum(x.numel() * x.element_size() for x in moved),
        )
        self.note(
            Operation(
                work=work,
                dtype=dtype_name(inputs[0]),
                shape=shape if region.is_causal else None,
                kernel="cross-entropy" if region.kernel == "cross-entropy" else None,
            )
        )


_CURRENT: ContextVar[_KernelCounter | None] = ContextVar("fusion", default=None)


@contextmanager
def fusing(fused: Fused, note: Callable[[Operation], None]) -> Iterator[None]:
    """Inside, regions of graphs and torch's functions run as fused kernels, which are counted by `note`."""
    token = _CURRENT.set(_KernelCounter(fused, note))
    try:
        with ExitStack() as stack:
            if fused.kernels:
                stack.enter_context(_TorchFunctions(fused))
            yield
    finally:
        _CURRENT.reset(token)


def _is_causal(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of torch's attention with these arguments is causal; False for other operations."""
    return kwargs.get("is_causal", len(args) > _CAUSAL and args[_CAUSAL]) is True


class _TorchFunctions(TorchFunctionMode):
    """Runs torch's own functions as fused kernels."""

    def __init__(self, fused: Fused) -> None:
        super().__init__()
        self._fused = fused

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kernel = _FUNCTIONS.get(func)
        if kernel is None or kernel not in self._fused.kernels:
            return func(*args, **(kwargs or {}))
        call = args, kwargs or {}

        def run(*tensors: Tensor) -> Any:
            rest = iter(tensors)
            given, named = pytree.tree_map_only(Tensor, lambda _: next(rest), call)
            return func(*given, **named)

        return _Region(kernel, run, is_causal=_is_causal(*call))(*tensors_in(call))


@dataclass(frozen=True, slots=True)
class _Region:
    """Operations that are one kernel."""

    kernel: FusedKernel
    run: Callable[..., Any]
    is_causal: bool = False  # of an attention, whether half of the scores need not be computed

    def __call__(self, *inputs: Tensor) -> Any:
        """The result on fake tensors, made and differentiated as one kernel each way; run as it is with other values."""
        fusion = _CURRENT.get()
        if fusion is None or not all(isinstance(x, Tensor) for x in inputs):
            return self.run(*inputs)
        with _disable_current_modes(), torch.no_grad():
            example = self.run(*(x.detach() for x in inputs))
        if not isinstance(example, Tensor):
            return self.run(*inputs)
        fusion.fused.found[self.kernel] += 1
        return _KernelFunction.apply(fusion, self, example, *inputs)  # type: ignore[no-untyped-call]


class _KernelFunction(torch.autograd.Function):
    """A kernel from its inputs to one result, on fake tensors."""

    @staticmethod
    def forward(ctx: Any, fusion: _KernelCounter, region: _Region, example: Tensor, *inputs: Tensor) -> Tensor:
        result = torch.empty_like(example)  # with its strides, which decide whether what follows copies it
        saved = list(inputs)
        if region.kernel == "attention":  # and what the softmax is divided by, of each query
            saved += [result, torch.empty(example.shape[:-1], dtype=torch.float32, device=example.device)]
        ctx.fusion, ctx.region, ctx.num_inputs = fusion, region, len(inputs)
        ctx.save_for_backward(*saved)
        fusion.count(region, "forward", inputs, [*inputs, result])
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        inputs = ctx.saved_tensors[: ctx.num_inputs]
        in_place = ctx.region.kernel == "cross-entropy"
        wanted = zip(inputs, ctx.needs_input_grad[3:], strict=True)
        made = [(x if in_place else torch.empty_like(x)) if needs else None for x, needs in wanted]
        if any(x is not None for x in made):
            moved = [*ctx.saved_tensors, *gradients, *(x for x in made if x is not None)]
            ctx.fusion.count(ctx.region, "backward", inputs, moved)
        return (None, None, None, *made)


def with_fused_regions(layer: nn.Module, kernels: Sequence[FusedKernel]) -> nn.Module:
    """The layer with its fused regions as single nodes, with the same parameters; itself where it is no graph."""
    if not isinstance(layer, fx.GraphModule) or not kernels:
        return layer
    regions = [(kernel, nodes) for kernel, find in _FINDERS.items() if kernel in kernels for nodes in find(layer.graph)]
    if not regions:
        return layer
    graph, taken = fx.Graph(), set[fx.Node]()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(layer.graph, copies))
    made = fx.GraphModule(layer, graph)
    for kernel, nodes in regions:
        copied = [copies[x] for x in nodes]
        if not taken.intersection(copied) and _replaced(made.graph, kernel, copied):
            taken.update(copied)
    made.graph.lint()
    made.recompile()
    return made


def _replaced(graph: fx.Graph, kernel: FusedKernel, nodes: _GraphNodes) -> bool:
    """Replace the nodes by one that calls them as a fused kernel; False where they have not one result."""
    inside = set(nodes)
    results = [x for x in nodes if any(user not in inside for user in x.users)]
    inputs = list(dict.fromkeys(x for node in nodes for x in node.all_input_nodes if x not in inside))
    if len(results) != 1 or not inputs:
        return False
    region = fx.Graph()
    places: dict[fx.Node, fx.Node] = {x: region.placeholder(f"input_{i}") for i, x in enumerate(inputs)}
    for node in nodes:
        places[node] = region.node_copy(node, places.__getitem__)
    region.output(places[results[0]])
    run = fx.GraphModule(nn.Module(), region).forward
    whole = _Region(kernel, run, is_causal=_is_causal(nodes[-1].args, nodes[-1].kwargs))

    def fused(*inputs: Tensor) -> Any:  # a function, as a graph's code needs a name
        return whole(*inputs)

    with graph.inserting_before(results[0]):
        call = graph.call_function(fused, tuple(inputs))
    results[0].replace_all_uses_with(call)
    for node in reversed(nodes):
        graph.erase_node(node)
    return True


def _norms(graph: fx.Graph) -> Iterator[_GraphNodes]:
    """The operations of each module that is a norm without running means."""
    by_module: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        stack: Mapping[str, tuple[str, Any]] = node.meta.get("nn_module_stack") or {}
        path, of_module = list(stack.values())[-1] if stack else ("", "")
        kind = str(of_module).split(".")[-1].lower()
        if node.op == "call_function" and "norm" in kind and "batch" not in kind:
            by_module.setdefault(path, []).append(node)
    yield from by_module.values()


def _gates(graph: fx.Graph) -> Iterator[_GraphNodes]:
    """An activation that is only multiplied, and the product."""
    for node in graph.nodes:
        if node.target in _ACTIVATIONS and len(node.users) == 1:
            (user,) = node.users
            if user.target == _ATEN.mul.Tensor and len(user.all_input_nodes) == 2:
                yield node, user


def _attentions(graph: fx.Graph) -> Iterator[_GraphNodes]:
    """torch's function, or all between the two products around a softmax."""
    for node in graph.nodes:
        if node.target == _ATEN.scaled_dot_product_attention.default:
            yield (node,)
        elif node.target in _SOFTMAXES:
            before, after = _path(node, back=True), _path(node, back=False)
            if before and after:
                inside = {*before, node, *after}
                yield [x for x in graph.nodes if x in inside]


def _path(start: fx.Node, *, back: bool) -> list[fx.Node]:
    """The nodes from a softmax to a product, the latter included; none where there is something else between."""
    found, node = list[fx.Node](), start
    while True:
        following = node.all_input_nodes[:1] if back else list(node.users)
        if len(following) != 1 or (back and len(following[0].users) > 1):
            return []
        node = following[0]
        found.append(node)
        if node.target in _PRODUCTS:
            return found
        name = node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""
        if name.rpartition("::")[2] not in _BETWEEN:
            return []


_FINDERS: dict[FusedKernel, Callable[[fx.Graph], Iterator[_GraphNodes]]] = {
    "attention": _attentions,
    "normalization": _norms,
    "activation": _gates,
}
