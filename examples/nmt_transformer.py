"""The encoder-decoder Transformer of the GPipe paper's translation, T(L, H, A), up to 6 billion parameters.

Huang et al., NeurIPS 2019, arXiv 1811.06965, section 5: L encoder and L decoder layers of width 1024, feed-forward H, A heads;
T(6, 8192, 16) has 400 M parameters, T(64, 16384, 32) has 6 B and ran on 16 accelerators. A head is 64 wide whatever their
number, which is what makes T(24, 8192, 16) and T(12, 16384, 32) both 1.3 B, as printed. The vocabulary of 64000, shared by
source and target, and the untied softmax are assumed. Positions are sines and cosines; norms come before each part.
Every decoder layer reads the encoder's output, so it crosses each cut behind the encoder. The model is called by
name: source, and target one place later. The defaults are small enough for a processor. Settings: num_layers (of each half), paper (true: the
paper's dimensions), width, feed_forward, num_heads, head_width, vocabulary, sequence_length (of each half), lr, and the
seed of the batches. The task is to write the source backwards; the source is Python's standard library in bytes.

    gplan profile examples/nmt_transformer.py --set num_layers=6 --set width=256 --set feed_forward=1024
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
START = 0  # what the decoder reads first; source text has no such byte
MAX_TEXT_BYTES = 2_000_000
LONGEST_WAVE = 10_000.0  # of the positions, over 2 pi


class Dimensions(NamedTuple):
    """The sizes of a model, but for its number of layers."""

    width: int
    feed_forward: int
    num_heads: int
    head_width: int
    vocabulary: int
    sequence_length: int


SMALL = Dimensions(width=128, feed_forward=512, num_heads=4, head_width=32, vocabulary=NUM_BYTES, sequence_length=32)
PAPER = Dimensions(width=1024, feed_forward=16_384, num_heads=32, head_width=64, vocabulary=64_000, sequence_length=128)


def dimensions(paper: bool, **given: int | None) -> Dimensions:
    """The paper's or the small ones, with those that are given instead."""
    size = PAPER if paper else SMALL
    return size._replace(**{name: value for name, value in given.items() if value is not None})


class Attention(nn.Module):
    """Attention of several heads from one sequence to the same or to another one."""

    def __init__(self, size: Dimensions, *, is_causal: bool = False) -> None:
        super().__init__()
        self.num_heads, self.is_causal = size.num_heads, is_causal
        inner = size.num_heads * size.head_width
        self.query = nn.Linear(size.width, inner)
        self.key_value = nn.Linear(size.width, 2 * inner)
        self.out = nn.Linear(inner, size.width)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        """(batch, sequence, width), (batch, other sequence, width) -> (batch, sequence, width)."""
        query = self.query(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        key, value = self.key_value(memory).unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


def perceptron(size: Dimensions) -> nn.Sequential:
    """Two layers."""
    return nn.Sequential(nn.Linear(size.width, size.feed_forward), nn.ReLU(), nn.Linear(size.feed_forward, size.width))


class EncoderLayer(nn.Module):
    """Attention within the source, then a perceptron; each is added to the residual stream."""

    def __init__(self, size: Dimensions) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(size.width)
        self.attention = Attention(size)
        self.mlp_norm = nn.LayerNorm(size.width)
        self.mlp = perceptron(size)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, source, width) -> the same shape."""
        normed = self.attention_norm(x)
        x = x + self.attention(normed, normed)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class DecoderLayer(nn.Module):
    """Causal attention within the target, attention to the source, then a perceptron."""

    def __init__(self, size: Dimensions) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(size.width)
        self.attention = Attention(size, is_causal=True)
        self.source_norm = nn.LayerNorm(size.width)
        self.source_attention = Attention(size)
        self.mlp_norm = nn.LayerNorm(size.width)
        self.mlp = perceptron(size)

    def forward(self, x: Tensor, source: Tensor) -> Tensor:
        """(batch, target, width), (batch, source, width) -> (batch, target, width)."""
        normed = self.attention_norm(x)
        x = x + self.attention(normed, normed)
        x = x + self.source_attention(self.source_norm(x), source)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


def positions(length: int, width: int, device: torch.device) -> Tensor:
    """Sines and cosines: (length, width)."""
    exponents = torch.arange(0, width, 2, device=device) / width
    angles = torch.arange(length, device=device)[:, None] * torch.exp(-math.log(LONGEST_WAVE) * exponents)
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class Translator(nn.Module):
    """One embedding for both languages, encoder, decoder and head."""

    def __init__(self, num_layers: int, size: Dimensions) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.encoder = nn.ModuleList(EncoderLayer(size) for _ in range(num_layers))
        self.encoder_norm = nn.LayerNorm(size.width)
        self.decoder = nn.ModuleList(DecoderLayer(size) for _ in range(num_layers))
        self.decoder_norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Tokens of the source and of the target so far, (batch, sequence) -> logits (batch, sequence, vocabulary)."""
        read = self.embedded(source)
        for layer in self.encoder:
            read = layer(read)
        read, x = self.encoder_norm(read), self.embedded(target)
        for layer in self.decoder:
            x = layer(x, read)
        logits: Tensor = self.head(self.decoder_norm(x))
        return logits

    def embedded(self, tokens: Tensor) -> Tensor:
        """Tokens (batch, sequence) -> vectors (batch, sequence, width)."""
        vectors: Tensor = self.embedding(tokens)
        return vectors + positions(tokens.shape[1], vectors.shape[2], vectors.device)


