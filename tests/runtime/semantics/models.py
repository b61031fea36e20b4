"""Small models with inputs, targets and loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 6
NUM_CLASSES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model to train: its builder, inputs, targets and loss."""

    build: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator, int], Any]  # of a number of samples
    targets: Callable[[torch.Generator, int], Any]
    loss: Callable[[Any, Any], Tensor]
    loss_reduction: str | None = None  # as a model file states it

    def batch(self, num_samples: int, *, seed: int = 0) -> tuple[Any, Any]:
        """Inputs and targets, the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        return self.inputs(generator, num_samples), self.targets(generator, num_samples)


def rows(generator: torch.Generator, num_samples: int) -> Tensor:
    """Samples of WIDTH numbers."""
    return torch.randn(num_samples, WIDTH, generator=generator)


def tokens(generator: torch.Generator, num_samples: int) -> Tensor:
    """Samples of three classes."""
    return torch.randint(0, NUM_CLASSES, (num_samples, 3), generator=generator)


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    """The mean of squared errors."""
    return F.mse_loss(output, target)


def sum_loss(output: Tensor, target: Tensor) -> Tensor:
    """The sum of squared errors over the samples."""
    return F.mse_loss(output, target, reduction="sum")


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy, the mean over all tokens."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


class Floor(nn.Module):
    """One layer of the models below."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.mix, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.drop(torch.tanh(self.mix(x)))
        return output


class Tower(nn.Module):
    """Five layers in a row; traced, as it is not an nn.Sequential."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.floors = nn.ModuleList(Floor(dropout=dropout) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for floor in self.floors:
            x = floor(x)
        return x


class Skipping(nn.Module):
    """Five layers with skips over one, two and three of them."""

    def __init__(self) -> None:
        super().__init__()
        self.floors = nn.ModuleList(Floor() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        first = self.floors[0](x)
        second = self.floors[1](first)
        third = self.floors[2](second) + x
        fourth = self.floors[3](third) * first
        output: Tensor = self.floors[4](fourth) + torch.sin(second) + first
        return output


class Tied(nn.Module):
    """The embedding is the head's weight, and the first and third layer share their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_CLASSES, WIDTH)
        self.first, self.second, self.third = Floor(), Floor(), Floor()
        self.head = nn.Linear(WIDTH, NUM_CLASSES)
        self.head.weight = self.embedding.weight
        self.third.mix = self.first.mix

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.third(self.second(self.first(self.embedding(x)))))
        return output


class TiedThrice(Tied):
    """The embedding is used in the middle too."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.embedding(x))
        x = self.second(F.linear(F.linear(x, self.embedding.weight), self.embedding.weight.t()))
        output: Tensor = self.head(self.third(x))
        return output


class Buffered(nn.Module):
    """Saved buffers, one under two names, a buffer that is not saved, and an unused parameter."""

    scale: Tensor
    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.floors = nn.ModuleList(Floor() for _ in range(4))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("shift", torch.arange(WIDTH, dtype=torch.float32), persistent=False)
        self.floors[2].register_buffer("scale", self.scale)
        self.spare = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.floors[1](self.floors[0](x) * self.scale)
        x = self.floors[2](x) * self.scale
        output: Tensor = self.floors[3](x + self.shift)
        return output


def row() -> nn.Sequential:
    """Five layers as an nn.Sequential, which is cut without tracing."""
    return nn.Sequential(*(Floor() for _ in range(5)))


def dropping_row() -> nn.Sequential:
    """The same with dropout in every layer."""
    return nn.Sequential(*(Floor(dropout=0.5) for _ in range(5)))


def dropping_tower() -> Tower:
    """A traced model with dropout in every layer."""
    return Tower(dropout=0.5)


def normed_row() -> nn.Sequential:
    """Dropout, batch norm, and a layer without parameters."""
    return nn.Sequential(Floor(dropout=0.5), nn.BatchNorm1d(WIDTH), nn.Tanh(), Floor(dropout=0.5), Floor())


def subject(build: Callable[[], nn.Module], *, loss: Callable[[Any, Any], Tensor] = mean_loss) -> Subject:
    """A model of rows to rows."""
    return Subject(build=build, inputs=rows, targets=rows, loss=loss)


def token_subject(build: Callable[[], nn.Module]) -> Subject:
    """A model of tokens to tokens."""
    return Subject(build=build, inputs=tokens, targets=tokens, loss=token_loss)
