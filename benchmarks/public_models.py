"""Small models in the manner of code that people train from, beyond transformers: profiled, balanced for K = 2, run.

    python benchmarks/public_models.py                  all, and the report in reports/public-models
    python benchmarks/public_models.py --models unet    these only, printed; with --engine torch on two processes

Each is written here after the published architecture that its first line names, with the habits of such code: a loss
in the forward, tied weights by cast, skips in lists, einsum, buffers, fft, scans, routing, parametrizations.
The verbs run in this process, and the two stages with the virtual engine, unless another is given.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gplan.cli import main as command_line

WIDTH, VOCAB, LENGTH = 32, 64, 16
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, torch.Generator], Any], str]] = {}


def define(name: str, make: Callable[[], nn.Module], inputs: Callable[[int, torch.Generator], Any], of: str) -> None:
    """A model, its inputs for a number of samples, and the architecture that it follows."""
    MODELS[name] = make, inputs, of


def tokens(n: int, g: torch.Generator) -> Tensor:
    """Random tokens."""
    return torch.randint(VOCAB, (n, LENGTH), generator=g)


def images(n: int, g: torch.Generator) -> Tensor:
    """Random images."""
    return torch.randn(n, 3, 16, 16, generator=g)


def rows(n: int, g: torch.Generator) -> Tensor:
    """Random sequences of vectors."""
    return torch.randn(n, LENGTH, WIDTH, generator=g)


class Attention(nn.Module):
    """Causal or full attention in one projection."""

    def __init__(self, causal: bool = False, heads: int = 2) -> None:
        super().__init__()
        self.qkv, self.out, self.causal, self.heads = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
            causal,
            heads,
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A transformer's block with norms before."""

    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention(causal)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class NanoGpt(nn.Module):
    """Tied head, a dictionary of modules, logits and loss returned."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(VOCAB, WIDTH), "wpe": nn.Embedding(LENGTH, WIDTH),
            "h": nn.ModuleList(Block(causal=True) for _ in range(4)), "ln_f": nn.LayerNorm(WIDTH),
        })  # fmt: skip
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, idx: Tensor) -> tuple[Tensor, Tensor]:
        t = self.transformer
        x = t["wte"](idx) + t["wpe"](torch.arange(idx.shape[1], device=idx.device))
        for block in t["h"]:
            x = block(x)
        logits = self.lm_head(t["ln_f"](x))
        return logits, F.cross_entropy(logits[:, :-1].flatten(0, 1), idx[:, 1:].flatten())


class CastHead(nn.Module):
    """Rotary positions from a buffer, RMS norm, squared ReLU, value embeddings, a head that is a cast of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.values = nn.Embedding(VOCAB, WIDTH), nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)])
            for _ in range(4)
        )
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer(
            "angles", torch.outer(torch.arange(LENGTH), 1e4 ** -torch.linspace(0, 1, WIDTH // 2)), persistent=False
        )

    def forward(self, idx: Tensor) -> Tensor:
        x = x0 = F.rms_norm(self.embed(idx), (WIDTH,))
        cos, sin = self.angles.cos(), self.angles.sin()
        v0 = self.values(idx)
        for i, (qkv, up, down) in enumerate(self.layers):
            q, k, v = qkv(F.rms_norm(self.scale[i] * x + x0, (WIDTH,))).chunk(3, -1)
            q, k = (torch.cat([a * cos - b * sin, a * sin + b * cos], -1) for a, b in (q.chunk(2, -1), k.chunk(2, -1)))
            x = x + F.scaled_dot_product_attention(q, k, v + v0, is_causal=True)
            x = x + down(F.relu(up(F.rms_norm(x, (WIDTH,)))).square())
        return 15 * torch.tanh(F.linear(x, self.embed.weight.type_as(x)) / 15)


class DiffusionUnet(nn.Module):
    """Time embeddings given to every block, skips in a list."""

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


class Swin(nn.Module):
    """Shifted windows with a table of relative positions."""

    class Layer(nn.Module):
        """One window attention."""

        def __init__(self, shift: int) -> None:
            super().__init__()
            self.norm, self.qkv, self.out, self.shift = (
                nn.LayerNorm(WIDTH),
                nn.Linear(WIDTH, 3 * WIDTH),
                nn.Linear(WIDTH, WIDTH),
                shift,
            )
            self.table = nn.Parameter(torch.zeros(49, 2))
            place = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")).flatten(1)
            self.register_buffer(
                "index", ((place[:, :, None] - place[:, None] + 3) * torch.tensor([7, 1])[:, None, None]).sum(0)
            )

        def forward(self, x: Tensor) -> Tensor:
            n, h, w, c = x.shape
            y = torch.roll(self.norm(x), (-self.shift, -self.shift), (1, 2)).view(n, h // 4, 4, w // 4, 4, c)
            q, k, v = (
                self.qkv(y.permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, c))
                .view(-1, 16, 3, 2, c // 2)
                .permute(2, 0, 3, 1, 4)
            )
            a = (q @ k.transpose(-1, -2) / 4 + self.table[self.index].permute(2, 0, 1)).softmax(-1)
            y = (
                self.out((a @ v).transpose(1, 2).reshape(-1, 16, c))
                .view(n, h // 4, w // 4, 4, 4, c)
                .permute(0, 1, 3, 2, 4, 5)
            )
            return x + torch.roll(y.reshape(n, h, w, c), (self.shift, self.shift), (1, 2))

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.head = nn.Conv2d(3, WIDTH, 2, 2), nn.Linear(WIDTH, 10)
        self.stages = nn.ModuleList(nn.Sequential(self.Layer(0), self.Layer(2)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).permute(0, 2, 3, 1)
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean((1, 2)))


class ConvNext(nn.Module):
    """Depthwise convolutions, layer scale, stochastic depth off."""

    class Layer(nn.Module):
        """One block."""

        def __init__(self) -> None:
            super().__init__()
            self.dw, self.norm = nn.Conv2d(WIDTH, WIDTH, 7, padding=3, groups=WIDTH), nn.LayerNorm(WIDTH)
            self.up, self.down, self.gamma = (
                nn.Linear(WIDTH, 64),
                nn.Linear(64, WIDTH),
                nn.Parameter(1e-1 * torch.ones(WIDTH)),
            )

        def forward(self, x: Tensor) -> Tensor:
            return x + (self.gamma * self.down(F.gelu(self.up(self.norm(self.dw(x).permute(0, 2, 3, 1)))))).permute(
                0, 3, 1, 2
            )

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stages, self.head = (
            nn.Conv2d(3, WIDTH, 4, 4),
            nn.Sequential(*(self.Layer() for _ in range(4))),
            nn.Linear(WIDTH, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)).mean((-2, -1)))


class Vit(nn.Module):
    """A class token that is expanded, positions that are added."""

    def __init__(self, registers: int = 2) -> None:
        super().__init__()
        self.patch, self.cls = nn.Conv2d(3, WIDTH, 4, 4), nn.Parameter(torch.zeros(1, 1 + registers, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, 17 + registers, WIDTH))
        self.blocks, self.norm, self.head = (
            nn.ModuleList(Block() for _ in range(4)),
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class MaskedAutoencoder(nn.Module):
    """A share of the patches is kept by a fixed order; mask tokens in the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.mask = nn.Linear(48, WIDTH), nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.encoder, self.decoder = nn.ModuleList(Block() for _ in range(2)), nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(WIDTH, 48)
        self.register_buffer("order", torch.randperm(16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(F.unfold(x, 4, stride=4).transpose(1, 2))[:, self.order[:8]]
        for block in self.encoder:
            x = block(x)
        x = torch.cat([x, self.mask.expand(len(x), 8, -1)], 1)[:, self.order.argsort()]
        for block in self.decoder:
            x = block(x)
        return self.out(x)


class Detr(nn.Module):
    """A convolutional backbone, an encoder, learned queries, two heads in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.Conv2d(16, WIDTH, 3, 2, 1)
        )
        self.transformer = nn.Transformer(WIDTH, 2, 2, 2, 64, dropout=0.0, batch_first=True)
        self.query, self.row, self.col = (
            nn.Parameter(torch.rand(5, WIDTH)),
            nn.Parameter(torch.rand(4, 16)),
            nn.Parameter(torch.rand(4, 16)),
        )
        self.classes, self.boxes = nn.Linear(WIDTH, 7), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.backbone(x).flatten(2).transpose(1, 2)
        place = torch.cat([self.col[None].repeat(4, 1, 1), self.row[:, None].repeat(1, 4, 1)], -1).flatten(0, 1)
        h = self.transformer(h + place, self.query[None].expand(len(x), -1, -1))
        return {"pred_logits": self.classes(h), "pred_boxes": self.boxes(h).sigmoid()}


class Mamba(nn.Module):
    """Selective scan as a loop over the sequence, with a decay that is the exponential of a weight."""

    class Layer(nn.Module):
        """One mixer."""

        def __init__(self, states: int = 4) -> None:
            super().__init__()
            self.norm, self.inp, self.conv = (
                nn.RMSNorm(WIDTH),
                nn.Linear(WIDTH, 2 * WIDTH),
                nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH),
            )
            self.params, self.a_log, self.d = (
                nn.Linear(WIDTH, 1 + 2 * states),
                nn.Parameter(torch.zeros(WIDTH, states)),
                nn.Parameter(torch.ones(WIDTH)),
            )
            self.out, self.states = nn.Linear(WIDTH, WIDTH), states

        def forward(self, u: Tensor) -> Tensor:
            x, z = self.inp(self.norm(u)).chunk(2, -1)
            x = F.silu(self.conv(x.transpose(1, 2))[..., : u.shape[1]].transpose(1, 2))
            dt, b, c = self.params(x).split([1, self.states, self.states], -1)
            dt, a = F.softplus(dt), -self.a_log.float().exp()
            h, found = x.new_zeros(len(x), WIDTH, self.states), []
            for t in range(u.shape[1]):
                h = torch.exp(dt[:, t, :, None] * a) * h + (dt[:, t] * x[:, t])[..., None] * b[:, t, None]
                found.append(torch.einsum("bds,bs->bd", h, c[:, t]))
            return u + self.out((torch.stack(found, 1) + x * self.d) * F.silu(z))

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layers, self.norm = (
            nn.Embedding(VOCAB, WIDTH),
            nn.ModuleList(self.Layer() for _ in range(3)),
            nn.RMSNorm(WIDTH),
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.embedding.weight.t()


class Whisper(nn.Module):
    """Convolutions over a spectrogram, sinusoids in a buffer, a decoder with a mask and a tied head in its dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(8, WIDTH, 3, padding=1), nn.Conv1d(WIDTH, WIDTH, 3, 2, 1)
        self.encoder, self.tokens = nn.ModuleList(Block() for _ in range(2)), nn.Embedding(VOCAB, WIDTH)
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(WIDTH, 2, 64, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.register_buffer("sinusoids", torch.randn(LENGTH, WIDTH))
        self.register_buffer("mask", torch.full((LENGTH, LENGTH), float("-inf")).triu_(1), persistent=False)

    def forward(self, mel: Tensor, ids: Tensor) -> Tensor:
        x = F.gelu(self.conv2(F.gelu(self.conv1(mel)))).permute(0, 2, 1)
        x = (x + self.sinusoids).to(x.dtype)
        for block in self.encoder:
            x = block(x)
        y = self.tokens(ids)
        for layer in self.decoder:
            y = layer(y, x, tgt_mask=self.mask)
        return (y @ torch.transpose(self.tokens.weight.to(y.dtype), 0, 1)).float()


class Clip(nn.Module):
    """Two towers and a scale; similarities within the batch, so the loss is stated as a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.visual, self.text, self.scale = Vit(0), CastHead(), nn.Parameter(torch.tensor(1.0))

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        x, y = F.normalize(self.visual(image), dim=-1), F.normalize(self.text(text).mean(1)[:, :10], dim=-1)
        return self.scale.exp() * (x * y).sum(-1, keepdim=True)


class Albert(nn.Module):
    """One block called four times, a factorized embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.project, self.block, self.head = (
            nn.Embedding(VOCAB, 8),
            nn.Linear(8, WIDTH),
            Block(),
            nn.Linear(WIDTH, VOCAB),
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.project(self.words(ids))
        for _ in range(4):
            x = self.block(x)
        return self.head(x)


class Perceiver(nn.Module):
    """Latents that attend to the input, repeatedly with the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.latents, self.cross = (
            nn.Parameter(torch.randn(8, WIDTH)),
            nn.MultiheadAttention(WIDTH, 2, batch_first=True),
        )
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.latents.unsqueeze(0).repeat(len(x), 1, 1)
        for _ in range(2):
            h = h + self.cross(h, x, x, need_weights=False)[0]
            for block in self.blocks:
                h = block(h)
        return self.head(h.mean(1))


class T5(nn.Module):
    """Encoder and decoder share embedding and a table of relative positions, read in every block."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.bias = nn.Embedding(VOCAB, WIDTH), nn.Embedding(2 * LENGTH, 1)
        self.enc, self.dec, self.cross = (
            nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2)) for _ in range(3)
        )

    def forward(self, ids: Tensor, target_ids: Tensor) -> Tensor:
        place = torch.arange(LENGTH)
        bias = self.bias(place[None] - place[:, None] + LENGTH).permute(2, 0, 1)
        x, y = self.shared(ids), self.shared(target_ids)
        for layer in self.enc:
            q, k, v = layer(F.rms_norm(x, (WIDTH,))).chunk(3, -1)
            x = x + (q @ k.transpose(1, 2) + bias).softmax(-1) @ v
        for own, cross in zip(self.dec, self.cross, strict=True):
            q, k, v = own(F.rms_norm(y, (WIDTH,))).chunk(3, -1)
            y = y + F.scaled_dot_product_attention(q, k, v, is_causal=True)
            y = y + F.scaled_dot_product_attention(cross(y)[..., :WIDTH], *cross(x)[..., WIDTH:].chunk(2, -1))
        return F.linear(y * WIDTH**-0.5, self.shared.weight.to(y.dtype))


class DenseGnn(nn.Module):
    """Graph attention over a padded adjacency, one graph a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(x)
            scores = F.leaky_relu(h @ h.transpose(1, 2)).masked_fill(adjacency == 0, -1e9)
            x = x + F.elu(scores.softmax(-1) @ h)
        return self.head(x.amax(1))


class Speech(nn.Module):
    """A bidirectional LSTM stack after convolutions, as in DeepSpeech."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.Hardtanh(0, 20, inplace=True))
        self.rnns = nn.ModuleList(nn.LSTM(WIDTH, WIDTH // 2, bidirectional=True, batch_first=True) for _ in range(3))
        self.fc = nn.Linear(WIDTH, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x.transpose(1, 2)).transpose(1, 2)
        for rnn in self.rnns:
            x, _ = rnn(x)
        return F.log_softmax(self.fc(x), -1)


class WaveNet(nn.Module):
    """Dilated causal convolutions with weight norm, gated, skips summed at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Conv1d(WIDTH, 16, 1)
        self.dilated = nn.ModuleList(
            nn.utils.parametrizations.weight_norm(nn.Conv1d(16, 32, 2, dilation=2**i)) for i in range(4)
        )
        self.res, self.skip = (nn.ModuleList(nn.Conv1d(16, 16, 1) for _ in range(4)) for _ in range(2))
        self.out = nn.Conv1d(16, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.inp(x.transpose(1, 2)), 0.0
        for i, (conv, res, skip) in enumerate(zip(self.dilated, self.res, self.skip, strict=True)):
            a, b = conv(F.pad(x, (2**i, 0))).chunk(2, 1)
            h = a.tanh() * b.sigmoid()
            skips, x = skips + skip(h), x + res(h)
        return self.out(F.relu(skips))


class Switch(nn.Module):
    """Top-1 routing by index, experts in a loop over those that have tokens, an auxiliary loss."""

    class Experts(nn.Module):
        """One routed layer."""

        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = (
                nn.Linear(WIDTH, 4, bias=False),
                nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)),
            )

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            flat = x.flatten(0, 1)
            weights = self.gate(flat).softmax(-1)
            best, out = weights.argmax(-1), torch.zeros_like(flat)
            for i, expert in enumerate(self.experts):
                place = torch.where(best == i)[0]
                out[place] += weights[place, i, None] * expert(flat[place])
            return x + out.view_as(x), weights.mean(0).square().sum()

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers, self.head = (
            nn.Embedding(VOCAB, WIDTH),
            nn.ModuleList(self.Experts() for _ in range(3)),
            nn.Linear(WIDTH, VOCAB),
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x, _ = layer(x)
        return self.head(x)


class Fno(nn.Module):
    """Spectral convolutions with complex weights."""

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


class Nerf(nn.Module):
    """Frequencies of positions, a skip into the middle, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48 if i == 0 else 80 if i == 3 else WIDTH, WIDTH) for i in range(6))
        self.density, self.colour = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        parts = [f(2.0**i * x) for i in range(8) for f in (torch.sin, torch.cos)]
        h = code = torch.cat(parts, -1)
        for i, layer in enumerate(self.layers):
            h = F.relu(layer(torch.cat([h, code], -1) if i == 3 else h))
        return F.softplus(self.density(h)), self.colour(h).sigmoid()


class Dlrm(nn.Module):
    """Embedding bags, a dense tower, pairwise products."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(50, 16, mode="sum") for _ in range(4))
        self.bottom, self.top = (
            nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16)),
            nn.Sequential(nn.Linear(26, 16), nn.ReLU(), nn.Linear(16, 1)),
        )

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        x = self.bottom(dense)
        all_ = torch.stack([x, *(bag(sparse[:, i]) for i, bag in enumerate(self.bags))], 1)
        pairs, (i, j) = all_ @ all_.transpose(1, 2), torch.tril_indices(5, 5, -1)
        return self.top(torch.cat([x, pairs[:, i, j]], 1))


class Rwkv(nn.Module):
    """Token shift and a decayed linear attention, in float32 inside."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.mix, self.decay = (
            nn.ParameterList(torch.rand(WIDTH) for _ in range(3)),
            nn.ParameterList(torch.zeros(WIDTH) for _ in range(3)),
        )
        self.kvr = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        for mix, decay, kvr in zip(self.mix, self.decay, self.kvr, strict=True):
            before = F.pad(x, (0, 0, 1, -1))
            k, v, r = kvr(F.layer_norm(x * mix + before * (1 - mix), (WIDTH,))).chunk(3, -1)
            time = torch.arange(LENGTH)
            weight = (-(time[:, None] - time[None]).clamp(min=0)[..., None] * decay.float().exp()).exp() * torch.ones(
                LENGTH, LENGTH
            ).tril()[..., None]
            num = torch.einsum("tsd,bsd->btd", weight, k.exp() * v)
            x = x + r.sigmoid() * num / torch.einsum("tsd,bsd->btd", weight, k.exp())
        return self.head(x)


define("nanogpt", NanoGpt, tokens, "nanoGPT: GPT-2, tied head, returns logits and loss")
define("modded", CastHead, tokens, "modded-nanogpt: rotary, value embeddings, tied head by type_as, capped logits")
define(
    "diffusion",
    DiffusionUnet,
    lambda n, g: (images(n, g), torch.randint(1000, (n,), generator=g)),
    "DDPM: U-Net with time embedding",
)
define("swin", Swin, images, "Swin Transformer: shifted windows")
define("convnext", ConvNext, images, "ConvNeXt")
define("vit", Vit, images, "ViT with registers")
define("mae", MaskedAutoencoder, images, "masked autoencoder")
define("detr", Detr, images, "DETR")
define("mamba", Mamba, tokens, "mamba-minimal: selective scan in a loop")
define(
    "whisper",
    Whisper,
    lambda n, g: (torch.randn(n, 8, 2 * LENGTH, generator=g), tokens(n, g)),
    "Whisper: tied head by .to(x.dtype)",
)
define("clip", Clip, lambda n, g: (images(n, g), tokens(n, g)), "CLIP: two towers")
define("albert", Albert, tokens, "ALBERT: one block four times")
define("perceiver", Perceiver, rows, "Perceiver with tied layers")
define("t5", T5, lambda n, g: (tokens(n, g), tokens(n, g)), "T5: shared embedding and position table")
define(
    "gat",
    DenseGnn,
    lambda n, g: (rows(n, g), torch.randint(2, (n, LENGTH, LENGTH), generator=g)),
    "graph attention on padded graphs",
)
define("deepspeech", Speech, rows, "DeepSpeech 2: bidirectional LSTMs")
define("wavenet", WaveNet, rows, "WaveNet: weight norm, dilations, skips")
define("switch", Switch, tokens, "Switch Transformer: a loop over experts, by values")
define("fno", Fno, rows, "Fourier neural operator: complex weights")
define("nerf", Nerf, lambda n, g: torch.randn(n, 3, generator=g), "NeRF")
define(
    "dlrm",
    Dlrm,
    lambda n, g: (torch.randn(n, 8, generator=g), torch.randint(50, (n, 4, 3), generator=g)),
    "DLRM: embedding bags",
)
define("rwkv", Rwkv, tokens, "RWKV: token shift, decays")


def model(name: str = "nanogpt") -> nn.Module:
    """The model of a name; what gplan loads."""
    return MODELS[name][0]()


def loss(output: Any, _target: Tensor) -> Tensor:
    """The model's own loss, or the mean square of its outputs against a wave."""
    parts = (
        list(output.values()) if isinstance(output, dict) else list(output) if isinstance(output, tuple) else [output]
    )
    own = [x for x in parts if x.dim() == 0]
    return own[0] if own else sum((x.float() - torch.linspace(0, 1, x.shape[-1])).square().mean() for x in parts)  # type: ignore[return-value]


def batches(batch_size: int, name: str = "nanogpt") -> Iterator[tuple[Any, Tensor]]:
    """Random inputs; the target is not used."""
    generator = torch.Generator().manual_seed(0)
    while True:
        yield MODELS[name][1](batch_size, generator), torch.zeros(batch_size)


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    """What most of them are trained with."""
    return torch.optim.AdamW(parameters, lr=1e-3)


def outcome_of(name: str, folder: Path, engine: str) -> str:
    """What the three verbs end in: the line on gradients, or the first error."""
    profile, plan, run = (str(folder / f"{name}.{x}.json") for x in ("profile", "plan", "run"))
    commands = (
        ["profile", __file__, "--set", f"name={name}", "--microbatch-size", "2", "--budget", "0.2", "--contention", "0",
         "--link", "1GB/s,10us", "-o", profile],
        ["balance", profile, "--k", "2", "--microbatches", "4", "-o", plan],
        ["run", "--plan", plan, "--check", "--steps", "3", "--engine", engine, "-o", run],
    )  # fmt: skip
    for command in commands:
        output = io.StringIO()
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                command_line(command)
        except SystemExit as error:
            if error.code:
                return f"`{command[0]}` exit {error.code}: {output.getvalue().strip().splitlines()[-1][:300]}"
    text = " ".join(output.getvalue().split())
    found = text.find("gradients equal")
    return text[found : text.index(" over ", found)] if found >= 0 else "no line on gradients"


def main() -> None:
    """Run them and print a table, or write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=MODELS)
    parser.add_argument("--engine", choices=("virtual", "torch"), default="virtual")
    options = parser.parse_args()
    rows_, failed = [], 0
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models or MODELS:
            started_s = time.perf_counter()
            outcome = outcome_of(name, Path(folder), options.engine)
            failed += not outcome.startswith("gradients equal")
            rows_.append(f"| {name} | {MODELS[name][2]} | {outcome} |")
            print(f"{rows_[-1]} {time.perf_counter() - started_s:.0f} s", flush=True)
    if not options.models:
        head = (
            "# Public architectures in small, written as their repositories write them\n\n"
            "Made by `python benchmarks/public_models.py`, which has the models. Typed for each NAME:\n\n"
            "    gplan profile benchmarks/public_models.py --set name=NAME --microbatch-size 2 --budget 0.2 --contention 0 "
            f"--link 1GB/s,10us\n    gplan balance --k 2 --microbatches 4\n    gplan run --check --steps 3 --engine {options.engine}\n\n"
            f"**{len(rows_) - failed} of {len(rows_)} trained in two stages with the plain model's gradients.**\n\n"
            "| NAME | after | outcome |\n|---|---|---|\n"
        )
        report = Path(__file__).resolve().parents[1] / "reports" / "public-models" / "README.md"
        report.parent.mkdir(parents=True, exist_ok=True)
        old = report.read_text() if report.exists() else ""
        _, heading, later = old.partition("\n## ")  # sections made by other means
        report.write_text(head + "\n".join(rows_) + "\n" + heading + later)


if __name__ == "__main__":
    main()
