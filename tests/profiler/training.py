"""Training a chain cut into stages, as several processes would do it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gplan_profiler.capture.chain import (
    Chain,
    Tensors,
    TensorSpec,
    detached,
    model_state_restored,
    roots_with_gradients,
)


def total(output: Any) -> Tensor:
    """A loss in which every element has another weight."""
    leaves = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
    return sum((x * torch.linspace(0.5, 1.5, x.numel()).view_as(x)).sum() for x in leaves)  # type: ignore[return-value]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
    model.zero_grad()
    return found


def boundaries(chain: Chain, inputs: Tensors) -> tuple[tuple[TensorSpec, ...], ...]:
    """The specs of all L+1 boundaries, found by running the layers once."""
    tensors, specs = inputs, [TensorSpec.of_all(inputs)]
    with model_state_restored(chain.model):
        for layer in range(len(chain)):
            tensors = chain.stage(layer, layer + 1)(*detached(tensors))
            specs.append(TensorSpec.of_all(tensors))
    return tuple(specs)


def train_in_stages(chain: Chain, cuts: Sequence[int], inputs: Tensors) -> None:
    """Forward and backward through the stages between some cuts."""
    tensors, passed = inputs, []
    for first, end in pairwise([0, *cuts, len(chain)]):
        leaves = detached(tensors)
        tensors = chain.stage(first, end)(*leaves)
        passed.append((leaves, tensors))
    total(chain.model_output(tensors)).backward()  # type: ignore[no-untyped-call]
    for (_, outputs), (leaves, _) in reversed(list(pairwise(passed))):
        torch.autograd.backward(*roots_with_gradients(outputs, leaves))


def assert_trained_alike(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """To a ten-thousandth of a gradient's largest entry."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert float((found[name] - gradient).abs().max()) <= 1e-4 * float(gradient.abs().max()) + 1e-6, name
