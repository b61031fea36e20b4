"""What a layer's backward finds of later ones: what they made for earlier layers, and what they let go of."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from profiler.capture.chain import Tensors
from profiler.memory.layer_memory import LayerBytes, allocate_gradients, measure_bytes

ROWS, WIDTH = 64, 32
NUM_BYTES = ROWS * WIDTH * 4  # of every tensor between layers


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensors:
        return (self.layer(x),)


class Middle(First):
    """Hands on what it reads."""

    def forward(self, x: Tensor) -> Tensors:
        return x, self.layer(x)


class Multiplied(nn.Module):
    """Keeps both for its backward, and makes a gradient of each."""

    def forward(self, x: Tensor, y: Tensor) -> Tensors:
        return (x * y,)


class Joined(nn.Module):
    """Keeps neither, and its gradients are parts of the one that it is given."""

    def forward(self, x: Tensor, y: Tensor) -> Tensors:
        return (torch.cat([x, y]),)


def measured(last: nn.Module) -> tuple[LayerBytes, ...]:
    layers = nn.ModuleList([First(), Middle(), last])
    allocate_gradients(layers)
    return measure_bytes(list(layers), (torch.randn(ROWS, WIDTH),), lambda tensors: tensors[0].pow(2).mean())


def left(layer: LayerBytes, num_later: int) -> int:
    return sum(x.num_bytes for x in layer.leftovers if x.num_later == num_later)


def test_what_a_later_layer_made_for_an_earlier_one_waits_while_those_in_between_run() -> None:
    _, middle, _, loss = measured(Multiplied())
    assert left(middle, 1) == pytest.approx(NUM_BYTES, abs=64)  # two gradients, without y, which is gone; x is not yet
    assert loss.leftovers == ()


def test_a_gradient_that_is_part_of_a_later_ones_waits_whole_and_is_that_layers() -> None:
    _, middle, _, _ = measured(Joined())
    assert left(middle, 1) == pytest.approx(0, abs=64)
    assert left(middle, 2) == pytest.approx(2 * NUM_BYTES, abs=64)


def test_a_layer_whose_readers_come_later_works_alone_in_what_is_its_own() -> None:
    """Without what the others did before, the first layer's backward needs a gradient of its weight."""
    first, *_ = measured(Multiplied())
    assert first.backward_workspace_bytes - left(first, 1) - left(first, 2) <= NUM_BYTES + WIDTH * WIDTH * 4
