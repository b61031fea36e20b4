"""The ways that values take between layers: those with the same producer and the same last readers are one.

A value crosses a cut while its producer is before it and any of its readers is not; only readers that no other reader
must come before it (for gradients: after it) decide that. The model's output, layer L, is read after all layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gplan.balancer.milp.reach import Reach, is_connected
from gplan.costs import Costs
from gplan.crossing import values_of
from gplan.interpolation import value_cost_at
from gplan.nouns import Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """What goes from a layer to others, hop by hop: bytes and given seconds of a micro-batch."""

    producer: int | None  # None: an input of the model
    readers: tuple[int, ...]  # those that decide; L is the model's output
    is_gradient: bool
    is_ordered: bool  # the producer must come before the readers, or, of a gradient, after them
    activation_bytes: int
    gradient_bytes: int
    unsaved_bytes: int
    activation_given_s: float
    gradient_given_s: float

    def bytes_of(self, way: str) -> int:
        """Bytes on the way forward ("activation") or back ("gradient")."""
        return self.activation_bytes if way == "activation" else self.gradient_bytes

    def given_s_of(self, way: str) -> float:
        """Given seconds on one of the ways."""
        return self.activation_given_s if way == "activation" else self.gradient_given_s


def routes_of(costs: Costs, reach: Reach) -> tuple[Route, ...]:
    """All ways that values take."""
    together: dict[tuple[int | None, tuple[int, ...], bool], list[Value]] = {}
    for value in values_of(costs.profile):
        readers = deciding_readers(value, reach)
        if readers:
            together.setdefault((value.producer, readers, value.is_gradient), []).append(value)
    return tuple(_route(costs, reach, *key, values) for key, values in together.items())


def deciding_readers(value: Value, reach: Reach) -> tuple[int, ...]:
    """The readers that decide whether a value crosses; none for a gradient that never does."""
    inside = [x for x in value.consumers if x < reach.num_layers]
    if value.is_gradient:
        return () if value.producer is None else reach.earliest(inside)
    return reach.latest(inside) if len(inside) == len(value.consumers) else (reach.num_layers,)


def always_sent(costs: Costs, reach: Reach, *, way: str) -> bool:
    """Whether bytes cross every cut: the values that have any join all layers, the model's inputs and its outputs.

    A cut then parts two that are joined, and what comes first lies before it.
    """
    return is_connected(reach.num_layers, _sent_edges(costs, reach, way))


def _sent_edges(costs: Costs, reach: Reach, way: str) -> Iterator[tuple[int, int]]:
    """From producer to reader of all that has bytes; -1 is the model's input and L its output."""
    for value in values_of(costs.profile):
        if not _bytes_of(costs, value, way):
            continue
        producer = -1 if value.producer is None else value.producer
        for reader in value.consumers:
            if not value.is_gradient or _is_ordered(reach, value.producer, (reader,), is_gradient=True):
                yield producer, reader


def _bytes_of(costs: Costs, value: Value, way: str) -> int:
    cost = value_cost_at(value.costs, costs.microbatch_size)
    if way == ("gradient" if value.is_gradient else "activation"):
        return cost.num_bytes if value.transfer_s is None else 0
    return 0 if value.is_gradient else cost.gradient_bytes


def _route(
    costs: Costs, reach: Reach, producer: int | None, readers: tuple[int, ...], is_gradient: bool, values: list[Value]
) -> Route:
    given_s = sum(x.transfer_s or 0.0 for x in values)
    sizes = [value_cost_at(x.costs, costs.microbatch_size) for x in values]
    return Route(
        producer=producer,
        readers=readers,
        is_gradient=is_gradient,
        is_ordered=_is_ordered(reach, producer, readers, is_gradient=is_gradient),
        activation_bytes=sum(_bytes_of(costs, x, "activation") for x in values),
        gradient_bytes=sum(_bytes_of(costs, x, "gradient") for x in values),
        unsaved_bytes=0 if is_gradient else sum(x.unsaved_bytes for x in sizes),
        activation_given_s=0.0 if is_gradient else given_s,
        gradient_given_s=given_s if is_gradient else 0.0,
    )


def _is_ordered(reach: Reach, producer: int | None, readers: tuple[int, ...], *, is_gradient: bool) -> bool:
    """Whether whoever holds a reader of a gradient holds the producer later; values forward always are in order."""
    if not is_gradient:
        return True
    return producer is not None and all(x < reach.num_layers and reach.comes_before(x, producer) for x in readers)
