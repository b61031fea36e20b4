"""Group the operations of a trace into layers: by the author's modules (`groups_by_module`) or by operation.

`groups_by_operation` (granularity "op") applies these rules in order:

1.  Each main operation opens a layer: products (matrices, convolutions, attention, embeddings, recurrences), softmax,
    and operations outside torch, if they depend on parameters (positions and masks do not). So does an operation with
    weights of its own, such as a norm, unless its module has the same parent as the layer before it and it is that
    layer's only reader: a convolution keeps its batch norm.
2.  Other operations are light. They join the latest layer that they read from and that depends on parameters, which can
    always run in that order. A light operation that joins branches with main operations of their own opens a layer.
3.  A layer is cut after an operation where clearly fewer bytes cross than at any later cut: before the pooling of an
    activation that is read twice, but not before a gelu.
4.  Light operations without a main one join their only reader if they depend on no parameter, or if the cut is useless.
5.  Views join their readers, unless these read only a part (profiler/capture/wiring.py).
6.  In-place writes, sizes that depend on data, and buffers that are written and read stay in one layer.
7.  Layers are in the order of the operations that open them; but parts split off by rule 3, and layers without
    parameters, stand before their first reader.

A block of a transformer has 7 to 10 layers, with attention to an encoder 15; a cell of AmoebaNet has about 18.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.fx import Graph, Node

from gplan.core.errors import ModelError
from profiler.capture.authored_layers import unit_paths
from profiler.capture.trace import Trace, module_path
from profiler.capture.value_forms import has_fixed_size
from profiler.capture.wiring import (
    Wiring,
    bytes_of,
    connected,
    duplicate_state_views,
    layers_of_views,
    operation_name,
    outputs_of,
    wiring_of,
)

_AS_GOOD = 0.9  # a cut is better only with less than this share of another's bytes


def is_useful(num_bytes: int, others: Sequence[int]) -> bool:
    """Whether a cut is crossed by clearly fewer bytes than all others.

    >>> is_useful(80, [100, 120]), is_useful(100, [100, 120])
    (True, False)
    """
    return num_bytes <= _AS_GOOD * min(others)


def split_run(nodes: Sequence[Node], wiring: Wiring) -> list[list[Node]]:
    """A main operation and its light ones, cut where fewer bytes cross than at any later cut; quadratic.

    In `conv relu | pool` the result of relu is read twice: both would cross a cut after the pool. In `linear gelu
    dropout` the same bytes cross everywhere, so there is no cut. If the first operation is light, the cut must also be
    better than one before it.
    """
    crossing = [_crossing_bytes(nodes, cut, wiring) for cut in range(len(nodes) + 1)]
    others = [] if wiring.is_main(nodes[0]) else crossing[:1]
    parts: list[list[Node]] = [[]]
    for cut, node in enumerate(nodes, start=1):
        parts[-1].append(node)
        later = crossing[cut + 1 :]
        if later and is_useful(crossing[cut], [*others, *later]):
            parts.append([])
    return parts


def _crossing_bytes(nodes: Sequence[Node], cut: int, wiring: Wiring) -> int:
    """The bytes made before the cut and read after it, and those read only after it within the run."""
    made = outputs_of(nodes[:cut], wiring)
    before, behind = set(nodes[:cut]), set(nodes[cut:])
    consumed = {x for node in behind for x in wiring.reads[node] - before - behind if wiring.readers[x] <= {*nodes}}
    return bytes_of(made) + bytes_of(consumed)


def groups_by_operation(traced: Trace, model: nn.Module) -> list[Group]:
    """The layers of a traced model by the rules above, in an order in which they can run.

    Raises ModelError for a model without operations on its inputs.
    """
    duplicate_state_views(traced)
    wiring = wiring_of(traced)
    drafts = _Drafts(wiring, _weighted_leaves(model))
    for node in wiring.operations:
        drafts.add(node)
    if not drafts.found:
        raise ModelError(f"{type(model).__name__} performs no operation on its inputs; there is nothing to cut")
    parts = [part for draft in drafts.found for part in _parts(draft, wiring)]
    found = _before_first_readers(_joined_to_readers(parts, wiring), wiring)
    _with_idle(found, drafts.idle)
    home = {node: i for i, draft in enumerate(found) for node in draft.nodes}
    for view, place in layers_of_views(traced.graph, wiring, home).items():
        found[place].nodes.append(view)
    nodes = in_trace_order(traced.graph, [draft.nodes for draft in found])
    names = distinct(_names(model, [draft.opener for draft in found]))
    kinds = [operation_name(draft.opener) for draft in found]
    return [Group(name, kind, x) for name, kind, x in zip(names, kinds, nodes, strict=True)]


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
    weighted_leaves: frozenset[str]
    found: list[_Draft] = field(default_factory=list)
    idle: list[Node] = field(default_factory=list)  # reads state only and has no readers, such as a counter
    _home: dict[Node, int] = field(default_factory=dict)

    def add(self, node: Node) -> None:
        """Assign the next operation."""
        sources = {self._home[x] for x in self.wiring.reads[node] if x in self._home}
        latest = max((x for x in sources if self.found[x].mains), default=max(sources, default=None))
        if self.wiring.is_main(node) or self._has_weights_of_its_own(node, latest):
            self._open(node, sources, is_light=False)
        elif latest is None and not self.wiring.readers[node]:
            self.idle.append(node)
        elif latest is None or self._joins(sources, latest):
            self._open(node, sources, is_light=True)
        else:
            self._home[node] = latest
            self.found[latest].nodes.append(node)

    def _open(self, node: Node, sources: Iterable[int], *, is_light: bool) -> None:
        mains = 0 if is_light else 1 << len(self.found)
        for x in sources:
            mains |= self.found[x].mains
        self._home[node] = len(self.found)
        self.found.append(_Draft(node, [node], mains, is_light))

    def _joins(self, sources: Iterable[int], latest: int) -> bool:
        known = self.found[latest].mains
        return any(self.found[x].mains & ~known for x in sources)

    def _has_weights_of_its_own(self, node: Node, latest: int | None) -> bool:
        if latest is None:  # it reads inputs of the model, or only weights, as a weight norm does
            return node in self.wiring.own_parameters and bool(self.wiring.reads[node])
        path, before = module_path(node), self.found[latest]
        if path == before.path or not (node in self.wiring.own_parameters or path in self.weighted_leaves):
            return False
        is_sibling = path.rpartition(".")[0] == before.path.rpartition(".")[0]
        read = [x for x in self.wiring.reads[node] if self._home.get(x) == latest]
        return not (is_sibling and all(self.wiring.readers[x] == {node} for x in read))


def _weighted_leaves(model: nn.Module) -> frozenset[str]:
    """The paths of the modules with parameters and without submodules."""
    modules = model.named_modules(remove_duplicate=False)
    return frozenset(path for path, x in modules if x._parameters and not any(True for _ in x.children()))


def _parts(draft: _Draft, wiring: Wiring) -> list[_Draft]:
    """Rule 3."""
    if not draft.mains:
        return [draft]
    first, *others = split_run(draft.nodes, wiring)
    light = [
        _Draft(part[0], part, draft.mains, True, is_split_off=True)
        for nodes in others
        for part in connected(nodes, wiring)
    ]
    return [_Draft(draft.opener, first, draft.mains, draft.is_light), *light]


def _joined_to_readers(drafts: Sequence[_Draft], wiring: Wiring) -> list[_Draft]:
    """Rule 4, from the last layer to the first, so that each reader is final."""
    home = {node: draft for draft in drafts for node in draft.nodes}
    gone = set[int]()
    for place in range(len(drafts) - 1, -1, -1):
        draft = drafts[place]
        reader = _only_reader(draft, home, wiring) if draft.is_light else None
        if reader is not None and (not draft.mains or _is_useless(draft, reader, wiring)):
            reader.nodes.extend(draft.nodes)
            home.update(dict.fromkeys(draft.nodes, reader))
            gone.add(place)
    return [draft for place, draft in enumerate(drafts) if place not in gone]


def _only_reader(draft: _Draft, home: dict[Node, _Draft], wiring: Wiring) -> _Draft | None:
    readers = {x for node in draft.nodes for x in wiring.readers[node]}
    found = {id(home[x]): home[x] for x in readers if x in home and home[x] is not draft}
    is_output = any(x not in home for x in readers)
    return next(iter(found.values())) if len(found) == 1 and not is_output else None


def _is_useless(draft: _Draft, reader: _Draft, wiring: Wiring) -> bool:
    """Whether a cut between light operations and their main reader is no better than the cuts around both."""
    nodes = set(draft.nodes)
    consumed = {x for node in nodes for x in wiring.reads[node] - nodes if wiring.readers[x] <= nodes}
    between = bytes_of(outputs_of(draft.nodes, wiring))
    outputs = outputs_of(reader.nodes, wiring)
    is_last = all(x.op == "output" for node in outputs for x in wiring.readers[node])
    around = [bytes_of(consumed), *([] if is_last else [bytes_of(outputs)])]
    return wiring.is_main(reader.opener) and not is_useful(between, around)


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


def _with_idle(drafts: Sequence[_Draft], idle: Sequence[Node]) -> None:
    """Add operations without readers to a layer of the same module, else to the first layer."""
    home = {node: draft for draft in drafts for node in draft.nodes}
    by_path = {module_path(node): draft for node, draft in home.items()}
    for node in idle:
        by_path.get(module_path(node), drafts[0]).nodes.append(node)


def _names(model: nn.Module, openers: Sequence[Node]) -> list[str]:
    """The module's path for a leaf module that is one layer; else the path and the operation."""
    paths = [module_path(x) for x in openers]
    leaves = {path for path, x in model.named_modules(remove_duplicate=False) if not any(True for _ in x.children())}
    return [
        path
        if path and path in leaves and paths.count(path) == 1
        else ".".join(filter(None, (path, operation_name(x))))
        for path, x in zip(paths, openers, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Group:
    """The operations of one layer, in the order of the trace."""

    name: str
    kind: str
    nodes: tuple[Node, ...]


def operations_of(graph: Graph, model: nn.Module) -> list[Node]:
    """The operations of a graph, in its order; raises ModelError if there are none."""
    found = [node for node in graph.nodes if node.op not in ("placeholder", "output", "get_attr")]
    if not found:
        raise ModelError(f"{type(model).__name__} performs no operation on its inputs; there is nothing to cut")
    return found


def groups_by_module(graph: Graph, model: nn.Module) -> list[Group]:
    """Consecutive operations of one unit form a layer; operations between units belong to the unit before them."""
    units = unit_paths(model)
    nodes: list[list[Node]] = []
    owners: list[str] = []
    home: dict[Node, int] = {}
    for node in operations_of(graph, model):
        if node.target is operator.getitem:  # stays with the operation that makes the tuple
            index = home[node.args[0]]  # type: ignore[index]
        else:
            owner = units.get(module_path(node))
            if not nodes or (owner is not None and owners[-1] not in (owner, "")):
                nodes.append([])
                owners.append(owner or "")
            elif owner is not None:
                owners[-1] = owner  # operations before the first unit belong to it
            index = len(nodes) - 1
        nodes[index].append(node)
        home[node] = index
    names = distinct([owner or type(model).__name__ for owner in owners])
    kinds = [type(model.get_submodule(owner)).__name__ for owner in owners]
    in_order = in_trace_order(graph, nodes)
    return [Group(name, kind, group) for name, kind, group in zip(names, kinds, in_order, strict=True)]


def in_trace_order(graph: Graph, groups: Iterable[Iterable[Node]]) -> list[tuple[Node, ...]]:
    """The groups with their nodes in the order of the graph."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    return [tuple(sorted(group, key=order.__getitem__)) for group in groups]


def distinct(names: Sequence[str]) -> list[str]:
    """The names, repeated ones numbered: name, name#2, name#3."""
    seen: dict[str, int] = {}
    found = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        found.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return found


def merged(graph: Graph, groups: Sequence[Group], inseparable: Iterable[Collection[Node]]) -> list[Group]:
    """The groups, joined with all between them where a set of `inseparable` nodes spans several.

    An input or state among such nodes counts as in the first group, the output as in the last.
    """
    place = {node: i for i, group in enumerate(groups) for node in group.nodes}
    joined = set[int]()  # cuts, by the group before them, that must not be made
    for nodes in inseparable:
        places = [place.get(x, len(groups) - 1 if x.op == "output" else 0) for x in nodes]
        joined.update(range(min(places), max(places)))
    runs: list[list[Group]] = []
    for i, group in enumerate(groups):
        if i - 1 in joined:
            runs[-1].append(group)
        else:
            runs.append([group])
    nodes_of = in_trace_order(graph, [[x for group in run for x in group.nodes] for run in runs])
    names = ["..".join(group.name for group in run) for run in runs]
    return [Group(name, run[0].kind, nodes) for name, run, nodes in zip(names, runs, nodes_of, strict=True)]


def uncut_spans(nodes: Iterable[Node]) -> list[set[Node]]:
    """Each value that cannot cross a cut (not a tensor, or one whose size depends on data), with its readers."""
    values = ((node, node.meta.get("val")) for node in nodes if node.users)
    return [{node, *node.users} for node, x in values if not (isinstance(x, Tensor) and has_fixed_size(x))]


def vmap_spans(nodes: Iterable[Node]) -> list[set[Node]]:
    """The first and last operation of each torch.vmap, which must run in one layer."""
    spans, open_ones = list[set[Node]](), list[Node]()
    for node in nodes:
        if not is_vmap_edge(node):
            continue
        if "increment" in operation_name(node):
            open_ones.append(node)
        else:
            spans.append({open_ones.pop(), node})
    return spans


def is_vmap_edge(node: Node) -> bool:
    """Whether a torch.vmap, or another transform of torch.func, begins or ends here."""
    return operation_name(node).endswith("crement_nesting")
