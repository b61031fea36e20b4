"""What layers pass to each other, as values of a profile: by the captured chain, with the bytes found at its cuts.

A tensor's bytes are those at the first cut that it crosses, an input's those at the first after a layer; since a tensor
is the same at every cut, the values across a cut sum up to the bytes of the layer before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gplan.core import Value, ValueCost
from gplan.core.errors import ModelError
from profiler.capture.chain import Chain, Route, TensorSpec
from profiler.memory.layer_memory import NO_BYTES, TensorBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossings:
    """What crosses the cuts of a chain captured at one micro-batch size."""

    microbatch_size: int
    chain: Chain
    after: tuple[tuple[TensorBytes, ...], ...]  # the cut after each layer, in the order of the chain's boundary there


def values_of(sizes: Sequence[Crossings]) -> tuple[Value, ...]:
    """The values at all micro-batch sizes, by producer and consumers; none for a plain chain.

    A chain is plain where each layer reads what the one before it makes, and nothing else. A value that is not there at
    one of the sizes has 0 bytes there, and so has one that stands for an order alone: of layers that use one buffer.
    Raises ModelError where the model has other layers at another size.
    """
    _check_alike(sizes)
    found = [_bytes_by_route(x) for x in sizes]
    routes = sorted(
        {route for x in found for route in x}, key=lambda x: (-1 if x.producer is None else x.producer, x.consumers)
    )
    if all(_is_to_the_next(route) for route in routes):
        return ()
    return tuple(
        Value(
            producer=route.producer,
            consumers=route.consumers,
            costs=tuple(
                _cost(size.microbatch_size, of_size.get(route, NO_BYTES))
                for size, of_size in zip(sizes, found, strict=True)
            ),
        )
        for route in routes
    )


def _check_alike(sizes: Sequence[Crossings]) -> None:
    first = sizes[0]
    for size in sizes[1:]:
        found, expected = size.chain.names, first.chain.names
        if found != expected:
            differing = sorted({*found} ^ {*expected}) or [a for a, b in zip(found, expected, strict=True) if a != b]
            raise ModelError(
                f"the model has {len(expected)} layers at micro-batch size {first.microbatch_size} and {len(found)} at "
                f"{size.microbatch_size}, which differ in {', '.join(differing[:3])}; profile such sizes one by one"
            )


def _is_to_the_next(route: Route) -> bool:
    return route.consumers == ((0 if route.producer is None else route.producer + 1),)


def _bytes_by_route(crossings: Crossings) -> Mapping[Route, TensorBytes]:
    chain = crossings.chain
    totals: dict[Route, TensorBytes] = {}
    cuts = [(i + 1, tensors) for i, tensors in enumerate(crossings.after)]
    for boundary, tensors in [*cuts, (0, tuple(map(_of_input, chain.specs(0))))]:
        here: dict[Route, TensorBytes] = {}
        for route, tensor in zip(chain.routes(boundary), tensors, strict=True):
            here[route] = here.get(route, NO_BYTES) + tensor
        totals = {**here, **totals}
    for before, after in chain.pinned:
        totals.setdefault(Route(before, (after,)), NO_BYTES)
    return {route: x for route, x in totals.items() if route.consumers}


def _of_input(spec: TensorSpec) -> TensorBytes:
    """No layer is charged for an input of the model, so none counts as keeping it."""
    num_bytes = spec.num_bytes
    return TensorBytes(
        num_bytes=num_bytes, gradient_bytes=num_bytes if spec.requires_grad else 0, unsaved_bytes=num_bytes
    )


def _cost(microbatch_size: int, found: TensorBytes) -> ValueCost:
    return ValueCost(
        microbatch_size=microbatch_size,
        num_bytes=found.num_bytes,
        gradient_bytes=found.gradient_bytes,
        unsaved_bytes=found.unsaved_bytes,
    )
