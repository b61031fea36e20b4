"""Small models in the manner of code that people write by hand, for benchmarks/architecture_models.py.

Each has a habit of such code that the library's models do not
have: a head that is a cast of the embedding, skips in a list, weights with a parametrization, complex weights and
activations, embedding bags, sparse gradients, one encoder for two inputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, VOCABULARY, LENGTH = 32, 96, 16


class CastHead(nn.Module):
    """modded-nanogpt: rotary positions from a buffer, value embeddings, a head that is a cast of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.values = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)])
            for _ in range(4)
        )
        self.scale = nn.Parameter(torch.ones(4))
        angles = torch.outer(torch.arange(LENGTH), 1e4 ** -torch.linspace(0, 1, WIDTH // 2))
        self.register_buffer("angles", angles, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = x0 = F.rms_norm(self.embed(tokens), (WIDTH,))
        cos, sin, v0 = self.angles.cos(), self.angles.sin(), self.values(tokens)
        for i, (qkv, up, down) in enumerate(self.layers):
            q, k, v = qkv(F.rms_norm(self.scale[i] * x + x0, (WIDTH,))).chunk(3, -1)
            q, k = (torch.cat([a * cos - b * sin, a * sin + b * cos], -1) for a, b in (q.chunk(2, -1), k.chunk(2, -1)))
            x = x + F.scaled_dot_product_attention(q, k, v + v0, is_causal=True)
            x = x + down(F.relu(up(F.rms_norm(x, (WIDTH,)))).square())
        return 15 * torch.tanh(F.linear(x, self.embed.weight.type_as(x)) / 15)


class DiffusionUnet(nn.Module):
    """DDPM: time embeddings given to every block, skips in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU())
        self.inp, self.out = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 3, 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(16, 16, 3, 2, 1) for _ in range(2))
        self.up = nn.ModuleList(nn.ConvTranspose2d(32, 16, 2, 2) for _ in range(2))
        self.shift = nn.ModuleList(nn.Linear(32, 16) for _ in range(4))
        self.norms = nn.ModuleList(nn.GroupNorm(4, 16) for _ in range(4))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        angles = t.float()[:, None] * torch.exp(-torch.arange(8, device=t.device) / 2)
        emb = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        h, skips = self.inp(x), []
        for i, conv in enumerate(self.down):
            h = F.silu(self.norms[i](conv(h)) + self.shift[i](emb)[:, :, None, None])
            skips.append(h)
        for i, conv in enumerate(self.up, 2):
            h = F.silu(self.norms[i](conv(torch.cat([h, skips.pop()], 1))) + self.shift[i](emb)[:, :, None, None])
        return self.out(h)


class WaveNet(nn.Module):
    """WaveNet: dilated causal convolutions with weight norm, gated, skips summed at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Conv1d(WIDTH, 16, 1), nn.Conv1d(16, 8, 1)
        self.dilated = nn.ModuleList(
            nn.utils.parametrizations.weight_norm(nn.Conv1d(16, 32, 2, dilation=2**i)) for i in range(4)
        )
        self.res, self.skip = (nn.ModuleList(nn.Conv1d(16, 16, 1) for _ in range(4)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.inp(x.transpose(1, 2)), 0.0
        for i, (conv, res, skip) in enumerate(zip(self.dilated, self.res, self.skip, strict=True)):
            a, b = conv(F.pad(x, (2**i, 0))).chunk(2, 1)
            h = a.tanh() * b.sigmoid()
            skips, x = skips + skip(h), x + res(h)
        return self.out(F.relu(skips))


class FourierOperator(nn.Module):
    """Fourier neural operator: spectral convolutions with complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(WIDTH, 8), nn.Linear(8, 1)
        self.weights = nn.ParameterList(torch.randn(8, 8, 5, dtype=torch.cfloat) / 8 for _ in range(3))
        self.local = nn.ModuleList(nn.Conv1d(8, 8, 1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x).transpose(1, 2)
        for weight, local in zip(self.weights, self.local, strict=True):
            spectrum = torch.einsum("bim,iom->bom", torch.fft.rfft(x)[..., :5], weight)
            x = F.gelu(torch.fft.irfft(F.pad(spectrum, (0, 4)), n=LENGTH) + local(x))
        return self.out(x.transpose(1, 2))


class Dlrm(nn.Module):
    """DLRM: embedding bags, a dense tower, pairwise products."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(50, 16, mode="sum") for _ in range(4))
        self.bottom = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16))
        self.top = nn.Sequential(nn.Linear(26, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        x = self.bottom(dense)
        features = torch.stack([x, *(bag(sparse[:, i]) for i, bag in enumerate(self.bags))], 1)
        pairs, (i, j) = features @ features.transpose(1, 2), torch.tril_indices(5, 5, -1)
        return self.top(torch.cat([x, pairs[:, i, j]], 1))


class Recurrent(nn.Module):
    """Two LSTMs over time, called with packed states, and a head on the last step."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleList(nn.LSTM(16, 16, batch_first=True) for _ in range(3))
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            y, _ = layer(x)
            x = x + y
        return self.head(x)


class ComplexActivations(nn.Module):
    """Complex numbers pass from layer to layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, dtype=torch.cfloat) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        z = torch.complex(x, x.flip(-1))
        for layer in self.layers:
            z = layer(z)
            z = z / (1 + z.abs())
        return z.abs()


class Sparse(nn.Module):
    """Embeddings with sparse gradients, a bag of them, and linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 16, sparse=True)
        self.bag = nn.EmbeddingBag(VOCABULARY, 16, mode="sum", sparse=True)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens).mean(1) + self.bag(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Siamese(nn.Module):
    """One encoder called for two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.head((self.encoder(a) - self.encoder(b)).abs())
