"""Llama as Hugging Face transformers defines it, with random weights, over bytes of Python's standard library source.

`model` returns the LlamaForCausalLM itself, its names unchanged: rotary positions, grouped keys and values, a gated
perceptron, and a head of its own. Settings: num_blocks, width, feed_forward, num_heads, num_key_value_heads,
sequence_length, vocabulary (256 are used, 32000 is Llama's), lr, and the seed of the batches. Needs
`pip install transformers`; nothing is downloaded.

    gplan profile examples/llama_hf.py --set num_blocks=16 --set width=512 --set feed_forward=1376 --set num_heads=8
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
SEQUENCE_LENGTH = 64
MAX_TEXT_BYTES = 2_000_000


def model(
    num_blocks: int = 4,
    width: int = 128,
    feed_forward: int = 344,
    num_heads: int = 4,
    num_key_value_heads: int = 2,
    sequence_length: int = SEQUENCE_LENGTH,
    vocabulary: int = NUM_BYTES,
) -> nn.Module:
    """LlamaForCausalLM: int64 tokens (batch, sequence) -> an output whose `logits` are (batch, sequence, vocabulary)."""
    if width % (2 * num_heads):
        raise ValueError(
            f"width {width} cannot be split into {num_heads} heads of an even width, which rotary positions need; choose "
            f"a multiple of {2 * num_heads}"
        )
    if num_heads % num_key_value_heads:
        raise ValueError(
            f"{num_heads} heads cannot share {num_key_value_heads} heads of keys and values; choose num_key_value_heads "
            "that divides num_heads"
        )
    if vocabulary < NUM_BYTES:
        raise ValueError(f"vocabulary must be at least {NUM_BYTES}, as the tokens are bytes, not {vocabulary}")
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise ImportError("examples/llama_hf.py needs transformers; run: pip install transformers") from error
    config = LlamaConfig(
        vocab_size=vocabulary,
        max_position_embeddings=sequence_length,
        hidden_size=width,
        intermediate_size=feed_forward,
        num_hidden_layers=num_blocks,
        num_attention_heads=num_heads,
        num_key_value_heads=num_key_value_heads,
        use_cache=False,  # the cache of keys and values serves generation only
    )
    return LlamaForCausalLM(config)


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


def loss(output: Any, target: Tensor) -> Tensor:
    """Mean cross-entropy of the output's `logits`, an attribute or a key, against the next tokens (batch, sequence)."""
    logits = output["logits"] if isinstance(output, dict) else output.logits
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def optimizer(parameters: Iterable[nn.Parameter], lr: float = 2e-3) -> torch.optim.Optimizer:
    """AdamW, as is usual for transformers."""
    return torch.optim.AdamW(parameters, lr=lr)
