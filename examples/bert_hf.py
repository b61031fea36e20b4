"""BERT as Hugging Face transformers defines it, with random weights, over bytes of Python's standard library source.

`model` returns the BertForMaskedLM itself, its names unchanged; it learns to fill in bytes that were masked. Every
sample has as many masked bytes, so that the mean loss of a batch is the mean of those of its micro-batches.
Settings: num_blocks, width, feed_forward, num_heads, sequence_length, vocabulary (256 are used, 30522 is BERT's),
dropout, lr, and the seed of the batches. Needs `pip install transformers`; nothing is downloaded.

    gplan profile examples/bert_hf.py --set num_blocks=12 --set width=768 --set feed_forward=3072 --set num_heads=12
"""

import functools
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_BYTES = 256  # a token is a byte
MASK = 0  # the byte that stands for a masked one; source text has none of it
MASKED_SHARE = 0.15  # of the bytes of every sample
IGNORED = -100  # the target of a byte that was not masked, which cross_entropy leaves out
SEQUENCE_LENGTH = 64
MAX_TEXT_BYTES = 2_000_000


def model(
    num_blocks: int = 4,
    width: int = 128,
    feed_forward: int = 512,
    num_heads: int = 4,
    sequence_length: int = SEQUENCE_LENGTH,
    vocabulary: int = NUM_BYTES,
    dropout: float = 0.0,
) -> nn.Module:
    """BertForMaskedLM: int64 tokens (batch, sequence) -> an output whose `logits` are (batch, sequence, vocabulary)."""
    if width % num_heads:
        raise ValueError(f"width {width} cannot be split into {num_heads} heads; choose num_heads that divides width")
    if vocabulary < NUM_BYTES:
        raise ValueError(f"vocabulary must be at least {NUM_BYTES}, as the tokens are bytes, not {vocabulary}")
    try:
        from transformers import BertConfig, BertForMaskedLM
    except ImportError as error:
        raise ImportError("examples/bert_hf.py needs transformers; run: pip install transformers") from error
    config = BertConfig(
        vocab_size=vocabulary,
        max_position_embeddings=sequence_length,
        hidden_size=width,
        intermediate_size=feed_forward,
        num_hidden_layers=num_blocks,
        num_attention_heads=num_heads,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        use_cache=False,  # the cache of keys and values serves generation only
        pad_token_id=None,  # no padding: the usual id, 0, is that of the mask here, whose vector is trained
    )
    return BertForMaskedLM(config)


@functools.cache
def standard_library_text() -> Tensor:
    """The first 2 MB of the standard library's top-level modules, in order of their names, as uint8 (bytes,)."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[:MAX_TEXT_BYTES]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batches(batch_size: int, sequence_length: int = SEQUENCE_LENGTH, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (tokens with masked ones, the masked tokens with -100 elsewhere), both int64 (batch, sequence)."""
    text = standard_library_text()
    if len(text) < sequence_length:
        raise ValueError(f"the text has {len(text)} bytes, sequence_length is {sequence_length}; choose a shorter one")
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(sequence_length)
    num_masked = max(1, round(MASKED_SHARE * sequence_length))
    while True:
        starts = torch.randint(len(text) - sequence_length + 1, (batch_size, 1), generator=generator)
        tokens = text[starts + window].long()
        ranks = torch.rand(batch_size, sequence_length, generator=generator).argsort(dim=1)
        masked = ranks < num_masked  # in every row each rank occurs once
        yield tokens.masked_fill(masked, MASK), tokens.masked_fill(~masked, IGNORED)


def example_inputs(batch_size: int, sequence_length: int = SEQUENCE_LENGTH, seed: int = 0) -> Tensor:
    """The tokens of the first batch, some of them masked: int64 (batch, sequence)."""
    tokens, _ = next(batches(batch_size, sequence_length=sequence_length, seed=seed))
    return tokens


def loss(output: Any, target: Tensor) -> Tensor:
    """Mean cross-entropy of the output's `logits`, an attribute or a key, over the masked tokens of the target."""
    logits = output["logits"] if isinstance(output, dict) else output.logits
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=IGNORED)


def optimizer(parameters: Iterable[nn.Parameter], lr: float = 2e-3) -> torch.optim.Optimizer:
    """AdamW, as is usual for transformers."""
    return torch.optim.AdamW(parameters, lr=lr)
