"""The layers of a chain with what they weigh: each parameter once, those that several layers use apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from gplan.nouns import Layer, LayerCost, SharedWeight
from profiler.capture.chain import Chain
from profiler.memory.bytes import storage_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer's own weights; shared ones are left out."""

    num_parameters: int
    weight_bytes: int  # parameters and buffers
    gradient_bytes: int  # of the parameters that are trained


def layer_weights(chain: Chain) -> tuple[tuple[LayerWeights, ...], tuple[SharedWeight, ...]]:
    """The weights of every layer, and the parameters that several layers use."""
    states = [chain.state(layer) for layer in range(len(chain))]
    users: dict[nn.Parameter, list[int]] = {}
    names = {parameter: name for name, parameter in chain.model.named_parameters()}
    for layer, state in enumerate(states):
        for parameter in dict.fromkeys(x for x in state.values() if isinstance(x, nn.Parameter)):
            users.setdefault(parameter, []).append(layer)
    shared = [
        SharedWeight(
            name=names[x],
            layers=tuple(found),
            num_parameters=x.numel(),
            weight_bytes=x.nbytes,
            gradient_bytes=x.nbytes if x.requires_grad else 0,
        )
        for x, found in users.items()
        if len(found) > 1
    ]
    return tuple(_own(state, users) for state in states), tuple(shared)


def weighed_layers(
    chain: Chain, sources: Sequence[int], costs: Sequence[Sequence[LayerCost]]
) -> tuple[tuple[Layer, ...], tuple[SharedWeight, ...]]:
    """The layers of a chain with their weights and their costs, and the weights that they share.

    `sources` says for each layer which one was measured for it; `costs` are those of all layers, size after size.
    """
    weights, shared = layer_weights(chain)
    layers = tuple(
        Layer(
            name=chain.names[index],
            kind=chain.kinds[index],
            num_parameters=own.num_parameters,
            weight_bytes=own.weight_bytes,
            gradient_bytes=own.gradient_bytes,
            costs=tuple(of_size[index] for of_size in costs),
            same_as=None if sources[index] == index else sources[index],
        )
        for index, own in enumerate(weights)
    )
    return layers, shared


def _own(state: dict[str, Tensor], users: dict[nn.Parameter, list[int]]) -> LayerWeights:
    parameters = [x for x in state.values() if isinstance(x, nn.Parameter)]
    own = list(dict.fromkeys(x for x in parameters if len(users[x]) == 1))
    buffers = [x for x in state.values() if not isinstance(x, nn.Parameter)]
    return LayerWeights(
        num_parameters=sum(x.numel() for x in own),
        weight_bytes=sum(x.nbytes for x in own) + storage_bytes(buffers),
        gradient_bytes=sum(x.nbytes for x in own if x.requires_grad),
    )
