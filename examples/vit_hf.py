"""ViT as Hugging Face transformers defines it, with random weights, on small synthetic images.

`model` returns the ViTForImageClassification itself, its names unchanged: patches of the image and a class token with
learned positions, then the blocks, of which the head reads the class token alone; the model is called by name, with
pixel_values. An image is a coarse pattern that belongs to its class, plus noise.
Settings: num_blocks, width, feed_forward, num_heads, image_size, patch_size, num_classes, dropout, lr, and the seed of
the batches. Needs `pip install transformers`; nothing is downloaded.

    gplan profile examples/vit_hf.py --set num_blocks=12 --set width=768 --set feed_forward=3072 --set num_heads=12
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_CLASSES = 10
IMAGE_SIZE = 32
PATTERN_SIZE = 4  # pixels of a class's pattern, before it is enlarged


def model(
    num_blocks: int = 4,
    width: int = 128,
    feed_forward: int = 512,
    num_heads: int = 4,
    image_size: int = IMAGE_SIZE,
    patch_size: int = 4,
    num_classes: int = NUM_CLASSES,
    dropout: float = 0.0,
) -> nn.Module:
    """ViTForImageClassification: what `example_inputs` gives -> an output whose `logits` are (batch, classes)."""
    if width % num_heads:
        raise ValueError(f"width {width} cannot be split into {num_heads} heads; choose num_heads that divides width")
    if image_size % patch_size:
        raise ValueError(
            f"an image of {image_size} pixels cannot be split into patches of {patch_size}; choose patch_size that "
            "divides image_size"
        )
    try:
        from transformers import ViTConfig, ViTForImageClassification
    except ImportError as error:
        raise ImportError("examples/vit_hf.py needs transformers; run: pip install transformers") from error
    config = ViTConfig(
        hidden_size=width,
        intermediate_size=feed_forward,
        num_hidden_layers=num_blocks,
        num_attention_heads=num_heads,
        image_size=image_size,
        patch_size=patch_size,
        num_labels=num_classes,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return ViTForImageClassification(config)


def batches(
    batch_size: int, num_classes: int = NUM_CLASSES, image_size: int = IMAGE_SIZE, seed: int = 0
) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """Endless (images by name, classes): float32 (batch, 3, image_size, image_size) and int64 (batch,)."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randn(num_classes, 3, PATTERN_SIZE, PATTERN_SIZE, generator=generator)
    while True:
        classes = torch.randint(num_classes, (batch_size,), generator=generator)
        noise = torch.randn(batch_size, 3, image_size, image_size, generator=generator)
        yield {"pixel_values": F.interpolate(patterns[classes], size=image_size) + noise}, classes


def example_inputs(
    batch_size: int, num_classes: int = NUM_CLASSES, image_size: int = IMAGE_SIZE, seed: int = 0
) -> dict[str, Tensor]:
    """The images of the first batch: float32 (batch, 3, image_size, image_size)."""
    inputs, _ = next(batches(batch_size, num_classes=num_classes, image_size=image_size, seed=seed))
    return inputs


def loss(output: Any, target: Tensor) -> Tensor:
    """Mean cross-entropy of the output's `logits`, an attribute or a key, against the classes (batch,)."""
    logits = output["logits"] if isinstance(output, dict) else output.logits
    return F.cross_entropy(logits, target)


def optimizer(parameters: Iterable[nn.Parameter], lr: float = 1e-3) -> torch.optim.Optimizer:
    """AdamW, as is usual for transformers."""
    return torch.optim.AdamW(parameters, lr=lr)
