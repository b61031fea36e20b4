"""Small models, each with a trap for whoever takes a model apart."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Residual(nn.Module):
    """Batch norm, an in-place activation and a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.conv(x))
        out += x
        return self.relu(out)


class ConvNet(nn.Module):
    """One relu module used twice, blocks in a Sequential, operations of its own between them, a dict for output."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.relu = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True)
        self.blocks = nn.Sequential(Residual(8), Residual(8))
        self.middle, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.relu(self.stem(x))
        x = self.blocks(x).mean((2, 3))
        x = self.relu(self.middle(x))
        return {"logits": self.head(x), "features": x}


class Tied(nn.Module):
    """A head that is the embedding, integer inputs, and a mask that every block reads."""

    def __init__(self, vocabulary: int = 11, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        mask = (tokens > 2).unsqueeze(-1)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = torch.where(mask, torch.tanh(layer(x)), x)
        return self.head(x)


class WritesIntoView(nn.Module):
    """Writes through a view into a tensor that later layers read: no cut may fall between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * 1.0
        column = x[:, 0]
        y = self.second(x * 2.0)
        column.add_(1.0)
        return self.third(x + y)


class LongSkip(nn.Module):
    """The first layer's output is read by the last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = x = F.relu(self.layers[0](x))
        for layer in self.layers[1:]:
            x = F.relu(layer(x))
        return x + first


class Branching(nn.Module):
    """Decides by the values of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return self.layer(x)
        return x - self.layer(x)


class Throwing(Branching):
    """Decides by a random number: cannot be traced."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.rand_like(x) - 0.5)


class SmallUNet(nn.Module):
    """Two levels of skips; what a level makes is both pooled and kept."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(i, j, 3, padding=1) for i, j in ((3, 4), (4, 8)))
        self.bottom = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ModuleList(nn.Conv2d(i, j, 3, padding=1) for i, j in ((16, 4), (8, 3)))

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for level in self.down:
            skips.append(F.relu(level(x)))
            x = F.max_pool2d(skips[-1], 2)
        x = F.relu(self.bottom(x))
        for level in self.up:
            x = level(torch.cat([skips.pop(), F.interpolate(x, scale_factor=2)], dim=1))
        return x


class TwoTowers(nn.Module):
    """Two branches of linear layers from one input to one sum."""

    def __init__(self, width: int = 4, depth: int = 3) -> None:
        super().__init__()
        self.left = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.right = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        left = right = x
        for layer in self.left:
            left = torch.tanh(layer(left))
        for layer in self.right:
            right = torch.relu(layer(right))
        return self.head(left * right)


class Counting(nn.Module):
    """One branch writes into a part of a buffer, and the other reads all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(4, 4) for _ in range(3))
        self.register_buffer("calls", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(x)
        self.calls[0].add_(1.0)
        b = self.second(x) * self.calls
        return self.last(a) + b


class Around(nn.Module):
    """A model with a module under test inside, and layers around it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 4), inner, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x)))
