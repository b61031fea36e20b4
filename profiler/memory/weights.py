"""The layers of a chain with what they weigh: each parameter once, those that several layers use apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn

from gplan.core import Layer, LayerCost, SharedWeight
from profiler.capture.chain import Chain
from profiler.capture.measured_layers import Places
from profiler.memory.allocations import storage_bytes


def weighed_layers(
    chain: Chain, sources: Sequence[int], costs: Sequence[Sequence[LayerCost]]
) -> tuple[tuple[Layer, ...], tuple[SharedWeight, ...]]:
    """The layers of a chain with their weights and their costs, and the weights that they share.

    `sources` says for each layer which one was measured for it; `costs` are those of all layers, size after size.
    """
    states = [chain.state(layer) for layer in range(len(chain))]
    users, places = _users(states), Places(sources)
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
                gradient_bytes=sum(x.nbytes for x in own if x.requires_grad),
                costs=tuple(_placed(of_size[index], index, places) for of_size in costs),
                same_as=None if sources[index] == index else sources[index],
                num_trained=sum(x.requires_grad for x in own),
            )
        )
    return tuple(layers), _shared_weights(chain.model, users)


def _placed(cost: LayerCost, layer: int, places: Places) -> LayerCost:
    """Counted among the layers that were measured, what waits was made by other ones of the whole chain."""
    return cost.renumbered(lambda num_later: places.after(layer, num_later) - layer)


def _shared_weights(model: nn.Module, users: Mapping[nn.Parameter, Sequence[int]]) -> tuple[SharedWeight, ...]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return tuple(
        SharedWeight(
            name=names[x],
            layers=tuple(layers),
            num_parameters=x.numel(),
            weight_bytes=x.nbytes,
            gradient_bytes=x.nbytes if x.requires_grad else 0,
        )
        for x, layers in users.items()
        if len(layers) > 1
    )


def _users(states: Iterable[Mapping[str, Tensor]]) -> dict[nn.Parameter, list[int]]:
    """The layers that use each parameter."""
    users: dict[nn.Parameter, list[int]] = {}
    for layer, state in enumerate(states):
        for parameter in _parameters(state):
            users.setdefault(parameter, []).append(layer)
    return users


def _parameters(state: Mapping[str, Tensor]) -> list[nn.Parameter]:
    """Each parameter once, under whatever names a layer has it."""
    return list(dict.fromkeys(x for x in state.values() if isinstance(x, nn.Parameter)))
