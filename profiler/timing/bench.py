"""The layers under measurement: some layers of a model that form a chain, with data to run them on.

A bench holds the layers of a captured model that must be measured (see profiler/capture/measured_layers.py), all in memory; or,
for a model larger than memory, a single layer, several times in a row where its output can be its input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from profiler.capture.chain import Chain, Tensors, call_arguments, flat_tensors
from profiler.capture.measured_layers import sources
from profiler.model.load import ModelFile

_WHOLE_AT_MOST = 4  # the whole model is run only where it has at most so many times the layers that are measured


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Layers in a row. Those with the same key are alike, and their samples are pooled."""

    name: str
    names: tuple[str, ...]
    keys: tuple[str, ...]
    layers: tuple[nn.Module, ...]
    stage: nn.Module  # all of them as one module
    inputs: Tensors
    loss: Callable[[Tensors], Tensor]
    whole: Callable[[], Tensor] | None = None  # the loss of the author's own model, where it is run

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """The parameters of the layers, each once."""
        return tuple(dict.fromkeys(x for layer in self.layers for x in layer.parameters()))


class Composed(nn.Module):
    """Stages one after the other, as one module."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self._parts = tuple(parts)
        for index, part in enumerate(dict.fromkeys(parts)):
            self.add_module(str(index), part)

    def forward(self, *tensors: Tensor) -> Tensors:
        for part in self._parts:
            tensors = part(*tensors)
        return tensors


def chosen_layers(chain: Chain) -> tuple[tuple[int, ...], dict[int, str]]:
    """For every layer the one to be measured for it; and those ones, each with the first of its structure as text."""
    structures = [chain.structure(layer) for layer in range(len(chain))]
    found = sources(structures)
    first: dict[object, int] = {}
    return found, {x: str(first.setdefault(structures[x], x)) for x in sorted(set(found))}


def bench_of_chain(file: ModelFile, chain: Chain, keys: dict[int, str], inputs: Any, target: Any) -> Bench:
    """The kept layers of a model in memory, which are the keys of `keys`."""
    kept = tuple(keys)
    layers = {layer: chain.stage(layer, layer + 1) for layer in kept}

    def loss(outputs: Tensors) -> Tensor:
        return _loss(file, chain.model_output(outputs), target)

    def whole() -> Tensor:
        args, kwargs = call_arguments(inputs)
        return _loss(file, file.model(*args, **kwargs), target)

    return Bench(
        name="all",
        names=tuple(chain.names[layer] for layer in kept),
        keys=tuple(keys.values()),
        layers=tuple(layers.values()),
        stage=Composed([chain.stage(first, end) for first, end in _segments(kept)]),
        inputs=flat_tensors(inputs, what="the inputs"),
        loss=loss,
        whole=whole if len(chain) <= _WHOLE_AT_MOST * len(kept) else None,
    )


def bench_of_layer(name: str, key: str, layer: nn.Module, inputs: Tensors, *, times: int) -> Bench:
    """One layer, `times` in a row, with the sum of what it gives for a loss."""
    return Bench(
        name=key,
        names=(name,) * times,
        keys=(key,) * times,
        layers=(layer,) * times,
        stage=Composed([layer] * times),
        inputs=inputs,
        loss=sum_of,
    )


def bench_of_loss(file: ModelFile, chain: Chain, outputs: Tensors, target: Any) -> Bench:
    """No layer, only the loss of the model's outputs."""
    return Bench(
        name="loss",
        names=(),
        keys=(),
        layers=(),
        stage=Composed([]),
        inputs=outputs,
        loss=lambda tensors: _loss(file, chain.model_output(tensors), target),
    )


def sum_of(output: Any) -> Tensor:
    """A loss where there is none: all that can be trained, added up."""
    tensors = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
    return torch.stack([x.sum() for x in tensors]).sum() if tensors else torch.zeros(())


def _loss(file: ModelFile, output: Any, target: Any) -> Tensor:
    return file.loss(output, target) if file.gives_loss else sum_of(output)


def _segments(kept: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of consecutive layers as (first, end).

    >>> _segments([0, 1, 2, 7, 8])
    [(0, 3), (7, 9)]
    """
    starts = [kept[0], *(b for a, b in pairwise(kept) if b != a + 1)]
    ends = [*(a + 1 for a, b in pairwise(kept) if b != a + 1), kept[-1] + 1]
    return list(zip(starts, ends, strict=True))