def model(
    num_layers: int = 2,
    paper: bool = False,
    width: int | None = None,
    feed_forward: int | None = None,
    num_heads: int | None = None,
    head_width: int | None = None,
    vocabulary: int | None = None,
) -> nn.Module:
    """T(num_layers, feed_forward, num_heads): int64 tokens, twice (batch, sequence) -> logits (batch, sequence, vocabulary).

    What is not given is that of T(64, 16384, 32) where `paper` is true, else small.
    """
    size = dimensions(
        paper, width=width, feed_forward=feed_forward, num_heads=num_heads, head_width=head_width, vocabulary=vocabulary
    )
    if num_layers < 1:
        raise ValueError(f"num_layers must be at least 1, not {num_layers}")
    if size.width % 2:
        raise ValueError(f"width must be even, for sines and cosines, not {size.width}")
    if size.vocabulary < NUM_BYTES:
        raise ValueError(f"vocabulary must be at least {NUM_BYTES}, as the tokens are bytes, not {size.vocabulary}")
    return Translator(num_layers, size)


@functools.cache
def standard_library_text() -> Tensor:
    """The first 2 MB of the standard library's top-level modules, in order of their names, as uint8 (bytes,)."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[:MAX_TEXT_BYTES]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batches(
    batch_size: int, paper: bool = False, sequence_length: int | None = None, seed: int = 0
) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """Endless (source and target one place later by name, target), all int64 (batch, sequence).

    The target is the source backwards. Sequences have 32 tokens where no length is given, 128 where `paper` is true.
    """
    text, length = standard_library_text(), dimensions(paper, sequence_length=sequence_length).sequence_length
    if len(text) < length:
        raise ValueError(f"the text has {len(text)} bytes, sequence_length is {length}; choose a shorter one")
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(length)
    while True:
        starts = torch.randint(len(text) - length + 1, (batch_size, 1), generator=generator)
        source = text[starts + window].long()
        target = source.flip(1)
        yield {"source": source, "target": F.pad(target[:, :-1], (1, 0), value=START)}, target


def example_inputs(
    batch_size: int, paper: bool = False, sequence_length: int | None = None, seed: int = 0
) -> dict[str, Tensor]:
    """The inputs of the first batch: int64, both (batch, sequence)."""
    inputs, _ = next(batches(batch_size, paper=paper, sequence_length=sequence_length, seed=seed))
    return inputs


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy of logits (batch, sequence, vocabulary) against the target (batch, sequence)."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def optimizer(parameters: Iterable[nn.Parameter], lr: float = 1e-3) -> torch.optim.Optimizer:
    """AdamW, as is usual for transformers."""
    return torch.optim.AdamW(parameters, lr=lr)
