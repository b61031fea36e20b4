"""GPT-2 as Hugging Face transformers defines it, with random weights, over bytes of Python's standard library source.

Shows that gplan takes a model it knows nothing about: `model` returns the GPT2LMHeadModel itself, its names unchanged.
Settings: num_blocks, width, num_heads, sequence_length, vocabulary (256 are used, 50257 is GPT-2's), dropout, lr, and
the seed of the batches. Needs `pip install transformers`; nothing is downloaded.

    gplan profile examples/gpt2_hf.py --set num_blocks=12 --set width=768 --set num_heads=12 --set vocabulary=50257
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
    num_heads: int = 4,
    sequence_length: int = SEQUENCE_LENGTH,
    vocabulary: int = NUM_BYTES,
    dropout: float = 0.0,
) -> nn.Module:
    """GPT2LMHeadModel: int64 tokens (batch, sequence) -> an output whose `logits` are (batch, sequence, vocabulary)."""
    if width % num_heads:
        raise ValueError(f"width {width} cannot be split into {num_heads} heads; choose num_heads that divides width")
    if vocabulary < NUM_BYTES:
        raise ValueError(f"vocabulary must be at least {NUM_BYTES}, as the tokens are bytes, not {vocabulary}")
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError as error:
        raise ImportError("examples/gpt2_hf.py needs transformers; run: pip install transformers") from error
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=sequence_length,
        n_embd=width,
        n_layer=num_blocks,
        n_head=num_heads,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        use_cache=False,  # the cache of keys and values serves generation only
        bos_token_id=0,  # the usual ids, 50256, are outside a vocabulary of bytes
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


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
