"""What the readers of all formats share: the checks of numbers and of cycles, and the way to a Profile.

A reader hands over layers in the order of the file; here they come into an order in which they can run, ties broken by
the file's order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import networkx as nx

from gplan.errors import FileError
from gplan.nouns import (
    Device,
    Granularity,
    Layer,
    LayerCost,
    Link,
    ModelId,
    Profile,
    StepCost,
    Timing,
    Value,
    ValueCost,
)
from gplan.order import moved

MS_PER_S = 1000.0
MICROBATCH_SIZE = 1  # whatever the file's micro-batch was: neither format says it
_LARGEST = 1e15  # beyond any time or size, and sums of it are still whole numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenLayer:
    """A layer as a file gives it, for one micro-batch."""

    name: str
    kind: str
    forward_s: float
    backward_s: float
    weight_bytes: int
    gradient_bytes: int = 0
    stash_bytes: int = 0
    num_parameters: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenGraph:
    """What a file says: layers in its order, and values between their numbers in that order."""

    layers: tuple[GivenLayer, ...]
    values: tuple[Value, ...]
    link: Link
    granularity: Granularity
    memory_bytes: int | None  # of each device
    notes: tuple[str, ...]


def given_value(
    producer: int,
    consumers: Iterable[int],
    *,
    num_bytes: int = 0,
    gradient_bytes: int = 0,
    transfer_s: float | None = None,
    is_gradient: bool = False,
) -> Value:
    """A value from one layer to others, at the one micro-batch size."""
    cost = ValueCost(microbatch_size=MICROBATCH_SIZE, num_bytes=num_bytes, gradient_bytes=gradient_bytes)
    rising = tuple(sorted(set(consumers)))
    return Value(producer=producer, consumers=rising, costs=(cost,), transfer_s=transfer_s, is_gradient=is_gradient)


def profile_of(graph: GivenGraph, *, name: str, content: bytes) -> Profile:
    """The graph as a profile called `name`, in an order in which its layers can run. Its precedence has no cycle."""
    order = _running_order(len(graph.layers), graph.values)
    place = {layer: i for i, layer in enumerate(order)}
    values = tuple(moved(x, place) for x in graph.values)
    return Profile(
        model=ModelId(name=name, settings=(), digest=hashlib.sha256(content).hexdigest()),
        device=Device(name=f"accelerator of {name}", kind="given", memory_bytes=graph.memory_bytes),
        layers=tuple(_layer(graph.layers[layer], i, values) for i, layer in enumerate(order)),
        shared_weights=(),
        loss=(),
        loss_reduction="mean",
        step=StepCost.none(),
        link=graph.link,
        overhead_s=0.0,
        whole=(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=(),
        origin="given",
        notes=graph.notes,
        granularity=graph.granularity,
        values=values,
    )


def check_number(value: float, *, place: str, least: float = 0.0) -> None:
    """Raise FileError with the place in the file, such as "x.json: $.nodes[3].size", for what no cost can be."""
    if not least <= value <= _LARGEST:
        raise FileError(f"{place} is {value!r}; expected a number from {least:g} to {_LARGEST:g}")


def check_no_cycle(graph: nx.DiGraph[str], *, name: str) -> None:
    """Raise FileError that names the nodes of a cycle, if there is one."""
    if nx.is_directed_acyclic_graph(graph):
        return
    cycle = [edge[0] for edge in nx.find_cycle(graph)]
    raise FileError(
        f"{name} has a cycle: {' -> '.join([*cycle, cycle[0]])}; expected nodes that can run one after the other"
    )


def check_joined(num_layers: int, values: Sequence[Value], *, name: str) -> None:
    """Raise FileError where there are no layers, or several and nothing between them: a file cut off, or no model."""
    if not num_layers:
        raise FileError(f"{name} has no node that takes part in the plan; expected at least one")
    if num_layers > 1 and not values:
        raise FileError(f"{name} has {num_layers} layers and no edge between them; expected edges: is it cut off?")


def _running_order(num_layers: int, values: Sequence[Value]) -> list[int]:
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(range(num_layers))
    forward = [x for x in values if not x.is_gradient]
    graph.add_edges_from((x.producer, y) for x in forward if x.producer is not None for y in x.consumers)
    return list(nx.lexicographical_topological_sort(graph))


def _layer(given: GivenLayer, index: int, values: Sequence[Value]) -> Layer:
    cost = LayerCost(
        microbatch_size=MICROBATCH_SIZE,
        forward=Timing.exactly(given.forward_s),
        backward=Timing.exactly(given.backward_s),
        stash_bytes=given.stash_bytes,
        forward_workspace_bytes=0,
        backward_workspace_bytes=0,
        output_bytes=sum(x.costs[0].num_bytes for x in values if _is_alive_after(x, index)),
        output_gradient_bytes=sum(x.costs[0].gradient_bytes for x in values if _is_alive_after(x, index)),
        output_unsaved_bytes=0,
    )
    return Layer(
        name=given.name,
        kind=given.kind,
        num_parameters=given.num_parameters,
        weight_bytes=given.weight_bytes,
        gradient_bytes=given.gradient_bytes,
        costs=(cost,),
    )


def _is_alive_after(value: Value, index: int) -> bool:
    return not value.is_gradient and (value.producer or 0) <= index < value.consumers[-1]
