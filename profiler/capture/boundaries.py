"""What crosses between the layers of a traced model, and in which orders these can run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor
from torch.fx import Node

from gplan.core.errors import ModelError
from profiler.capture.chain import Route
from profiler.capture.grouping import Group
from profiler.capture.trace import Trace


def alive_at(traced: Trace, groups: Sequence[Group]) -> list[tuple[Node, ...]]:
    """For each of the L+1 boundaries the values made before it and read after it, in the order of the trace."""
    num_layers = len(groups)
    place = _places(groups)
    alive: list[list[Node]] = [[] for _ in range(num_layers + 1)]
    for node in traced.graph.nodes:
        if node in traced.held or node.op in ("output", "get_attr") or _is_constant_input(node):
            continue
        first = place[node] + 1 if node in place else 0
        last = max([0 if node.op == "placeholder" else -1, *(place.get(x, num_layers) for x in node.users)])
        for boundary in range(first, last + 1):
            alive[boundary].append(node)
    return [tuple(nodes) for nodes in alive]


def _is_constant_input(node: Node) -> bool:
    """None, a number or the like, whose value is in the trace wherever it was used."""
    return node.op == "placeholder" and not isinstance(node.meta.get("val"), Tensor)


def routes_of(groups: Sequence[Group], boundaries: Iterable[Iterable[Node]]) -> dict[Node, Route]:
    """Which layer makes each value that crosses, and which ones read it."""
    place, num_layers = _places(groups), len(groups)
    crossing = dict.fromkeys(node for nodes in boundaries for node in nodes)
    return {node: _route(node, place, num_layers) for node in crossing}


def _route(node: Node, place: Mapping[Node, int], num_layers: int) -> Route:
    producer = place.get(node)
    readers = {place.get(user, num_layers) for user in node.users} - {producer}
    return Route(producer, tuple(sorted(x for x in readers if x is not None)))


def _places(groups: Sequence[Group]) -> dict[Node, int]:
    return {node: i for i, group in enumerate(groups) for node in group.nodes}


def check_order(names: Sequence[str], order: Sequence[int], pairs: Iterable[tuple[int, int]]) -> None:
    """Raise ModelError unless `order` names every layer once, the first of each pair before the second.

    A pair's second may be L, the model's output.
    """
    num_layers = len(names)
    if sorted(order) != list(range(num_layers)):
        raise ModelError(
            f"the order {_shortened(order)} is none of the {num_layers} layers of this model; expected each of "
            f"0 to {num_layers - 1} once"
        )
    place = {layer: i for i, layer in enumerate([*order, num_layers])}
    for before, after in pairs:
        if place[before] > place[after]:
            raise ModelError(
                f"layer {names[after]} cannot run before {names[before]}, whose results or buffers it needs; expected an "
                "order in which every layer comes after what it needs"
            )


def _shortened(order: Sequence[int]) -> str:
    shown = [str(x) for x in order[:8]]
    return ", ".join([*shown, "..."] if len(order) > len(shown) else shown)
