"""What a captured layer computes, without its names: equal for layers that cost the same.

A layer's form is its operations in order, each with its arguments; a value is named by its number within the layer, its
place at the boundary before, or its place among the layer's state. Shapes and dtypes are those of the trace. Whether a
value needs a gradient is what autograd says of fake tensors that pass through the operations, once for every form.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from profiler.capture.chain import TensorSpec
from profiler.capture.expand import Held

_MOST_NUMBERS = 64  # of a constant that is compared by value


def layer_form(
    nodes: Sequence[Node],
    before: Sequence[Node],
    after: Sequence[Node],
    held: Mapping[Node, Held],
    body: Callable[[str], Any],
) -> Hashable:
    """The form of a layer between two boundaries; `body` gives the graph that a get_attr node names."""
    names: dict[Node, Hashable] = {node: ("input", place) for place, node in enumerate(before)}
    used: list[Hashable] = []

    def name(node: Node) -> Hashable:
        if node not in names:
            if node in held:
                names[node] = "state", len(used)
                used.append(_held_key(held[node]))
            else:
                names[node] = _graph_form(body(str(node.target)), body)
        return names[node]

    operations = []
    for node in nodes:
        operations.append(_operation(node, name))
        names[node] = len(operations)
    boundaries = tuple(tuple(_shape_key(x) for x in values) for values in (before, after))
    return tuple(operations), tuple(name(x) for x in after), tuple(used), boundaries


def value_specs(nodes: Sequence[Node], flags: Sequence[bool]) -> tuple[TensorSpec, ...]:
    """The specs of the values of a boundary, of which `flags` says whether they need a gradient."""
    return tuple(
        TensorSpec(shape=tuple(x.meta["val"].shape), dtype=x.meta["val"].dtype, requires_grad=flag)
        for x, flag in zip(nodes, flags, strict=True)
    )


def gradient_flags(
    nodes: Sequence[Node],
    before: Sequence[Node],
    flags: Sequence[bool],
    after: Sequence[Node],
    held: Mapping[Node, Held],
    body: Callable[[str], Any],
) -> tuple[bool, ...]:
    """Whether the values after a layer need a gradient, given whether those before it do.

    Operations that fake tensors cannot run, such as those whose shapes depend on data, count as differentiable.
    """
    values: dict[Node, Any] = {}

    def value(node: Node) -> Any:
        if node not in values:
            if node not in held:
                return body(str(node.target))
            values[node] = _fake(node.meta["val"], held[node].tensor.requires_grad)
        return values[node]

    with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
        values.update({node: _fake(node.meta["val"], flag) for node, flag in zip(before, flags, strict=True)})
        for node in nodes:
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), value)
            try:
                values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            except RuntimeError:
                given = pytree.tree_leaves((args, kwargs))
                needed = any(isinstance(x, Tensor) and x.requires_grad for x in given)
                values[node] = pytree.tree_map(lambda x, flag=needed: _fake(x, flag), node.meta["val"])
    return tuple(values[node].requires_grad for node in after)


def _fake(value: Any, requires_grad: bool) -> Any:
    """A fake tensor shaped like the value of a trace; not a leaf, so that operations may write into it."""
    if not isinstance(value, Tensor):
        return value
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    differentiable = value.dtype.is_floating_point or value.dtype.is_complex
    return made.requires_grad_().clone() if requires_grad and differentiable else made


def _shape_key(node: Node) -> Hashable:
    value = node.meta["val"]
    return tuple(value.shape), value.dtype


def _held_key(held: Held) -> Hashable:
    tensor, values = held.tensor, None
    if held.is_constant and tensor.numel() <= _MOST_NUMBERS and not isinstance(tensor, FakeTensor):
        values = tuple(map(repr, tensor.flatten().tolist()))
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad, values


def _operation(node: Node, name: Callable[[Node], Hashable]) -> Hashable:
    return node.op, node.target, _argument(node.args, name), _argument(node.kwargs, name)


def _argument(value: Any, name: Callable[[Node], Hashable]) -> Hashable:
    if isinstance(value, Node):
        return "node", name(value)
    if isinstance(value, list | tuple):
        return tuple(_argument(x, name) for x in value)
    if isinstance(value, dict):
        return tuple((key, _argument(x, name)) for key, x in value.items())
    if isinstance(value, slice):
        return "slice", *(_argument(x, name) for x in (value.start, value.stop, value.step))
    if isinstance(value, Hashable) and not isinstance(value, bool | float | complex):
        return value
    return type(value), repr(value)  # True is not 1, and a NaN is itself


def _graph_form(module: GraphModule, body: Callable[[str], Any]) -> Hashable:
    """The form of the body of an operation that runs a graph of its own, such as a no_grad block."""
    names: dict[Node, Hashable] = {}
    for place, node in enumerate(module.graph.nodes):
        inner = getattr(module, str(node.target), None) if node.op == "get_attr" else None
        is_parameter = node.op == "placeholder"
        form = _graph_form(inner, body) if isinstance(inner, GraphModule) else None
        names[node] = place if is_parameter or form is None else form
    operations = [_operation(x, names.__getitem__) for x in module.graph.nodes if x.op in ("call_function", "output")]
    return tuple(operations)
