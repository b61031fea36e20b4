"""The layers, shared weights and values of a profile, from a captured chain and the bytes measured at its cuts.

Each parameter is counted once; parameters of several layers are listed separately. A value is what one layer passes to
a set of others; its bytes are those at the first cut that it crosses, so the values across a cut sum up to the output
bytes of the layer before it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor, nn

from gplan.core import Layer, LayerCost, SharedWeight, Value, ValueCost
from gplan.core.errors import ModelError
from gplan.core.profile import ParameterSize
from gplan_profiler.capture.chain import Chain, Route
from gplan_profiler.capture.equal_layers import ChainPositions
from gplan_profiler.memory.allocations import gradient_bytes, storage_bytes
from gplan_profiler.memory.layer_memory import NO_BYTES, LayerBytes, TensorBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeCosts:
    """The costs of a chain's layers and of the loss at one micro-batch size."""

    microbatch_size: int
    chain: Chain
    sources: tuple[int, ...]  # for each layer the one that was measured, or computed, for it
    layers: tuple[LayerCost, ...]
    loss: LayerCost
    memories: tuple[LayerBytes, ...]  # of each layer


def layers_with_weights(
    sizes: Sequence[SizeCosts], *, updates_s: Mapping[nn.Parameter, float] | None = None
) -> tuple[tuple[Layer, ...], tuple[SharedWeight, ...]]:
    """The layers of a chain with their weights and costs at all sizes, and the weights used by several layers.

    `updates_s`: of the optimizer, for each trained parameter; None: not known.
    """
    chain, sources = sizes[0].chain, sizes[0].sources
    states = [chain.state(layer) for layer in range(len(chain))]
    users, places = dict[nn.Parameter, list[int]](), ChainPositions(sources)
    for index, state in enumerate(states):
        for parameter in _parameters(state):
            users.setdefault(parameter, []).append(index)
    trained = Counter[torch.dtype]()  # bytes by type
    for parameter in chain.model.parameters():
        trained[parameter.dtype] += parameter.nbytes * parameter.requires_grad
    most_trained = max(trained, key=trained.__getitem__, default=None)

    def size_of(parameter: nn.Parameter) -> ParameterSize:
        """How replicas may divide it: trained ones of another type than most stay whole, as those without rows."""
        is_divisible = parameter.dim() > 0 and (not parameter.requires_grad or parameter.dtype == most_trained)
        num_rows = parameter.shape[0] if is_divisible else 0
        return ParameterSize(num_rows=num_rows, num_bytes=parameter.nbytes, is_trained=parameter.requires_grad)

    def update_s(parameters: Iterable[nn.Parameter]) -> float | None:
        return None if updates_s is None else math.fsum(updates_s.get(x, 0.0) for x in parameters)

    def in_whole_chain(layer: int, num_later: int) -> int:  # leftovers are counted among measured layers
        return places.after(layer, num_later) - layer

    layers = []
    for index, state in enumerate(states):
        own = [x for x in _parameters(state) if len(users[x]) == 1]
        buffers = [x for x in state.values() if not isinstance(x, nn.Parameter)]
        layers.append(
            Layer(
                name=chain.names[index],
                kind=chain.kinds[index],
                num_parameters=sum(x.numel() for x in own),
                weight_bytes=sum(x.nbytes for x in own) + storage_bytes(buffers),
                gradient_bytes=sum(map(gradient_bytes, own)),
                costs=tuple(x.layers[index].renumbered(partial(in_whole_chain, index)) for x in sizes),
                same_as=None if sources[index] == index else sources[index],
                largest_trained_bytes=max(map(gradient_bytes, own), default=0),
                parameters=tuple(map(size_of, own)),
                update_s=update_s(own),
            )
        )
    names = {parameter: name for name, parameter in chain.model.named_parameters()}
    shared = tuple(
        SharedWeight(
            name=names[x],
            layers=tuple(used),
            num_parameters=x.numel(),
            weight_bytes=x.nbytes,
            gradient_bytes=gradient_bytes(x),
            parameters=(size_of(x),),
            update_s=update_s([x]),
        )
        for x, used in users.items()
        if len(used) > 1
    )
    return tuple(layers), shared


def _parameters(state: Mapping[str, Tensor]) -> list[nn.Parameter]:
    """Each parameter of a layer once, also under several names."""
    return list(dict.fromkeys(x for x in state.values() if isinstance(x, nn.Parameter)))


