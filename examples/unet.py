"""U-Net (Ronneberger et al., 2015, arXiv 1505.04597): segmentation with long skips from encoder to decoder.

Every level is a DoubleConv; the skips are concatenated, so a cut after the bottleneck sends `depth` + 1 tensors.
Settings: depth (number of halvings), width (channels of the first level), image_size, lr, and the seed
of the batches. The task is synthetic: find the bright discs in a noisy grey image.

    gplan profile examples/unet.py --set depth=4 --set width=64 --set image_size=256
"""

from collections.abc import Iterable, Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DEPTH = 3
IMAGE_SIZE = 64
NUM_DISCS = 3


class DoubleConv(nn.Module):
    """Twice: 3x3 convolution, batch norm and ReLU."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, in, height, width) -> (batch, out, height, width)."""
        out: Tensor = self.layers(x)
        return out


class UNet(nn.Module):
    """Encoder, bottleneck and decoder; level i has width * 2**i channels on an image halved i times.

    encoder[0] ----------------------------> decoder[2] - head
         encoder[1] --------------> decoder[1]
              encoder[2] ---> decoder[0]
                     bottleneck
    """

    def __init__(self, *, depth: int, width: int) -> None:
        super().__init__()
        channels = [width * 2**level for level in range(depth + 1)]
        downwards = list(pairwise(channels))
        self.encoder = nn.ModuleList([DoubleConv(1, width), *(DoubleConv(i, j) for i, j in downwards[:-1])])
        self.bottleneck = DoubleConv(*downwards[-1])
        self.upsample = nn.ModuleList(nn.ConvTranspose2d(j, i, 2, stride=2) for i, j in reversed(downwards))
        self.decoder = nn.ModuleList(DoubleConv(j, i) for i, j in reversed(downwards))
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Images (batch, 1, height, width) -> logits of the same shape."""
        skips = []
        for level in self.encoder:
            skips.append(level(x))
            x = F.max_pool2d(skips[-1], 2)
        x = self.bottleneck(x)
        for upsample, level in zip(self.upsample, self.decoder, strict=True):
            x = level(torch.cat([skips.pop(), upsample(x)], dim=1))
        logits: Tensor = self.head(x)
        return logits


def model(depth: int = DEPTH, width: int = 8) -> nn.Module:
    """U-Net with `depth` halvings: images (batch, 1, height, width) -> logits of the same shape."""
    if depth < 1:
        raise ValueError(f"depth must be at least 1, as a U-Net needs one level above its bottleneck, not {depth}")
    return UNet(depth=depth, width=width)


def batches(
    batch_size: int, image_size: int = IMAGE_SIZE, depth: int = DEPTH, seed: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (images, masks), both float32 (batch, 1, image_size, image_size); a mask is 1 inside discs, else 0."""
    if image_size % 2**depth:
        raise ValueError(
            f"image_size {image_size} cannot be halved {depth} times; choose a multiple of {2**depth} or less depth"
        )
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.linspace(0, 1, image_size)
    while True:
        x, y, size = torch.rand(3, batch_size, NUM_DISCS, 1, 1, generator=generator)
        squared_distance = (pixels - x) ** 2 + (pixels[:, None] - y) ** 2  # (batch, discs, image_size, image_size)
        inside = squared_distance < (0.05 + 0.15 * size) ** 2
        masks = inside.any(dim=1, keepdim=True).float()
        yield masks + 0.5 * torch.randn(masks.shape, generator=generator), masks


def example_inputs(batch_size: int, image_size: int = IMAGE_SIZE, depth: int = DEPTH, seed: int = 0) -> Tensor:
    """The images of the first batch: float32 (batch, 1, image_size, image_size)."""
    images, _ = next(batches(batch_size, image_size=image_size, depth=depth, seed=seed))
    return images


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean binary cross-entropy of logits against masks, both (batch, 1, height, width)."""
    return F.binary_cross_entropy_with_logits(output, target)


def optimizer(parameters: Iterable[nn.Parameter], lr: float = 1e-2) -> torch.optim.Optimizer:
    """Adam."""
    return torch.optim.Adam(parameters, lr=lr)
