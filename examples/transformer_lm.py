"""A small decoder-only transformer language model over bytes, trained on the source of Python's own standard library.

Its layers are one embedding (token and position), pre-norm blocks with causal attention, a final norm and a head.
Settings: num_blocks, width, num_heads, sequence_length, tie_embedding, dropout, lr, and the seed of the batches.
The text is read from the Python that runs this file, so the losses differ a little from one Python version to another.

    gplan profile examples/transformer_lm.py --set num_blocks=16 --set width=256
"""

import functools
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256  # every value of a byte
SEQUENCE_LENGTH = 96
MAX_TEXT_BYTES = 2_000_000


class Embedding(nn.Module):
    """Learned vectors of the tokens plus learned vectors of their positions."""

    def __init__(self, width: int, sequence_length: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(sequence_length, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (batch, sequence) -> vectors (batch, sequence, width)."""
        embedded: Tensor = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        return embedded


class Attention(nn.Module):
    """Causal self-attention: every position sees itself and the positions before it."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, width) -> the same shape."""
        heads = self.query_key_value(x).unflatten(-1, (3, self.num_heads, -1))  # (batch, sequence, 3, head, width)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)  # each (batch, head, sequence, width of a head)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """Attention, then a two-layer perceptron four times as wide; each is added to the residual stream."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, width) -> the same shape."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        out: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return out


class TransformerLM(nn.Module):
    """Embedding, blocks, norm and head."""

    def __init__(
        self, *, num_blocks: int, width: int, num_heads: int, sequence_length: int, tie_embedding: bool, dropout: float
    ) -> None:
        super().__init__()
        self.embedding = Embedding(width, sequence_length)
        self.blocks = nn.ModuleList(Block(width, num_heads, dropout) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for weight in (self.embedding.token.weight, self.embedding.position.weight, self.head.weight):
            nn.init.normal_(weight, std=0.02)  # small logits at first: the loss starts near log(256)
        if tie_embedding:
            self.head.weight = self.embedding.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (batch, sequence) -> logits (batch, sequence, vocabulary)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def model(
    num_blocks: int = 8,
    width: int = 128,
    num_heads: int = 4,
    sequence_length: int = SEQUENCE_LENGTH,
    tie_embedding: bool = False,
    dropout: float = 0.0,
) -> nn.Module:
    """The language model: int64 tokens (batch, sequence) -> logits (batch, sequence, 256).

    With `tie_embedding` the head and the token embedding are one parameter.
    """
    if width % num_heads:
        raise ValueError(f"width {width} cannot be split into {num_heads} heads; choose num_heads that divides width")
    return TransformerLM(
        num_blocks=num_blocks,
        width=width,
        num_heads=num_heads,
        sequence_length=sequence_length,
        tie_embedding=tie_embedding,
        dropout=dropout,
    )


@functools.cache
def standard_library_text() -> Tensor:
    """The first 2 MB of the standard library's top-level modules, in order of their names, as uint8 (bytes,)."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[:MAX_TEXT_BYTES]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batches(batch_size: int, sequence_length: int = SEQUENCE_LENGTH, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (tokens, next tokens), both int64 (batch, sequence), cut from random places of the text."""
    text = standard_library_text()
    if len(text) <= sequence_length:
        raise ValueError(f"the text has {len(text)} bytes, sequence_length is {sequence_length}; choose a shorter one")
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(sequence_length + 1)
    while True:
        starts = torch.randint(len(text) - sequence_length, (batch_size, 1), generator=generator)
        tokens = text[starts + window].long()
        yield tokens[:, :-1], tokens[:, 1:]


def example_inputs(batch_size: int, sequence_length: int = SEQUENCE_LENGTH, seed: int = 0) -> Tensor:
    """The tokens of the first batch: int64 (batch, sequence)."""
    tokens, _ = next(batches(batch_size, sequence_length=sequence_length, seed=seed))
    return tokens


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy of logits (batch, sequence, 256) against the next tokens (batch, sequence)."""
    return F.cross_entropy(output.flatten(0, 1).float(), target.flatten())


def optimizer(parameters: Iterable[nn.Parameter], lr: float = 2e-3) -> torch.optim.Optimizer:
    """AdamW, as is usual for transformers."""
    return torch.optim.AdamW(parameters, lr=lr)
