"""T5 as Hugging Face transformers defines it, with random weights, over bytes of Python's standard library source.

`model` returns the T5ForConditionalGeneration itself, its names unchanged. The encoder reads a piece of the text, the
decoder continues it; the model is called by name: input_ids, attention_mask (all ones: nothing is padded) and
decoder_input_ids. Encoder, decoder and head share one embedding, and every block of the decoder reads the encoder's
output, so both cross the cuts of a pipeline.
Settings: num_blocks (of the encoder, and as many of the decoder), width, feed_forward, num_heads, head_width,
sequence_length (read), target_length (continued), vocabulary (256 are used, 32128 is T5's), dropout, lr, and the seed
of the batches. Needs `pip install transformers`; nothing is downloaded.

    gplan profile examples/t5_hf.py --set num_blocks=6 --set width=512 --set feed_forward=2048 --set num_heads=8
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
START = 0  # what the decoder reads first, as in T5; source text has no such byte
SEQUENCE_LENGTH = 64
TARGET_LENGTH = 32
MAX_TEXT_BYTES = 2_000_000


def model(
    num_blocks: int = 3,
    width: int = 128,
    feed_forward: int = 512,
    num_heads: int = 4,
    head_width: int = 32,
    vocabulary: int = NUM_BYTES,
    dropout: float = 0.0,
) -> nn.Module:
    """T5ForConditionalGeneration: what `example_inputs` gives -> `logits` (batch, target length, vocabulary)."""
    if vocabulary < NUM_BYTES:
        raise ValueError(f"vocabulary must be at least {NUM_BYTES}, as the tokens are bytes, not {vocabulary}")
    try:
        from transformers import T5Config, T5ForConditionalGeneration
    except ImportError as error:
        raise ImportError("examples/t5_hf.py needs transformers; run: pip install transformers") from error
    config = T5Config(
        vocab_size=vocabulary,
        d_model=width,
        d_ff=feed_forward,
        d_kv=head_width,
        num_layers=num_blocks,
        num_heads=num_heads,
        dropout_rate=dropout,
        use_cache=False,  # the cache of keys and values serves generation only
        pad_token_id=START,
        decoder_start_token_id=START,
    )
    return T5ForConditionalGeneration(config)


@functools.cache
def standard_library_text() -> Tensor:
    """The first 2 MB of the standard library's top-level modules, in order of their names, as uint8 (bytes,)."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[:MAX_TEXT_BYTES]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batches(
    batch_size: int, sequence_length: int = SEQUENCE_LENGTH, target_length: int = TARGET_LENGTH, seed: int = 0
) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """Endless (inputs by name, the text that follows), cut from random places; the target is int64 (batch, target).

    The decoder's inputs are the target, one place later.
    """
    text, length = standard_library_text(), sequence_length + target_length
    if len(text) < length:
        raise ValueError(
            f"the text has {len(text)} bytes, sequence_length and target_length are {sequence_length} and "
            f"{target_length}; choose shorter ones"
        )
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(length)
    while True:
        starts = torch.randint(len(text) - length + 1, (batch_size, 1), generator=generator)
        tokens, target = text[starts + window].long().split((sequence_length, target_length), dim=1)
        inputs = {
            "input_ids": tokens,
            "attention_mask": torch.ones_like(tokens),
            "decoder_input_ids": F.pad(target[:, :-1], (1, 0), value=START),
        }
        yield inputs, target


def example_inputs(
    batch_size: int, sequence_length: int = SEQUENCE_LENGTH, target_length: int = TARGET_LENGTH, seed: int = 0
) -> dict[str, Tensor]:
    """The inputs of the first batch: int64, the encoder's two (batch, sequence), the decoder's (batch, target)."""
    inputs, _ = next(batches(batch_size, sequence_length=sequence_length, target_length=target_length, seed=seed))
    return inputs


def loss(output: Any, target: Tensor) -> Tensor:
    """Mean cross-entropy of the output's `logits`, an attribute or a key, against the target (batch, target)."""
    logits = output["logits"] if isinstance(output, dict) else output.logits
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def optimizer(parameters: Iterable[nn.Parameter], lr: float = 2e-3) -> torch.optim.Optimizer:
    """AdamW, as is usual for transformers."""
    return torch.optim.AdamW(parameters, lr=lr)
