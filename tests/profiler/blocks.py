"""Models of blocks that are alike, or only seem to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.example_files import load
from tests.profiler.models import Residual

ROWS = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
IMAGES = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(2))
TOKENS = torch.randint(0, 100, (2, 16), generator=torch.Generator().manual_seed(3))


class Block(nn.Module):
    """Adds to its input."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.linear(x)))


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.linear(x))


class Stack(nn.Module):
    """A first layer, so that all blocks are called on what needs a gradient, then blocks one after another."""

    def __init__(self, *blocks: nn.Module, first: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.blocks = first or nn.Linear(8, 8), nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


class Calling(Stack):
    """A stack whose blocks are called by a function: (block, index, value so far, first value)."""

    def __init__(self, call: Callable[[nn.Module, int, Any, Tensor], Any], *blocks: nn.Module) -> None:
        super().__init__(*blocks)
        self.call = call

    def forward(self, x: Tensor) -> Any:
        value = first = self.first(x)
        for index, block in enumerate(self.blocks):
            value = self.call(block, index, value, first)
        return value


class Masked(nn.Module):
    """Takes a mask and a pair of tensors by name, as attention takes rotary tables."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, *, mask: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        return torch.where(mask, self.linear(x) * rotary[0] + rotary[1], x)


class Joining(nn.Module):
    """Takes a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 8)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.linear(torch.cat([x, skip], -1))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.down, self.up = (nn.ModuleList(kind() for _ in range(4)) for kind in (Block, Joining))

    def forward(self, x: Tensor) -> Tensor:
        skips = [x := self.first(x)]
        for block in self.down:
            skips.append(x := block(x))
        for block in self.up:
            x = block(x, skips.pop(0))
        return x


