"""ResNet-18, -34 and -50 (He et al., 2015, arXiv 1512.03385) with the ImageNet stem, on small synthetic images.

With width 64 and 1000 classes, parameter names and counts are those of the common ImageNet checkpoints.
Settings: depth (18, 34 or 50), width (channels of the first stage), num_classes, image_size, lr, and the seed
of the batches. An image is a coarse pattern that belongs to its class, plus noise.

    gplan profile examples/resnet.py --set depth=50
"""

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_CLASSES = 10
IMAGE_SIZE = 64  # layer4 then sees 2x2 pixels: batch norm refuses a single 1x1 image, which a micro-batch can be


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    expansion = 1  # output channels per `channels`

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = shortcut(in_channels, channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, in, height, width) -> (batch, channels, height / stride, width / stride)."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.downsample(x)
        activated: Tensor = self.relu(out)
        return activated


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolution and a shortcut; the 3x3 has the stride, four times as many channels come out."""

    expansion = 4

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, 4 * channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = shortcut(in_channels, 4 * channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, in, height, width) -> (batch, 4 * channels, height / stride, width / stride)."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += self.downsample(x)
        activated: Tensor = self.relu(out)
        return activated


BLOCKS: dict[int, tuple[type[BasicBlock] | type[Bottleneck], tuple[int, ...]]] = {  # depth: block, blocks per stage
    18: (BasicBlock, (2, 2, 2, 2)),
    34: (BasicBlock, (3, 4, 6, 3)),
    50: (Bottleneck, (3, 4, 6, 3)),
}


def shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Sequential:
    """Identity (empty) where the shape stays, else a strided 1x1 convolution with batch norm."""
    if stride == 1 and in_channels == out_channels:
        return nn.Sequential()
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 1, stride, bias=False),
        nn.BatchNorm2d(out_channels),
    )


def stage(
    block: type[BasicBlock] | type[Bottleneck], in_channels: int, channels: int, num_blocks: int, stride: int
) -> nn.Sequential:
    """A row of blocks; the first changes the image size and the number of channels."""
    first = block(in_channels, channels, stride)
    rest = [block(channels * block.expansion, channels, 1) for _ in range(num_blocks - 1)]
    return nn.Sequential(first, *rest)


class ResNet(nn.Module):
    """Stem, four stages of blocks that double the channels and halve the image, average and classifier."""

    def __init__(self, *, depth: int, width: int, num_classes: int) -> None:
        super().__init__()
        block, num_blocks = BLOCKS[depth]
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        wide = width * block.expansion
        self.layer1 = stage(block, width, width, num_blocks[0], stride=1)
        self.layer2 = stage(block, wide, 2 * width, num_blocks[1], stride=2)
        self.layer3 = stage(block, 2 * wide, 4 * width, num_blocks[2], stride=2)
        self.layer4 = stage(block, 4 * wide, 8 * width, num_blocks[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8 * wide, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images (batch, 3, height, width) -> logits (batch, classes)."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(self.avgpool(x).flatten(1))
        return logits


def model(depth: int = 18, width: int = 16, num_classes: int = NUM_CLASSES) -> nn.Module:
    """ResNet of `depth` layers: images (batch, 3, height, width) -> logits (batch, classes)."""
    if depth not in BLOCKS:
        raise ValueError(f"depth must be one of {', '.join(map(str, BLOCKS))}, not {depth}")
    return ResNet(depth=depth, width=width, num_classes=num_classes)


def batches(
    batch_size: int, num_classes: int = NUM_CLASSES, image_size: int = IMAGE_SIZE, seed: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (images, classes): float32 (batch, 3, image_size, image_size) and int64 (batch,)."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randn(num_classes, 3, 4, 4, generator=generator)
    while True:
        classes = torch.randint(num_classes, (batch_size,), generator=generator)
        noise = torch.randn(batch_size, 3, image_size, image_size, generator=generator)
        yield F.interpolate(patterns[classes], size=image_size) + 2 * noise, classes


def example_inputs(
    batch_size: int, num_classes: int = NUM_CLASSES, image_size: int = IMAGE_SIZE, seed: int = 0
) -> Tensor:
    """The images of the first batch: float32 (batch, 3, image_size, image_size)."""
    images, _ = next(batches(batch_size, num_classes=num_classes, image_size=image_size, seed=seed))
    return images


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy of logits (batch, classes) against the classes (batch,)."""
    return F.cross_entropy(output, target)


def optimizer(parameters: Iterable[nn.Parameter], lr: float = 0.02) -> torch.optim.Optimizer:
    """SGD with momentum, as is usual for residual networks."""
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)
