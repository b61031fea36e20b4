"""Group the operations of a trace into layers of one main operation each (granularity "op").

These rules apply in order:

1.  Each main operation opens a layer: products (matrices, convolutions, attention, embeddings, recurrences), softmax,
    and operations outside torch, if they depend on parameters (positions and masks do not). So does an operation with
    weights of its own, such as a norm, unless its module has the same parent as the layer before it and it is that
    layer's only reader: a convolution keeps its batch norm.
2.  Other operations are light. They join the latest layer that they read from and that depends on parameters, which can
    always run in that order. A light operation that joins branches with main operations of their own opens a layer.
3.  A layer is cut after an operation where clearly fewer bytes cross than at any later cut: before the pooling of an
    activation that is read twice, but not before a gelu.
4.  Light operations without a main one join their only reader if they depend on no parameter, or if the cut is useless.
5.  Views join their readers, unless these read only a part: see below.
6.  In-place writes, sizes that depend on data, and buffers that are written and read stay in one layer.
7.  Layers are in the order of the operations that open them; but parts split off by rule 3, and layers without
    parameters, stand before their first reader.

A block of a transformer has 7 to 10 layers, with attention to an encoder 15; a cell of AmoebaNet has about 18.

A view (transpose, select, reshape, a `to` without effect, an entry of a tuple) does no work: its readers read the
operation behind it. A view of an input or of the state counts as an operation. Views are assigned to layers last,
because they decide how many bytes cross a cut. A view goes to its reader, and each of several readers gets its own copy,
so that the viewed tensor crosses once. If the readers use only a part of the tensor, the view stays with the tensor, so
that only the part crosses. Entries of a tuple and detached tensors stay with their operation, so that no stage waits for
a gradient that never comes.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from torch import nn
from torch.fx import Graph, Node

from gplan.core.errors import ModelError
from gplan_profiler.capture.grouping import Group, distinct, in_trace_order
from gplan_profiler.capture.opaque_calls import CustomFunction, ModuleCall
from gplan_profiler.capture.state_readings import is_cheap, is_view
from gplan_profiler.capture.trace import Trace, module_path, operation_name
from gplan_profiler.capture.value_forms import has_fixed_size
from gplan_profiler.memory.allocations import tensors_in
from gplan_profiler.torch_compat import HigherOrderOperator, OpOverload

_PRODUCTS = {
    "linear", "matmul", "mm", "bmm", "grouped_mm", "addmm", "addbmm", "baddbmm", "mv", "addmv", "addr", "dot", "vdot", "inner", "einsum",
    "tensordot", "bilinear", "chain_matmul", "kron", "cdist", "embedding", "embedding_bag", "lstm", "gru", "rnn_tanh",
    "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "stft", "istft", "linalg_multi_dot",
    "linalg_inv", "linalg_solve", "linalg_svd", "linalg_qr", "linalg_eigh", "linalg_cholesky", "matrix_exp",
}  # fmt: skip
_PARTS_OF_PRODUCTS = ("conv", "attention", "fft_", "softmax")
_AS_GOOD = 0.9  # a cut is better only with less than this share of another's bytes
_MAY_COPY = {"reshape", "contiguous", "flatten", "to", "reshape_as"}  # views that are not duplicated


@dataclass(frozen=True, slots=True)
class Wiring:
    """The operations of a graph in its order, without its views, and their connections."""

    operations: tuple[Node, ...]
    reads: dict[Node, frozenset[Node]]  # operations and inputs of the model
    readers: dict[Node, frozenset[Node]]  # operations, and the output node
    of_parameters: frozenset[Node]  # operations that read parameters or what was computed from them
    own_parameters: frozenset[Node]  # operations that read parameters themselves
    views: tuple[Node, ...]

    def is_main(self, node: Node) -> bool:
        """Whether an operation opens a layer: a product, a softmax or an operation outside torch, on parameters."""
        if node not in self.of_parameters:
            return False
        if not isinstance(node.target, OpOverload):
            return isinstance(node.target, HigherOrderOperator | CustomFunction)
        name = operation_name(node)
        return node.target.namespace != "aten" or name in _PRODUCTS or any(x in name for x in _PARTS_OF_PRODUCTS)

    def outputs_of(self, nodes: Collection[Node]) -> list[Node]:
        """The operations among `nodes` with readers outside."""
        return [x for x in nodes if not self.readers[x] <= set(nodes)]


def _wiring_of(traced: Trace) -> Wiring:
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
            if not reads[node] and is_cheap(node):  # a view or cast of a parameter: its readers read the parameter
                parameters.add(node)
    readers: dict[Node, set[Node]] = {node: set() for node in reads}
    for node, read in reads.items():
        for x in read:
            readers.setdefault(x, set()).add(node)
    return Wiring(
        operations=tuple(node for node in reads if node.op != "output"),
        reads=reads,
        readers={node: frozenset(x) for node, x in readers.items()},
        of_parameters=frozenset(derived),
        own_parameters=frozenset(x for x in own if not is_view(x)),
        views=tuple(views),
    )


def depends_on_values(node: Node) -> bool:
    """Whether the work of an operation depends on values: groups or sizes by data, or control flow that was not traced."""
    if isinstance(node.target, CustomFunction):
        return isinstance(node.target.function, ModuleCall)
    return "grouped_mm" in operation_name(node) or not all(map(has_fixed_size, tensors_in(node.meta.get("val"))))


def _bytes_of(nodes: Iterable[Node]) -> int:
    """Bytes of the tensors made by some nodes; data-dependent sizes count as 0."""
    tensors = (x for node in nodes for x in tensors_in(node.meta.get("val")))
    return sum(prod(x.shape) * x.element_size() for x in tensors if has_fixed_size(x))


def is_useful(num_bytes: int, others: Sequence[int]) -> bool:
    """Whether a cut is crossed by clearly fewer bytes than all others.

    >>> is_useful(80, [100, 120]), is_useful(100, [100, 120])
    (True, False)
    """
    return num_bytes <= _AS_GOOD * min(others)


def groups_by_operation(traced: Trace, model: nn.Module) -> list[Group]:
    """The layers of a traced model by the rules above, in an order in which they can run.

    Raises ModelError for a model without operations on its inputs.
    """
    wiring = _wiring_of(traced)
    modules = dict(model.named_modules(remove_duplicate=False))
    leaves = {path for path, x in modules.items() if not any(True for _ in x.children())}
    drafts = _Drafts(wiring, frozenset(path for path in leaves if modules[path]._parameters))
    for node in wiring.operations:
        drafts.add(node)
    if not drafts.found:
        raise ModelError(f"{type(model).__name__} performs no operation on its inputs; there is nothing to cut")
    parts = [part for draft in drafts.found for part in _parts(draft, wiring)]
    found = _before_first_readers(_joined_to_readers(parts, wiring), wiring)
    by_path = {module_path(node): draft for draft in found for node in draft.nodes}
    for node in drafts.idle:  # to a layer of the same module, else to the first layer
        by_path.get(module_path(node), found[0]).nodes.append(node)
    home = {node: i for i, draft in enumerate(found) for node in draft.nodes}
    for view, place in _layers_of_views(traced.graph, wiring, home).items():
        found[place].nodes.append(view)
    paths = [module_path(x.opener) for x in found]
    kinds = [operation_name(x.opener) for x in found]
    names = [  # the path of a leaf module that is one layer, else the path and the operation
        path if path and path in leaves and paths.count(path) == 1 else ".".join(filter(None, (path, kind)))
        for path, kind in zip(paths, kinds, strict=True)
    ]
    nodes = in_trace_order(traced.graph, [draft.nodes for draft in found])
    return [Group(name, kind, x) for name, kind, x in zip(distinct(names), kinds, nodes, strict=True)]


@dataclass(slots=True)
class _Draft:
    """A layer under construction."""

    opener: Node
    nodes: list[Node]
    mains: int  # bit set of the layers with weights among itself and its ancestors
    is_light: bool
    is_split_off: bool = False  # by rule 3

    @property
    def path(self) -> str:
        return module_path(self.opener)


@dataclass(slots=True)
class _Drafts:
    """Rules 1 and 2: assigns every operation to the layer that it opens or joins."""

    wiring: Wiring
    weighted_leaves: frozenset[str]  # paths of the modules with parameters and without submodules
    found: list[_Draft] = field(default_factory=list)
    idle: list[Node] = field(default_factory=list)  # reads state only and has no readers, such as a counter
    _home: dict[Node, int] = field(default_factory=dict)

    def add(self, node: Node) -> None:
        """Assign the next operation."""
        sources = {self._home[x] for x in self.wiring.reads[node] if x in self._home}
        latest = max((x for x in sources if self.found[x].mains), default=max(sources, default=None))
        is_heavy = self.wiring.is_main(node) or self._has_weights_of_its_own(node, latest)
        if not is_heavy and latest is None and not self.wiring.readers[node]:
            self.idle.append(node)
            return
        if is_heavy or latest is None or any(self.found[x].mains & ~self.found[latest].mains for x in sources):
            mains = 1 << len(self.found) if is_heavy else 0
            for x in sources:
                mains |= self.found[x].mains
            latest = len(self.found)
            self.found.append(_Draft(node, [], mains, is_light=not is_heavy))
        self._home[node] = latest
        self.found[latest].nodes.append(node)

    def _has_weights_of_its_own(self, node: Node, latest: int | None) -> bool:
        if latest is None:  # it reads inputs of the model, or only weights, as a weight norm does
            return node in self.wiring.own_parameters and bool(self.wiring.reads[node])
        path, before = module_path(node), self.found[latest]
        if path == before.path or not (node in self.wiring.own_parameters or path in self.weighted_leaves):
            return False
        is_sibling = path.rpartition(".")[0] == before.path.rpartition(".")[0]
        read = [x for x in self.wiring.reads[node] if self._home.get(x) == latest]
        return not (is_sibling and all(self.wiring.readers[x] == {node} for x in read))


def _parts(draft: _Draft, wiring: Wiring) -> list[_Draft]:
    """Rule 3: a main operation and its light ones, cut where fewer bytes cross than at any later cut; quadratic.

    In `conv relu | pool` the result of relu is read twice: both would cross a cut after the pool. In `linear gelu
    dropout` the same bytes cross everywhere, so there is no cut. If the first operation is light, the cut must also be
    better than one before it. Parts that are split off are connected.
    """
    if not draft.mains:
        return [draft]
    nodes, inside, crossing = draft.nodes, {*draft.nodes}, list[int]()
    for cut in range(len(nodes) + 1):  # bytes made before it and read after it, and those that only the run reads
        consumed = {x for node in nodes[cut:] for x in wiring.reads[node] - inside if wiring.readers[x] <= inside}
        crossing.append(_bytes_of(wiring.outputs_of(nodes[:cut])) + _bytes_of(consumed))
    others = [] if wiring.is_main(nodes[0]) else crossing[:1]
    runs: list[list[Node]] = [[]]
    for cut, node in enumerate(nodes, start=1):
        runs[-1].append(node)
        later = crossing[cut + 1 :]
        if later and is_useful(crossing[cut], [*others, *later]):
            runs.append([])
    first, *rest = runs
    light = [
        _Draft(part[0], part, draft.mains, True, is_split_off=True) for run in rest for part in _connected(run, wiring)
    ]
    return [_Draft(draft.opener, first, draft.mains, draft.is_light), *light]


def _connected(nodes: Sequence[Node], wiring: Wiring) -> list[list[Node]]:
    """The connected components of some operations, each in the given order."""
    parts: list[list[Node]] = []
    for node in nodes:
        neighbours = wiring.reads[node] | wiring.readers[node]
        touched = [part for part in parts if not neighbours.isdisjoint(part)]
        parts = [part for part in parts if part not in touched]
        parts.append([*(x for part in touched for x in part), node])
    order = {node: i for i, node in enumerate(nodes)}
    return sorted((sorted(part, key=order.__getitem__) for part in parts), key=lambda part: order[part[0]])


def _joined_to_readers(drafts: Sequence[_Draft], wiring: Wiring) -> list[_Draft]:
    """Rule 4, from the last layer to the first, so that each reader is final."""
    home = {node: draft for draft in drafts for node in draft.nodes}
    kept: list[_Draft] = []
    for draft in reversed(drafts):
        read_by = {x for node in draft.nodes for x in wiring.readers[node]}
        readers = {id(home[x]): home[x] for x in read_by if x in home and home[x] is not draft}
        is_output = any(x not in home for x in read_by)
        reader = next(iter(readers.values())) if len(readers) == 1 and not is_output and draft.is_light else None
        if reader is not None and (not draft.mains or _is_useless(draft, reader, wiring)):
            reader.nodes.extend(draft.nodes)
            home.update(dict.fromkeys(draft.nodes, reader))
        else:
            kept.append(draft)
    return kept[::-1]


def _is_useless(draft: _Draft, reader: _Draft, wiring: Wiring) -> bool:
    """Whether a cut between light operations and their main reader is no better than the cuts around both."""
    nodes = set(draft.nodes)
    consumed = {x for node in nodes for x in wiring.reads[node] - nodes if wiring.readers[x] <= nodes}
    outputs = wiring.outputs_of(reader.nodes)
    is_last = all(x.op == "output" for node in outputs for x in wiring.readers[node])
    around = [_bytes_of(consumed), *([] if is_last else [_bytes_of(outputs)])]
    return wiring.is_main(reader.opener) and not is_useful(_bytes_of(wiring.outputs_of(draft.nodes)), around)


def _before_first_readers(drafts: Sequence[_Draft], wiring: Wiring) -> list[_Draft]:
    """Rule 7, from the last layer to the first, so that the position of each reader is final."""
    free, bound = [x for x in drafts if not x.mains], [x for x in drafts if x.mains]
    found: list[_Draft] = []  # from the last to the first
    for draft in reversed([*free, *bound]):
        readers = {x for node in draft.nodes for x in wiring.readers[node]}
        is_moved = draft.is_split_off or not draft.mains
        later = [i for i, other in enumerate(found) if is_moved and not readers.isdisjoint(other.nodes)]
        found.insert(max(later) + 1 if later else len(found), draft)
    return found[::-1]


_STAYS = None


def _layers_of_views(graph: Graph, wiring: Wiring, home: Mapping[Node, int]) -> dict[Node, int]:
    """Rule 5: the layer of every view, given those of the operations; adds copies of views to the graph."""
    constraints: dict[Node, int | None] = {}  # the layer that reads a view
    wanted: dict[Node, int] = {}  # bytes of a view that operations read, directly or through views of it
    views: list[Node] = []
    for view in reversed(wiring.views):
        is_read = any(user not in constraints for user in view.users)
        wanted[view] = _bytes_of([view]) if is_read else sum(wanted[user] for user in view.users)
        readers: dict[int | None, list[Node]] = {}  # the users by their layer, for views by that of their reader
        for user in view.users:
            layer = constraints[user] if user in constraints else home.get(user, _STAYS)
            readers.setdefault(layer, []).append(user)
        copies = _for_each_reader(graph, view, readers)
        for copy, reader in copies.items():
            wanted[copy] = wanted[view]
            is_entry = view.target is operator.getitem
            is_movable = is_entry or (not _is_bound(view) and wanted[view] >= _bytes_of(view.all_input_nodes))
            constraints[copy] = reader if is_movable else _STAYS
        views.extend(copies)
    homes: dict[Node, int] = {}
    for view in reversed(views):
        source, constraint = view.all_input_nodes[0], constraints[view]
        at_source = homes[source] if source in homes else home[source]
        homes[view] = at_source if constraint is _STAYS or _is_bound(view) else constraint
    return homes


def _for_each_reader(graph: Graph, view: Node, readers: Mapping[int | None, list[Node]]) -> dict[Node, int | None]:
    """The view and copies of it, one for each layer that reads it; only the view itself if it must not be copied."""
    is_part = _bytes_of([view]) < _bytes_of(view.all_input_nodes)
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


def _is_bound(view: Node) -> bool:
    return view.target is operator.getitem or operation_name(view) == "detach"
