"""Layers that are too large for a good cut are divided (granularity "auto"), and train as before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gplan.interop.author_layers import author_layers
from gplan_profiler.capture.capture import capture
from gplan_profiler.capture.division import MOST_LAYERS
from gplan_profiler.capture.sequence import SequentialChain
from tests.profiler.training import assert_trained_alike, gradients, total, train_in_stages

WIDTH = 64


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stage(nn.Module):
    """Blocks in a list inside an entry of a list, as in Swin and ConvNeXt."""

    def __init__(self, depth: int, kind: type[nn.ModuleList] | type[nn.Sequential]) -> None:
        super().__init__()
        blocks = [Block() for _ in range(depth)]
        self.blocks = nn.ModuleList(blocks) if kind is nn.ModuleList else nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Hierarchy(nn.Module):
    def __init__(self, kind: type[nn.ModuleList] | type[nn.Sequential]) -> None:
        super().__init__()
        self.stages = nn.ModuleList([Stage(2, kind), Stage(30, kind), Stage(2, kind)])
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return self.head(x)


class Around(nn.Module):
    """A U-Net built by nesting."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.down, self.inner, self.up = Block(), inner, Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.inner(self.down(x))) + x


def nested(depth: int) -> nn.Module:
    net: nn.Module = Block()
    for _ in range(depth):
        net = Around(net)
    return net


class Looped(nn.Module):
    """Blocks that are called several times, as in ALBERT."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Block() for _ in range(num_blocks))
        self.loops = 30 // num_blocks

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(self.loops):
            for block in self.blocks:
                x = block(x)
        return x


class Attention(nn.Module):
    """Three small products and a large one."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.query(x) * self.key(x) + self.value(x))


class OnlyWeights(nn.Module):
    """All work is in the model's own forward, which has no submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / 8) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight) + x
        return x


MODELS: dict[str, Callable[[], nn.Module]] = {
    "lists in lists": lambda: Hierarchy(nn.ModuleList),
    "sequences in lists": lambda: Hierarchy(nn.Sequential),
    "a sequence of stages": lambda: nn.Sequential(
        nn.Linear(WIDTH, WIDTH), Stage(30, nn.Sequential), nn.Linear(WIDTH, 4)
    ),
    "a sequence in a sequence": lambda: nn.Sequential(
        nn.Sequential(*(Block() for _ in range(30))), nn.Linear(WIDTH, 4)
    ),
    "nested": lambda: nested(8),
    "more parts than layers": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Stage(50, nn.ModuleList)),
    "small neighbours": lambda: nn.Sequential(*(Attention() for _ in range(24))),
    "one block called again and again": lambda: Looped(1),
    "two blocks called in turn": lambda: Looped(2),
    "no submodules": OnlyWeights,
}


@pytest.mark.parametrize("name", MODELS)
def test_large_layers_are_divided_and_train_as_before(name: str) -> None:
    """A run at another size has the layers of the profile."""
    torch.manual_seed(0)
    model, rows = MODELS[name](), torch.randn(512, WIDTH)
    total(model(rows)).backward()
    expected = gradients(model)
    chain = capture(model, rows, granularity="auto")
    largest = max(sum(x.numel() for x in chain.state(layer).values()) for layer in range(len(chain)))
    assert largest <= 2 * 4 * WIDTH * WIDTH + 7 * WIDTH  # a block has no more
    assert 6 <= len(chain) <= MOST_LAYERS
    again = capture(model, torch.randn(2, WIDTH), granularity="auto", divided=chain.divided)
    assert again.names == chain.names and again.digest() == chain.digest()
    train_in_stages(chain, range(1, len(chain)), (rows,))
    assert_trained_alike(gradients(model), expected)


def test_parts_are_joined_until_there_are_as_many_layers_as_allowed() -> None:
    chain = capture(MODELS["more parts than layers"](), torch.randn(512, WIDTH), granularity="auto")
    assert len(chain) == MOST_LAYERS
    assert {"1.blocks.0", "1.blocks.49.up", "1.blocks.49.down"} <= {
        *chain.names
    }  # some blocks are whole, others divided


def test_small_neighbours_in_a_divided_layer_are_joined() -> None:
    chain = capture(MODELS["small neighbours"](), torch.randn(1024, WIDTH), granularity="auto")
    assert chain.names[:4] == ("0.query..0.value", "0.out.0", "0.out.1", "1.query..1.value")
    assert author_layers(chain.names, chain.divided)[:2] == (("0", range(3)), ("1", range(3, 6)))


def test_layers_of_the_right_size_stay_whole_beside_a_large_one() -> None:
    model = nn.Sequential(*(Block() for _ in range(40)), Stage(8, nn.ModuleList))
    chain = capture(model, torch.randn(512, WIDTH), granularity="auto")
    assert chain.names[:40] == tuple(map(str, range(40))) and len(chain) > 48


def test_a_repeated_block_is_cut_as_blocks_called_in_turn_are() -> None:
    rows = torch.randn(512, WIDTH)
    assert len(capture(Looped(1), rows)) == len(capture(Looped(2), rows)) == 31
    assert capture(Looped(1), rows).names[:3] == ("stem", "blocks.0", "blocks.0#2")


def test_layers_of_the_right_size_stay_whole() -> None:
    model = nn.Sequential(*(Block() for _ in range(40)))
    chain = capture(model, torch.randn(512, WIDTH), granularity="auto")
    assert isinstance(chain, SequentialChain) and len(chain) == 40 and not chain.divided


def test_work_too_short_to_be_measured_in_parts_stays_whole() -> None:
    assert capture(Hierarchy(nn.ModuleList), torch.randn(1, WIDTH), granularity="auto").names[0] == "stages.0"


def test_a_sequence_that_cannot_be_traced_is_cut_between_its_children() -> None:
    class Choosing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = Stage(4, nn.ModuleList), Stage(4, nn.ModuleList)

        def forward(self, x: Tensor) -> Tensor:
            return self.one(x) if float(x.detach().sum()) > 0 else self.other(x)

    chain = capture(nn.Sequential(Choosing(), Choosing()), torch.randn(512, WIDTH), granularity="auto")
    assert len(chain) >= 2
