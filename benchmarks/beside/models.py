"""The models that gplan and its peers train: each an nn.Sequential, as torchgpipe needs one, small enough for 2 cores.

    even         blocks that are all alike between a small embedding and a small head: equal counts are right
    vocabulary   fewer such blocks and a head over many words, which is the dearest layer
    convolution  a network for images: early layers take the time, late ones hold the parameters
    widening     a perceptron whose layers grow, in time as in parameters

No dropout and no batch norm, so that all must find the same losses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_MICROBATCHES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model and a mini-batch for it; `block` is the class that DeepSpeed's `type:` counts."""

    make: Callable[[], nn.Sequential]
    batch: Callable[[], tuple[Tensor, Tensor]]
    block: str

    def model(self) -> nn.Sequential:
        """The model, with the same weights every time."""
        torch.manual_seed(0)
        return self.make()

    def sample(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a mini-batch, the same every time."""
        torch.manual_seed(1)
        return self.batch()


def loss(output: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy over all rows (and positions)."""
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())


def _transformer(num_blocks: int, width: int, vocabulary: int) -> nn.Sequential:
    blocks = [
        nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        for _ in range(num_blocks)
    ]
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary))
    return nn.Sequential(nn.Embedding(vocabulary, width), *blocks, head)


def _words(microbatch_size: int, vocabulary: int, length: int = 64) -> tuple[Tensor, Tensor]:
    size = NUM_MICROBATCHES * microbatch_size
    return torch.randint(vocabulary, (size, length)), torch.randint(vocabulary, (size, length))


def _convolution() -> nn.Sequential:
    widths = (24, 24, 24, 48, 48, 96, 96, 192, 192, 384)
    blocks = [
        nn.Sequential(nn.Conv2d(i, j, 3, stride=1 if i == j else 2, padding=1), nn.GroupNorm(8, j), nn.ReLU())
        for i, j in pairwise((24, *widths))
    ]
    stem = nn.Conv2d(3, 24, 3, padding=1)
    return nn.Sequential(stem, *blocks, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(384, 100)))


def _images(microbatch_size: int) -> tuple[Tensor, Tensor]:
    size = NUM_MICROBATCHES * microbatch_size
    return torch.randn(size, 3, 48, 48), torch.randint(100, (size,))


def _widening() -> nn.Sequential:
    widths = (128, 160, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 1536)
    layers = [nn.Sequential(nn.Linear(i, j), nn.GELU()) for i, j in pairwise(widths)]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 100))


def _rows(microbatch_size: int) -> tuple[Tensor, Tensor]:
    size = NUM_MICROBATCHES * microbatch_size
    return torch.randn(size, 128), torch.randint(100, (size,))


SUBJECTS = {
    "even": Subject(
        make=lambda: _transformer(10, 96, 128), batch=lambda: _words(2, 128), block="TransformerEncoderLayer"
    ),
    "vocabulary": Subject(
        make=lambda: _transformer(8, 96, 6000), batch=lambda: _words(2, 6000), block="TransformerEncoderLayer"
    ),
    "convolution": Subject(make=_convolution, batch=lambda: _images(2), block="Sequential"),
    "widening": Subject(make=_widening, batch=lambda: _rows(32), block="Sequential"),
}
