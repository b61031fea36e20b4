"""A traced graph without its views: the operations, what each reads, and how many bytes it makes.

A view (transpose, select, reshape, a `to` without effect, an entry of a tuple) does no work: its readers read the
operation behind it. A view of an input or of the state counts as an operation.

Views are assigned to layers last, because they decide how many bytes cross a cut. A view goes to its reader, and each of
several readers gets its own copy, so that the viewed tensor crosses once. If the readers use only a part of the tensor,
the view stays with the tensor, so that only the part crosses. Entries of a tuple and detached tensors stay with their
operation, so that no stage waits for a gradient that never comes.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import nn
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Graph, Node

from profiler.capture.inplace import aliased_arguments, written_arguments, written_state
from profiler.capture.opaque_calls import CustomFunction, ModuleCall
from profiler.capture.trace import Trace
from profiler.capture.value_forms import has_fixed_size
from profiler.memory.allocations import tensors_in

_PRODUCTS = {
    "linear", "matmul", "mm", "bmm", "grouped_mm", "addmm", "addbmm", "baddbmm", "mv", "addmv", "addr", "dot", "vdot", "inner", "einsum",
    "tensordot", "bilinear", "chain_matmul", "kron", "cdist", "embedding", "embedding_bag", "lstm", "gru", "rnn_tanh",
    "rnn_relu", "stft", "istft", "linalg_multi_dot", "linalg_inv", "linalg_solve", "linalg_svd", "linalg_qr", "linalg_eigh",
    "linalg_cholesky", "matrix_exp",
}  # fmt: skip
_PARTS_OF_PRODUCTS = ("conv", "attention", "fft_", "softmax")
_DROPPING = {"p", "dropout_p", "dropout", "train", "training"}  # arguments that switch dropout off if they are 0


@dataclass(frozen=True, slots=True)
class Wiring:
    """The operations of a graph in its order, and their connections."""

    operations: tuple[Node, ...]
    reads: dict[Node, frozenset[Node]]  # operations and inputs of the model
    readers: dict[Node, frozenset[Node]]  # operations, and the output node
    of_parameters: frozenset[Node]  # operations that read parameters or what was computed from them
    own_parameters: frozenset[Node]  # operations that read parameters themselves
    views: tuple[Node, ...]

    def is_main(self, node: Node) -> bool:
        """Whether an operation opens a layer: a product, a softmax or an operation outside torch, on parameters."""
        return node in self.of_parameters and _is_main(node)


def wiring_of(traced: Trace) -> Wiring:
    """The wiring of a trace; one pass over the graph."""
    behind: dict[Node, Node] = {}  # for every view the operation behind it
    reads: dict[Node, frozenset[Node]] = {}
    own, derived, views = set[Node](), set[Node](), list[Node]()
    parameters = {node for node, x in traced.state.items() if isinstance(x.tensor, nn.Parameter)}
    for node in traced.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            continue
        sources = {behind.get(x, x) for x in node.all_input_nodes}
        if is_view(node) and sources <= reads.keys():
            behind[node] = next(iter(sources))
            views.append(node)
            continue
        reads[node] = frozenset(x for x in sources if x not in traced.state and x.op != "get_attr")
        if not parameters.isdisjoint(sources):
            own.add(node)
        if node in own or not derived.isdisjoint(sources):
            derived.add(node)
            if is_view(node):  # of a parameter: its readers read the parameter
                parameters.add(node)
    return Wiring(
        operations=tuple(node for node in reads if node.op != "output"),
        reads=reads,
        readers=_turned(reads),
        of_parameters=frozenset(derived),
        own_parameters=frozenset(x for x in own if not is_view(x)),
        views=tuple(views),
    )


def duplicate_state_views(traced: Trace) -> None:
    """Give every reader of a view of the state its own view, so that none crosses a cut."""
    written = {x for touched in written_state(traced.graph.nodes, traced.state) for x in touched.users}
    of_state = set(traced.state)
    for node in traced.graph.nodes:
        if node.op == "call_function" and is_view(node) and node.all_input_nodes[0] in of_state:
            of_state.add(node)
    shared = of_state - written
    for node in reversed(traced.graph.nodes):
        if node.op == "call_function" and node in shared:
            for reader in list(node.users)[1:]:
                with traced.graph.inserting_before(reader):
                    reader.replace_input_with(node, traced.graph.node_copy(node))


def _turned(reads: dict[Node, frozenset[Node]]) -> dict[Node, frozenset[Node]]:
    readers: dict[Node, set[Node]] = {node: set() for node in reads}
    for node, sources in reads.items():
        for x in sources:
            readers.setdefault(x, set()).add(node)
    return {node: frozenset(x) for node, x in readers.items()}


def is_view(node: Node) -> bool:
    """Whether an operation is a view of its one operand, by its schema; a copy to another layout counts as one."""
    if node.target is operator.getitem:
        return True
    if len(node.all_input_nodes) != 1 or not isinstance(node.target, OpOverload):
        return False
    source = node.all_input_nodes[0]
    is_alias = aliased_arguments(node) == [source] and not any(True for _ in written_arguments(node))
    return is_alias and _dtypes(node) == _dtypes(source) and operation_name(node) != "dropout"


def _is_main(node: Node) -> bool:
    if isinstance(node.target, HigherOrderOperator | CustomFunction):
        return True
    if not isinstance(node.target, OpOverload):
        return False
    name = operation_name(node)
    return node.target.namespace != "aten" or name in _PRODUCTS or any(x in name for x in _PARTS_OF_PRODUCTS)


def may_draw(node: Node) -> bool:
    """Whether the result of an operation may be random: by torch's tags, always for operations outside torch.

    Operations with dropout are not random if its probability is 0 or training is off.
    """
    if isinstance(node.target, OpOverload):
        is_of_torch = node.target.namespace == "aten"
        is_marked = torch.Tag.nondeterministic_seeded in node.target.tags
        return not is_of_torch or (is_marked and not _drops_nothing(node, node.target))
    return isinstance(node.target, HigherOrderOperator | CustomFunction)


def depends_on_values(node: Node) -> bool:
    """Whether the work of an operation depends on values: groups or sizes by data, or control flow that was not traced."""
    if isinstance(node.target, CustomFunction):
        return isinstance(node.target.function, ModuleCall)
    return "grouped_mm" in operation_name(node) or not all(map(has_fixed_size, tensors_in(node.meta.get("val"))))


def _drops_nothing(node: Node, operation: OpOverload) -> bool:
    """Whether dropout is off by the arguments in the graph or their defaults; computed arguments may be anything."""
    described = operation._schema.arguments
    given = {x.name: value for x, value in zip(described, node.args, strict=False)} | node.kwargs
    values = {x.name: given.get(x.name, x.default_value) for x in described}
    return any(values[name] == 0 for name in _DROPPING & values.keys())


def operation_name(node: Node) -> str:
    """The name of an operation, such as "layer_norm"; in-place variants have the same name. A no_grad block: "no_grad"."""
    if isinstance(node.target, OpOverload):
        return str(node.target._schema.name).rpartition("::")[2].strip("_")
    name = getattr(node.target, "__name__", str(node.target))
    return "no_grad" if name == "wrap_with_set_grad_enabled" else name


def _dtypes(node: Node) -> set[object]:
    return {x.dtype for x in tensors_in(node.meta.get("val"))}


def bytes_of(nodes: Iterable[Node]) -> int:
    """Bytes of the tensors made by some nodes; data-dependent sizes count as 0."""
    tensors = (x for node in nodes for x in tensors_in(node.meta.get("val")))
    return sum(prod(x.shape) * x.element_size() for x in tensors if has_fixed_size(x))


def outputs_of(nodes: Collection[Node], wiring: Wiring) -> list[Node]:
    """The operations among `nodes` with readers outside."""
    return [x for x in nodes if not wiring.readers[x] <= set(nodes)]


def connected(nodes: Sequence[Node], wiring: Wiring) -> list[list[Node]]:
    """The connected components of some operations, each in the given order."""
    parts: list[list[Node]] = []
    for node in nodes:
        neighbours = wiring.reads[node] | wiring.readers[node]
        touched = [part for part in parts if not neighbours.isdisjoint(part)]
        parts = [part for part in parts if part not in touched]
        parts.append([*(x for part in touched for x in part), node])
    order = {node: i for i, node in enumerate(nodes)}
    return sorted((sorted(part, key=order.__getitem__) for part in parts), key=lambda part: order[part[0]])


_MAY_COPY = {"reshape", "contiguous", "flatten", "to", "reshape_as"}  # not duplicated
_STAYS = None


def layers_of_views(graph: Graph, wiring: Wiring, home: Mapping[Node, int]) -> dict[Node, int]:
    """The layer of every view, given those of the operations; adds copies of views to the graph."""
    constraints: dict[Node, int | None] = {}  # the layer that reads a view
    wanted: dict[Node, int] = {}  # bytes of a view that operations read, directly or through views of it
    views: list[Node] = []
    for view in reversed(wiring.views):
        is_read = any(user not in constraints for user in view.users)
        wanted[view] = bytes_of([view]) if is_read else sum(wanted[user] for user in view.users)
        copies = _for_each_reader(graph, view, _by_reader(view, constraints, home))
        for copy, reader in copies.items():
            wanted[copy] = wanted[view]
            is_movable = _is_entry(view) or (not _is_bound(view) and wanted[view] >= bytes_of(view.all_input_nodes))
            constraints[copy] = reader if is_movable else _STAYS
        views.extend(copies)
    homes: dict[Node, int] = {}
    for view in reversed(views):
        source, constraint = view.all_input_nodes[0], constraints[view]
        at_source = homes[source] if source in homes else home[source]
        homes[view] = at_source if constraint is _STAYS or _is_bound(view) else constraint
    return homes


def _by_reader(
    view: Node, constraints: Mapping[Node, int | None], home: Mapping[Node, int]
) -> dict[int | None, list[Node]]:
    """The users of a view by their layer, for views by that of their reader; None: with the view."""
    found: dict[int | None, list[Node]] = {}
    for user in view.users:
        layer = constraints[user] if user in constraints else home.get(user, _STAYS)
        found.setdefault(layer, []).append(user)
    return found


def _for_each_reader(graph: Graph, view: Node, readers: Mapping[int | None, list[Node]]) -> dict[Node, int | None]:
    """The view and copies of it, one for each layer that reads it; only the view itself if it must not be copied."""
    is_part = bytes_of([view]) < bytes_of(view.all_input_nodes)
    if len(readers) < 2:
        return {view: next(iter(readers), _STAYS)}
    if is_part or _is_bound(view) or operation_name(view) in _MAY_COPY:
        return {view: _STAYS}
    first, *others = sorted(readers, key=lambda layer: -1 if layer is _STAYS else layer)
    copies = {view: first}
    for layer in others:
        with graph.inserting_after(view):
            copy = graph.node_copy(view)
        copies[copy] = layer
        for user in readers[layer]:
            user.replace_input_with(view, copy)
    return copies


def _is_entry(view: Node) -> bool:
    return view.target is operator.getitem


def _is_bound(view: Node) -> bool:
    return _is_entry(view) or operation_name(view) == "detach"