class Sharing(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.own, self.shared = nn.Linear(8, 8), shared

    def forward(self, x: Tensor) -> Tensor:
        return self.own(torch.tanh(self.shared(x)))


class Structured(nn.Module):
    """Returns tensors, its own argument, a number and None in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, given: dict[str, Any]) -> dict[str, Any]:
        x = self.linear(given["x"])
        return {"x": x, "same": given["same"], "scale": 3, "nothing": None, "pair": (x.sum(), x)}


class Counting(nn.Module):
    """Buffers written in place, one of them without gradient, and a constant."""

    running: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("running", torch.zeros(8))
        self.register_buffer("count", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.running.mul_(0.9).add_(x.mean(0), alpha=0.1)
        self.count += 1
        return self.linear(x) * torch.tensor(2.0) + self.running


class Table(nn.Module):
    """Tensors that are neither parameters nor buffers, one of them in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self._table, self.more = nn.Linear(8, 8), torch.randn(8), [torch.randn(8)]

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self._table * self.more[0]


class TableAndConstant(Table):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.tensor(2.0)


class Returning(nn.Module):
    """Returns the very dict that it is given, as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, given: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        return given, self.linear(given["x"])


class Updating(Stack):
    """Writes into what its blocks return, and reads what it gave them."""

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for block in self.blocks:
            given = {"x": x}
            returned, y = block(given)
            returned["x"] = y
            x = given["x"]
        return x


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, scale: int) -> Tensor:
        return self.linear(x) * scale


class WritesIntoInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(F.relu_(x))


class ReturnsView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), x.view(-1)


class Shelf:
    """Something of the author's own that blocks can share."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []

    def append(self, value: Tensor) -> None:
        self.values.append(value)


class LeavesBehind(nn.Module):
    """Keeps a value that the model reads after all blocks."""

    def __init__(self, kept: list[Tensor] | Shelf) -> None:
        super().__init__()
        self.linear, self.kept = nn.Linear(8, 8), kept

    def forward(self, x: Tensor) -> Tensor:
        self.kept.append(x.square().mean())
        return self.linear(x)


class Caching(nn.Module):
    """Appends to a list that all blocks are given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:
        cache.append(x)
        return self.linear(x) + len(cache)


class Decayed(Stack):
    """Looks at all parameters of the model in its forward."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), sum(p.square().sum() for p in self.parameters())


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.inner:
            x = block(x)
        return x


class Cached(nn.Module):
    """A model that reads a list its blocks append to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Caching() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        cache: list[Tensor] = []
        x = self.linear(x)
        for block in self.blocks:
            x = block(x, cache)
        return x + torch.stack(cache).sum(0)


def many(kind: Callable[[], nn.Module], count: int = 5) -> list[nn.Module]:
    return [kind() for _ in range(count)]


def masked() -> nn.Module:
    return Calling(lambda b, _, x, first: b(x, mask=first > 0, rotary=(first.cos(), first.sin())), *many(Masked))


def structured() -> nn.Module:
    def call(block: nn.Module, index: int, value: Any, first: Tensor) -> Any:
        given = (
            {"x": value["pair"][1] * value["scale"], "same": value["same"]} if index else {"x": value, "same": first}
        )
        return block(given)

    return Calling(call, *many(Structured))


def tied_across() -> nn.Module:
    blocks = many(Block)
    blocks[3].linear.weight = blocks[0].linear.weight  # type: ignore[union-attr, assignment]
    blocks[4].linear.bias = blocks[2].linear.bias  # type: ignore[union-attr, assignment]
    return Stack(*blocks)


def partly_frozen() -> nn.Module:
    blocks = many(Block, 6)
    for block in blocks[:3]:
        block.requires_grad_(False)
    return Stack(*blocks)


def sharing() -> nn.Module:
    shared = nn.Linear(8, 8)
    return Stack(*many(lambda: Sharing(shared)))


def language_model(*, tied: bool) -> nn.Module:
    settings = {"num_blocks": 12, "width": 32, "dropout": 0.1, "sequence_length": 16, "tie_embedding": tied}
    model: nn.Module = load("transformer_lm").model(**settings)
    return model


def conv_net() -> nn.Module:
    return Stack(*many(lambda: Residual(4)), first=nn.Conv2d(4, 4, 1))


def alternating() -> nn.Module:
    return Stack(*(kind() for _ in range(4) for kind in (Block, Gate)))


BLOCKS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "a transformer": (lambda: language_model(tied=False), TOKENS),
    "a transformer with a tied embedding": (lambda: language_model(tied=True), TOKENS),
    "batch norm and in-place activations": (conv_net, IMAGES),
    "skips between blocks": (UNet, ROWS),
    "two kinds in turn": (alternating, ROWS),
    "shared arguments": (masked, ROWS),
    "a shared submodule": (sharing, ROWS),
    "dicts, numbers and None": (structured, ROWS),
    "buffers and constants": (lambda: Stack(*many(Counting)), ROWS),
    "tensors as attributes": (lambda: Stack(*many(Table)), ROWS),
    "weights tied across blocks": (tied_across, ROWS),
    "frozen blocks": (partly_frozen, ROWS),
    "blocks of blocks": (lambda: Stack(*many(Nested)), ROWS),
    "dropout": (lambda: Stack(*many(lambda: Block(0.5))), ROWS),
    "two numbers in turn": (lambda: Calling(lambda b, i, x, _: b(x, i % 2), *many(Scaled)), ROWS),
    "numbers that differ": (lambda: Calling(lambda b, i, x, _: b(x, i), *many(Scaled)), ROWS),
    "writing into the input": (lambda: Stack(*many(WritesIntoInput)), ROWS),
    "views of the input": (
        lambda: Calling(
            lambda b, i, x, _: b(
                x if not i else x[0] + x[1].sum(),
            ),
            *many(ReturnsView),
        ),
        ROWS,
    ),
    "a cache": (Cached, ROWS),
    "a dict handed back": (lambda: Updating(*many(Returning)), ROWS),
    "attributes and constants that may be one": (lambda: Stack(*many(TableAndConstant)), ROWS),
    "a look at all parameters": (lambda: Decayed(*many(Block)), ROWS),
    "blocks called twice": (lambda: Calling(lambda b, _, x, __: b(b(x)), *many(Block)), ROWS),
    "a look at a block's weight": (
        lambda: Calling(lambda b, _, x, __: b(x.to(b.linear.weight.dtype)), *many(Block)),  # type: ignore[union-attr, arg-type]
        ROWS,
    ),
}
