"""GPipe's Transformer-L: the decoder-only language model that its paper scales to 83.9 B parameters, from plain modules.

Huang et al., NeurIPS 2019, arXiv 1811.06965, Table 1: width 2048, feed-forward 8192, 32 heads, a vocabulary of 32000,
untied embedding and softmax, sequences of 1024; L = 3, 13, 103, 415, 1663 blocks. Positions are sines and cosines, not
learned, which gives the paper's counts: L (4 d^2 + 4 d + 2 d f + f + d + 4 d) + 2 V d + V + 2 d parameters. Norms come
before attention and perceptron; that is today's usual order, not one that the paper states.
The defaults are small enough for a processor. Settings: num_layers, paper (true: the paper's dimensions), width,
feed_forward, num_heads, vocabulary, sequence_length, lr, and the seed of the batches. The text is the source of Python's
standard library in bytes, whatever the vocabulary.

    gplan profile examples/transformer_l.py --set num_layers=12 --set width=512 --set feed_forward=2048
"""

import functools
import math
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_BYTES = 256  # a token is a byte
MAX_TEXT_BYTES = 2_000_000
LONGEST_WAVE = 10_000.0  # of the positions, over 2 pi


class Dimensions(NamedTuple):
    """The sizes of a model, but for its number of layers."""

    width: int
    feed_forward: int
    num_heads: int
    vocabulary: int
    sequence_length: int


SMALL = Dimensions(width=256, feed_forward=1024, num_heads=4, vocabulary=NUM_BYTES, sequence_length=64)
PAPER = Dimensions(width=2048, feed_forward=8192, num_heads=32, vocabulary=32_000, sequence_length=1024)


def dimensions(paper: bool, **given: int | None) -> Dimensions:
    """The paper's or the small ones, with those that are given instead."""
    size = PAPER if paper else SMALL
    return size._replace(**{name: value for name, value in given.items() if value is not None})


class Embedding(nn.Module):
    """Learned vectors of the tokens plus sines and cosines of their positions."""

    def __init__(self, size: Dimensions) -> None:
        super().__init__()
        self.token = nn.Embedding(size.vocabulary, size.width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (batch, sequence) -> vectors (batch, sequence, width)."""
        width = self.token.embedding_dim
        places = torch.arange(tokens.shape[1], device=tokens.device)
        exponents = torch.arange(0, width, 2, device=tokens.device) / width
        angles = places[:, None] * torch.exp(-math.log(LONGEST_WAVE) * exponents)  # (sequence, width / 2)
        embedded: Tensor = self.token(tokens)
        return embedded + torch.cat([angles.sin(), angles.cos()], dim=1).to(embedded.dtype)


class Block(nn.Module):
    """Causal attention, then a perceptron of two layers; each is added to the residual stream."""

    def __init__(self, size: Dimensions) -> None:
        super().__init__()
        self.num_heads = size.num_heads
        self.attention_norm = nn.LayerNorm(size.width)
        self.query_key_value = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.mlp_norm = nn.LayerNorm(size.width)
        self.mlp = nn.Sequential(
            nn.Linear(size.width, size.feed_forward), nn.ReLU(), nn.Linear(size.feed_forward, size.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, width) -> the same shape."""
        heads = self.query_key_value(self.attention_norm(x)).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (batch, head, sequence, width of a head)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class TransformerL(nn.Module):
    """Embedding, blocks, norm and head."""

    def __init__(self, num_layers: int, size: Dimensions) -> None:
        super().__init__()
        self.embedding = Embedding(size)
        self.blocks = nn.ModuleList(Block(size) for _ in range(num_layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (batch, sequence) -> logits (batch, sequence, vocabulary)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def model(
    num_layers: int = 4,
    paper: bool = False,
    width: int | None = None,
    feed_forward: int | None = None,
    num_heads: int | None = None,
    vocabulary: int | None = None,
) -> nn.Module:
    """Transformer-L: int64 tokens (batch, sequence) -> logits (batch, sequence, vocabulary).

    What is not given is the paper's where `paper` is true, else small: width 256, feed_forward 1024, 4 heads, 256 tokens.
    """
    size = dimensions(paper, width=width, feed_forward=feed_forward, num_heads=num_heads, vocabulary=vocabulary)
    if num_layers < 1:
        raise ValueError(f"num_layers must be at least 1, not {num_layers}")
    if size.width % size.num_heads or size.width % 2:
        raise ValueError(
            f"width {size.width} cannot be split into {size.num_heads} heads, and into sines and cosines; choose an even "
            "width that num_heads divides"
        )
    if size.vocabulary < NUM_BYTES:
        raise ValueError(f"vocabulary must be at least {NUM_BYTES}, as the tokens are bytes, not {size.vocabulary}")
    return TransformerL(num_layers, size)


@functools.cache
def standard_library_text() -> Tensor:
    """The first 2 MB of the standard library's top-level modules, in order of their names, as uint8 (bytes,)."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[:MAX_TEXT_BYTES]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batches(
    batch_size: int, paper: bool = False, sequence_length: int | None = None, seed: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (tokens, next tokens), both int64 (batch, sequence), cut from random places of the text.

    Sequences have 64 tokens where no length is given, 1024 where `paper` is true.
    """
    text, length = standard_library_text(), dimensions(paper, sequence_length=sequence_length).sequence_length
    if len(text) <= length:
        raise ValueError(f"the text has {len(text)} bytes, sequence_length is {length}; choose a shorter one")
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(length + 1)
    while True:
        starts = torch.randint(len(text) - length, (batch_size, 1), generator=generator)
        tokens = text[starts + window].long()
        yield tokens[:, :-1], tokens[:, 1:]


def example_inputs(batch_size: int, paper: bool = False, sequence_length: int | None = None, seed: int = 0) -> Tensor:
    """The tokens of the first batch: int64 (batch, sequence)."""
    tokens, _ = next(batches(batch_size, paper=paper, sequence_length=sequence_length, seed=seed))
    return tokens


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy of logits (batch, sequence, vocabulary) against the next tokens (batch, sequence)."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def optimizer(parameters: Iterable[nn.Parameter], lr: float = 1e-3) -> torch.optim.Optimizer:
    """AdamW, as is usual for transformers."""
    return torch.optim.AdamW(parameters, lr=lr)
