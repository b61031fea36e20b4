"""Small models with routed layers, each with experts of another kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, NUM_EXPERTS, NUM_TOKENS = 8, 4, 16


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down(F.silu(self.up(x)))
        return made


class Router(nn.Module):
    """The two best experts of every token and their weights."""

    aux_loss: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.gate(x).softmax(-1)
        self.aux_loss = NUM_EXPERTS * (scores.mean(0) ** 2).sum()
        weights, experts = scores.topk(2, dim=-1)
        return weights, experts


class Looped(Router):
    """A loop over the experts that got tokens; its control flow depends on the routing."""

    def __init__(self, *, shares: bool = False) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(NUM_EXPERTS))
        self.shared = Expert() if shares else None

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        weights, experts = self.choose(flat)
        made = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(experts == number)
            if token.numel() > 0:
                made = made.index_add(0, token, expert(flat[token]) * weights[token, place, None])
        return (made if self.shared is None else made + self.shared(flat)).view_as(x)


class Balanced(Looped):
    """A bias, which the forward moves towards equal loads, is added to the scores that choose."""

    bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.zeros(NUM_EXPERTS))

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.gate(x).sigmoid()
        experts = (scores + self.bias).topk(2, dim=-1).indices
        if self.training:
            load = F.one_hot(experts, NUM_EXPERTS).sum((0, 1)).float()
            self.bias.add_(0.1 * torch.sign(load.mean() - load))
        return scores.gather(-1, experts), experts


class Stacked(Router):
    """The weights of all experts are one tensor."""

    def __init__(self, *, is_grouped: bool) -> None:
        super().__init__()
        self.up = nn.Parameter(0.3 * torch.randn(NUM_EXPERTS, WIDTH, 2 * WIDTH))
        self.down = nn.Parameter(0.3 * torch.randn(NUM_EXPERTS, 2 * WIDTH, WIDTH))
        self.is_grouped = is_grouped

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        weights, experts = self.choose(flat)
        if self.is_grouped:
            return self.grouped(flat, weights.flatten(), experts.flatten()).view_as(x)
        of_all = torch.einsum("teh,ehw->tew", F.silu(torch.einsum("tw,ewh->teh", flat, self.up)), self.down)
        return (of_all.gather(1, experts[..., None].expand(-1, -1, WIDTH)) * weights[..., None]).sum(1).view_as(x)

    def grouped(self, flat: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        order = experts.argsort()
        ends = F.one_hot(experts, NUM_EXPERTS).sum(0).cumsum(0).to(torch.int32)
        hidden = F.silu(F.grouped_mm(flat[order // 2], self.up, offs=ends))
        made = F.grouped_mm(hidden, self.down, offs=ends) * weights[order, None]
        return torch.zeros_like(flat).index_add(0, order // 2, made)


class Block(nn.Module):
    def __init__(self, routed: nn.Module) -> None:
        super().__init__()
        self.norm, self.mix, self.routed = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), routed

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.mix(x))
        made: Tensor = x + self.routed(self.norm(x))
        return made


class Routed(nn.Module):
    """An embedding, blocks with routed layers, a head, and optionally the sum of their auxiliary losses."""

    def __init__(self, make: Callable[[], nn.Module], *, num_blocks: int = 3, has_aux_loss: bool = False) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(NUM_TOKENS, WIDTH), nn.Linear(WIDTH, NUM_TOKENS)
        self.blocks = nn.ModuleList(Block(make()) for _ in range(num_blocks))
        self.has_aux_loss = has_aux_loss

    def forward(self, tokens: Tensor) -> Any:
        x = 3.0 * self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        aux_loss = sum(block.routed.aux_loss for block in self.blocks) if self.has_aux_loss else 0.0
        return (self.head(x), aux_loss) if self.has_aux_loss else self.head(x)


MODELS: dict[str, Callable[[], Routed]] = {
    "dense": lambda: Routed(lambda: Stacked(is_grouped=False)),
    "grouped": lambda: Routed(lambda: Stacked(is_grouped=True)),
    "looped": lambda: Routed(Looped),
    "shared": lambda: Routed(lambda: Looped(shares=True)),
    "balanced": lambda: Routed(Balanced),
    "grouped, auxiliary loss": lambda: Routed(lambda: Stacked(is_grouped=True), has_aux_loss=True),
    "looped, auxiliary loss": lambda: Routed(Looped, has_aux_loss=True),
}
CALLED = {"looped": Looped, "shared": Looped, "balanced": Balanced, "looped, auxiliary loss": Looped}


def tokens(num_samples: int, *, seed: int = 0) -> Tensor:
    return torch.randint(0, NUM_TOKENS, (num_samples, 6), generator=torch.Generator().manual_seed(seed))


def loss(output: Any, target: Tensor) -> Tensor:
    """The mean over all tokens, and the auxiliary loss."""
    logits, aux_loss = output if isinstance(output, Sequence) else (output, 0.0)
    made: Tensor = F.cross_entropy(logits.flatten(0, 1), target.flatten()) + 0.1 * aux_loss
    return made
