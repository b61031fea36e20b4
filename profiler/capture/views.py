"""Where views go: a view costs nothing where it stands, but it says how many bytes cross a cut, and in which layout.

A view goes to the layer that reads it, and if several do, each gets its own: what it shows then crosses a cut once,
with no more bytes than it has. Where the reader wants a part only, the view stays with what it shows, so that no more
than the part crosses. Entries of a tuple stay with the operation that makes the tuple, and what is detached with what
it is detached from, so that nobody waits for a gradient that never comes.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

from torch.fx import Graph, Node

from profiler.capture.wiring import Wiring, bytes_of, operation_name

_MAY_COPY = {"reshape", "contiguous", "flatten", "to", "reshape_as"}  # not to be done twice
_STAYS = None


def homes_of_views(graph: Graph, wiring: Wiring, home: Mapping[Node, int]) -> dict[Node, int]:
    """The layer of every view, given those of the operations; adds views to the graph for layers that get their own."""
    wishes: dict[Node, int | None] = {}  # the one layer that wants a view
    wanted: dict[Node, int] = {}  # bytes of a view that operations read, by themselves or as views of it
    views: list[Node] = []
    for view in reversed(wiring.views):
        is_read = any(user not in wishes for user in view.users)
        wanted[view] = bytes_of([view]) if is_read else sum(wanted[user] for user in view.users)
        copies = _for_each_reader(graph, view, _by_reader(view, wishes, home))
        for copy, reader in copies.items():
            wanted[copy] = wanted[view]
            is_movable = _is_entry(view) or (not _is_bound(view) and wanted[view] >= bytes_of(view.all_input_nodes))
            wishes[copy] = reader if is_movable else _STAYS
        views.extend(copies)
    homes: dict[Node, int] = {}
    for view in reversed(views):
        source, wish = view.all_input_nodes[0], wishes[view]
        at_source = homes[source] if source in homes else home[source]
        homes[view] = at_source if wish is _STAYS or _is_bound(view) else wish
    return homes


def _by_reader(view: Node, wishes: Mapping[Node, int | None], home: Mapping[Node, int]) -> dict[int | None, list[Node]]:
    """The users of a view by the layer that they are in, or want to be in if they are views; None: with the view."""
    found: dict[int | None, list[Node]] = {}
    for user in view.users:
        layer = wishes[user] if user in wishes else home.get(user, _STAYS)
        found.setdefault(layer, []).append(user)
    return found


def _for_each_reader(graph: Graph, view: Node, readers: Mapping[int | None, list[Node]]) -> dict[Node, int | None]:
    """The view and copies of it, one for each layer that reads it; only the view, for none,
    where it stays in one piece."""
    is_part = bytes_of([view]) < bytes_of(view.all_input_nodes)
    if len(readers) < 2:  # a view that nobody reads has none
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