def values_of(sizes: Sequence[SizeCosts]) -> tuple[Value, ...]:
    """The values at all micro-batch sizes, by producer and consumers; none for a plain chain.

    In a plain chain each layer reads only the output of the layer before it and returns no view of it. A value that does
    not exist at one of the sizes has 0 bytes there; so has the value between two layers whose order is fixed by a shared
    buffer alone. Raises ModelError if the layers differ between sizes.
    """
    first = sizes[0]
    for size in sizes[1:]:
        names, expected = size.chain.names, first.chain.names
        if names != expected:
            differing = sorted({*names} ^ {*expected}) or [a for a, b in zip(names, expected, strict=True) if a != b]
            raise ModelError(
                f"the model has {len(expected)} layers at micro-batch size {first.microbatch_size} and {len(names)} at "
                f"{size.microbatch_size}, which differ in {', '.join(differing[:3])}; profile such sizes one by one"
            )
    found = [_bytes_by_storage_route(x) for x in sizes]
    routes = sorted({route for x in found for route in x}, key=lambda x: x.order)
    if all(not x.before and x.own.consumers == (_producer(x.own) + 1,) for x in routes):
        return ()
    return tuple(
        Value(
            producer=route.own.producer,
            consumers=route.own.consumers,
            costs=tuple(
                ValueCost(microbatch_size=size.microbatch_size, **asdict(of_size.get(route, NO_BYTES)))
                for size, of_size in zip(sizes, found, strict=True)
            ),
            view_of=routes.index(route.viewed) if route.before else None,
        )
        for route in routes
    )


@dataclass(frozen=True, slots=True)
class _StorageRoute:
    """The route of a tensor, and of tensors in its storage: those that it is a view of, and its own views."""

    own: Route
    before: tuple[Route, ...] = ()
    after: tuple[Route, ...] = ()

    @property
    def viewed(self) -> _StorageRoute:
        *before, last = self.before
        return _StorageRoute(last, tuple(before), (self.own, *self.after))

    @property
    def order(self) -> list[tuple[int, tuple[int, ...]]]:
        return [(_producer(x), x.consumers) for x in (self.own, *self.before, *self.after)]


def _producer(route: Route) -> int:
    return -1 if route.producer is None else route.producer


def _bytes_by_storage_route(costs: SizeCosts) -> Mapping[_StorageRoute, TensorBytes]:
    chain = costs.chain
    tensors = [_numbered(chain.routes(boundary)) for boundary in range(len(chain) + 1)]
    viewed: dict[_Tensor, _Tensor] = {}
    for layer, memory in enumerate(costs.memories):
        for tensor, index in zip(tensors[layer + 1], memory.views, strict=True):
            if tensor[0].producer == layer and index is not None:
                source = tensors[layer][index]
                if source[0].consumers == (layer,) and source not in viewed.values():
                    viewed[tensor] = source
    views_of = {source: tensor for tensor, source in viewed.items()}
    inputs = [  # unsaved, because no layer is charged for them
        TensorBytes(
            num_bytes=x.num_bytes, gradient_bytes=x.num_bytes if x.requires_grad else 0, unsaved_bytes=x.num_bytes
        )
        for x in chain.specs(0)
    ]
    sizes: dict[_Tensor, TensorBytes] = {}
    for found, of_cut in zip((*tensors[1:], tensors[0]), (*(x.crossing for x in costs.memories), inputs), strict=True):
        sizes = {**dict(zip(found, of_cut, strict=True)), **sizes}
    totals: dict[_StorageRoute, TensorBytes] = {}
    for tensor, num_bytes in sizes.items():
        route = _StorageRoute(tensor[0], _routes(viewed, tensor)[::-1], _routes(views_of, tensor))
        totals[route] = totals.get(route, NO_BYTES) + num_bytes
    known = {route.own for route in totals}
    totals.update((_StorageRoute(x), NO_BYTES) for x in (Route(i, (j,)) for i, j in chain.pinned) if x not in known)
    return {route: x for route, x in totals.items() if route.own.consumers}


_Tensor = tuple[Route, int]
"""A tensor, by its number among those at a cut with the same route, which cross all of its cuts in the same order."""


def _numbered(routes: Iterable[Route]) -> list[_Tensor]:
    seen = Counter[Route]()
    found: list[_Tensor] = []
    for route in routes:
        found.append((route, seen[route]))
        seen[route] += 1
    return found


def _routes(following: Mapping[_Tensor, _Tensor], tensor: _Tensor) -> tuple[Route, ...]:
    """The routes of the tensors that follow one, in order."""
    found: list[Route] = []
    while tensor in following:
        tensor = following[tensor]
        found.append(tensor[0])
    return tuple(found)
