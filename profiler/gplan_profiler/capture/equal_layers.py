"""Which layers have equal costs, and which of them are measured.

The form of a layer is its operations with their arguments; values are named by their index within the layer, at the
boundary before it, or among its state. requires_grad comes from running fake tensors through the operations, once per
form. `sources` shortens repeated runs of layers, so that only a few repetitions are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from itertools import groupby
from typing import Any

import torch
from torch.fx import GraphModule, Node

from gplan_profiler.capture.chain import TensorSpec
from gplan_profiler.capture.grouping import is_vmap_edge
from gplan_profiler.capture.opaque_calls import fresh
from gplan_profiler.capture.trace import Trace
from gplan_profiler.memory.allocations import tensors_in
from gplan_profiler.torch_compat import FakeTensor, FakeTensorMode, pytree

_MOST_NUMBERS = 64  # elements of a constant that is compared by value


def layer_form(traced: Trace, nodes: Sequence[Node], before: Sequence[Node], after: Sequence[Node]) -> Hashable:
    """The form of a layer between two boundaries."""
    names: dict[Node, Hashable] = {node: ("input", place) for place, node in enumerate(before)}
    used: list[Hashable] = []  # of the state

    def name(node: Node) -> Hashable:
        if node not in names:
            if node in traced.state:
                names[node] = "state", len(used)
                state, values = traced.state[node], None
                tensor = state.tensor
                if state.is_constant and tensor.numel() <= _MOST_NUMBERS and not isinstance(tensor, FakeTensor):
                    values = tuple(map(repr, tensor.flatten().tolist()))
                used.append((tuple(tensor.shape), tensor.dtype, tensor.requires_grad, values))
            else:
                held = traced.attribute(str(node.target))  # a graph, or the structure of an operation's arguments
                names[node] = _graph_form(held) if isinstance(held, GraphModule) else repr(held)
        return names[node]

    operations = []
    for node in nodes:
        operations.append(_operation(node, name))
        names[node] = len(operations)
    boundaries = tuple(
        tuple((x.shape, x.dtype, x.strides) for x in (TensorSpec.of(node.meta["val"]) for node in nodes))
        for nodes in (before, after)
    )
    return tuple(operations), tuple(name(x) for x in after), tuple(used), boundaries


def gradient_flags(
    traced: Trace, nodes: Sequence[Node], before: Sequence[Node], after: Sequence[Node], flags: Sequence[bool]
) -> tuple[bool, ...]:
    """requires_grad of the values after a layer, given `flags` of those before it.

    Operations that fake tensors cannot run, such as those with data-dependent shapes, count as differentiable, and all of
    a layer with torch.vmap in it.
    """
    has_vmap = any(is_vmap_edge(node) for node in nodes)
    values: dict[Node, Any] = {}

    def value(node: Node) -> Any:
        if node not in values:
            if node not in traced.state:
                return traced.attribute(str(node.target))
            values[node] = fresh(node.meta["val"], requires_grad=traced.state[node].tensor.requires_grad)
        return values[node]

    with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
        values.update(
            {node: fresh(node.meta["val"], requires_grad=flag) for node, flag in zip(before, flags, strict=True)}
        )
        for node in nodes:
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), value)
            try:
                if has_vmap:
                    raise RuntimeError("an operation under torch.vmap cannot be run alone")
                values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            except RuntimeError:
                needed = any(x.requires_grad for x in tensors_in((args, kwargs)))
                values[node] = pytree.tree_map(lambda x, flag=needed: fresh(x, requires_grad=flag), node.meta["val"])
    return tuple(values[node].requires_grad for node in after)


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
    return type(value), repr(value)  # True differs from 1, and NaN equals NaN


def _graph_form(module: GraphModule) -> Hashable:
    """The form of an inner graph, such as that of a no_grad block."""
    names: dict[Node, Hashable] = {}
    for place, node in enumerate(module.graph.nodes):
        inner = getattr(module, str(node.target), None) if node.op == "get_attr" else None
        names[node] = _graph_form(inner) if isinstance(inner, GraphModule) else place
    return tuple(_operation(x, names.__getitem__) for x in module.graph.nodes if x.op in ("call_function", "output"))


KEPT_REPETITIONS = 4
_LONGEST_PATTERN = 64  # a block may have some dozens of operations


def sources(structures: Sequence[Hashable], *, kept: int = KEPT_REPETITIONS) -> tuple[int, ...]:
    """For every layer, the layer that is measured for it (itself if it is measured). O(L) times the longest pattern.

    A run is a pattern of layers, by structure, that repeats. Its first `kept` - 1 repetitions and its last one are
    measured, at least 2 in all; since their inputs and outputs have equal shapes, they form a chain again. The others
    have the costs of the second repetition, which has neighbours of its own kind on both sides.

        structures  e b b b b b b b n h        measured  0 1 2 3 7 8 9        layers 4, 5, 6 are like 2

    >>> sources("ebbbbbbbnh")
    (0, 1, 2, 3, 2, 2, 2, 7, 8, 9)
    >>> sources("xababababababy", kept=2)
    (0, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 11, 12, 13)
    """
    found: list[int] = []
    while len(found) < len(structures):
        first = len(found)
        length, count = 1, 1  # of the pattern from here on that covers the most layers
        for longer in range(1, min(_LONGEST_PATTERN, (len(structures) - first) // 2) + 1):
            pattern, times = structures[first : first + longer], 1
            while structures[first + times * longer : first + (times + 1) * longer] == pattern:
                times += 1
            if times > 1 and (count == 1 or longer * times > length * count):
                length, count = longer, times
        like = first + (length if kept > 2 else 0)
        for repetition in range(count):
            is_kept = repetition < kept - 1 or repetition == count - 1
            start = first + repetition * length if is_kept else like
            found.extend(range(start, start + length))
    return tuple(found)


class ChainPositions:
    """Translates distances between measured layers into distances in the whole chain, given `sources`."""

    def __init__(self, found: Sequence[int]) -> None:
        self._found = found
        self._kept = [i for i, source in enumerate(found) if source == i]
        self._place = {layer: i for i, layer in enumerate(self._kept)}
        # of layers not measured: the pattern's length, the run's last layer
        self._runs: dict[int, tuple[int, int]] = {}
        for is_left_out, some in groupby(range(len(found)), key=lambda i: found[i] != i):
            layers = list(some)
            length = len({found[i] for i in layers})
            if is_left_out:
                self._runs.update(dict.fromkeys(layers, (length, layers[-1] + length)))
        self._end = cache(self._find_end)

    def after(self, layer: int, num_later: int) -> int:
        """The layer that relates to `layer` as its source relates to the measured layer `num_later` after it.

        Within a run the distance is the same, up to the run's last repetition; layers after the run have their own
        position. Returns L after the last layer.

        >>> places = ChainPositions(sources("ebbbbbbbnh"))
        >>> [places.after(5, 1), places.after(3, 1), places.after(5, 3), places.after(5, 5)]
        [6, 4, 8, 10]
        """
        end = self._end(self._found[layer], num_later)
        if end is not None:
            return end
        place = layer + num_later
        if layer in self._runs:
            length, last = self._runs[layer]
            place -= max(0, -(-(place - last) // length)) * length
        return place

    def _find_end(self, source: int, num_later: int) -> int | None:
        """The measured layer `num_later` after a source; None within the same run, or without a run in between."""
        place = self._place[source] + num_later
        if place >= len(self._kept):
            return len(self._found)
        end = self._kept[place]
        left_out = [i for i in range(source, end) if i in self._runs]
        if not left_out:
            return None
        runs = {self._runs[i] for i in left_out}
        is_same_run = len(runs) == 1 and end <= runs.pop()[1] and source >= self._found[left_out[0]]
        return None if is_same_run else end
