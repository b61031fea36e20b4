"""AmoebaNet-D(L, D), the image classifier of the GPipe paper (Huang et al., 2019, arXiv 1811.06965, Tables 1 to 3).

An nn.Sequential of L + 6 layers: a stem, cells that each read the outputs of the two cells before them, a classifier.
The value between cells is the tuple (output, previous output). Settings: num_layers (L), num_filters (D), num_classes,
image_size, lr, and the seed of the batches. An image is a coarse pattern that belongs to its class, plus noise.

    gplan profile examples/amoebanet_d.py --set num_layers=18 --set num_filters=256 --set image_size=224
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_CLASSES = 10
IMAGE_SIZE = 64
SHRINK = 32  # the stem and the four reduction cells halve the image five times

Operation = Callable[[int, int], nn.Module]  # (channels, stride) -> a module that keeps the number of channels


def convolution(
    in_channels: int, out_channels: int, *, kernel: tuple[int, int] = (1, 1), stride: tuple[int, int] = (1, 1)
) -> nn.Sequential:
    """ReLU, convolution and batch norm; the ReLU is not in place, as several operations read one state."""
    padding = (kernel[0] // 2, kernel[1] // 2)
    return nn.Sequential(
        nn.ReLU(),
        nn.Conv2d(in_channels, out_channels, kernel, stride, padding, bias=False),
        nn.BatchNorm2d(out_channels),
    )


def none(channels: int, stride: int) -> nn.Module:
    """Identity; the two recipes use it only where the stride is 1."""
    return nn.Identity()


def average_3x3(channels: int, stride: int) -> nn.Module:
    """Average of 3x3 pixels, without those outside the image."""
    return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)


def max_2x2(channels: int, stride: int) -> nn.Module:
    """Maximum of 2x2 pixels."""
    return nn.MaxPool2d(2, stride)


def max_3x3(channels: int, stride: int) -> nn.Module:
    """Maximum of 3x3 pixels."""
    return nn.MaxPool2d(3, stride, padding=1)


def conv_1x1(channels: int, stride: int) -> nn.Module:
    """1x1 convolution."""
    return convolution(channels, channels, stride=(stride, stride))


def conv_3x3(channels: int, stride: int) -> nn.Module:
    """3x3 convolution on a quarter of the channels."""
    quarter = channels // 4
    return nn.Sequential(
        convolution(channels, quarter),
        convolution(quarter, quarter, kernel=(3, 3), stride=(stride, stride)),
        convolution(quarter, channels),
    )


def conv_1x7_7x1(channels: int, stride: int) -> nn.Module:
    """1x7, then 7x1 convolution on a quarter of the channels."""
    quarter = channels // 4
    return nn.Sequential(
        convolution(channels, quarter),
        convolution(quarter, quarter, kernel=(1, 7), stride=(1, stride)),
        convolution(quarter, quarter, kernel=(7, 1), stride=(stride, 1)),
        convolution(quarter, channels),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a cell computes. State 0 is the previous output, state 1 the one before; each sum is a new state.

    A term is (the state it reads, its operation); the output is the concatenation of the states in `outputs`.
    The stride applies to the operations that read states 0 and 1.
    """

    name: str
    stride: int
    sums: tuple[tuple[tuple[int, Operation], tuple[int, Operation]], ...]
    outputs: tuple[int, ...]


NORMAL = Recipe(
    name="normal",
    stride=1,
    sums=(
        ((1, conv_1x1), (1, max_3x3)),
        ((1, none), (0, conv_1x7_7x1)),
        ((0, conv_1x1), (0, conv_1x7_7x1)),
        ((2, max_3x3), (2, none)),
        ((1, average_3x3), (5, conv_1x1)),
    ),
    outputs=(0, 3, 4, 6),  # the printed paper has 4, 5, 6, which does not give the parameter counts of its Table 1
)
REDUCTION = Recipe(
    name="reduction",
    stride=2,
    sums=(
        ((0, max_2x2), (0, max_3x3)),
        ((2, none), (1, conv_3x3)),
        ((2, conv_1x7_7x1), (2, max_3x3)),
        ((3, none), (1, max_2x2)),
        ((2, average_3x3), (3, conv_1x1)),
    ),
    outputs=(4, 5, 6),
)


class FactorizedReduction(nn.Module):
    """Halves the image with two 1x1 convolutions, one on the even pixels and one on the odd ones."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(in_channels, out_channels // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(in_channels, out_channels // 2, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, in, height, width) -> (batch, out, height / 2, width / 2)."""
        x = F.relu(x)
        shifted = F.pad(x[:, :, 1:, 1:], (0, 1, 0, 1))
        out: Tensor = self.norm(torch.cat([self.even(x), self.odd(shifted)], dim=1))
        return out


class Cell(nn.Module):
    """One cell: brings the two outputs before it to `channels` channels and follows its recipe."""

    def __init__(
        self, recipe: Recipe, channels: int, *, previous_channels: int, before_channels: int, after_reduction: bool
    ) -> None:
        super().__init__()
        self.previous = convolution(previous_channels, channels)
        self.before: nn.Module = nn.Identity()
        if after_reduction:  # the one-before output is twice as large as the previous one
            self.before = FactorizedReduction(before_channels, channels)
        elif before_channels != channels:
            self.before = convolution(before_channels, channels)
        terms = [term for pair in recipe.sums for term in pair]
        self.operations = nn.ModuleList(
            operation(channels, recipe.stride if state < 2 else 1) for state, operation in terms
        )
        self.reads = [state for state, _ in terms]
        self.outputs = recipe.outputs

    def forward(self, value: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """(previous, the one before) -> (output, previous); the first cell takes the stem's tensor as both."""
        previous, before = value if isinstance(value, tuple) else (value, value)
        states = [self.previous(previous), self.before(before)]
        terms = zip(self.operations, self.reads, strict=True)
        for (left, i), (right, j) in zip(terms, terms, strict=True):  # one iterator twice: the terms two by two
            states.append(left(states[i]) + right(states[j]))
        return torch.cat([states[i] for i in self.outputs], dim=1), previous


class Classifier(nn.Module):
    """Average over the whole image (7x7 when image_size is 224), then a linear layer."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_channels, num_classes)

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        """(output, previous output) of the last cell -> logits (batch, classes)."""
        output, _ = value
        logits: Tensor = self.linear(output.mean(dim=(2, 3)))
        return logits


def model(num_layers: int = 3, num_filters: int = 32, num_classes: int = NUM_CLASSES) -> nn.Sequential:
    """AmoebaNet-D(num_layers, num_filters): images (batch, 3, height, width) -> logits (batch, classes)."""
    if num_layers < 3 or num_layers % 3:
        raise ValueError(f"num_layers must be a positive multiple of 3 (three equal groups of cells), not {num_layers}")
    if num_filters < 8 or num_filters % 8:
        raise ValueError(f"num_filters must be a positive multiple of 8 (cells use quarters of D/2), not {num_filters}")
    channels = previous = before = num_filters // 4
    stem = convolution(3, channels, kernel=(3, 3), stride=(2, 2))
    layers: OrderedDict[str, nn.Module] = OrderedDict(stem=stem)
    numbers: Counter[str] = Counter()
    after_reduction = False
    for recipe in [REDUCTION] + ([REDUCTION] + [NORMAL] * (num_layers // 3)) * 3:
        channels *= recipe.stride  # half the image, twice the channels
        numbers[recipe.name] += 1
        layers[f"{recipe.name}_{numbers[recipe.name]}"] = Cell(
            recipe, channels, previous_channels=previous, before_channels=before, after_reduction=after_reduction
        )
        before, previous = previous, channels * len(recipe.outputs)
        after_reduction = recipe is REDUCTION
    layers["classifier"] = Classifier(previous, num_classes)
    return nn.Sequential(layers)


def batches(
    batch_size: int, num_classes: int = NUM_CLASSES, image_size: int = IMAGE_SIZE, seed: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (images, classes): float32 (batch, 3, image_size, image_size) and int64 (batch,)."""
    if image_size < SHRINK or image_size % SHRINK:
        raise ValueError(f"image_size must be a positive multiple of {SHRINK} (five halvings), not {image_size}")
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


def optimizer(parameters: Iterable[nn.Parameter], lr: float = 3e-4) -> torch.optim.Optimizer:
    """RMSProp with momentum, as in the GPipe paper: weight, mean square and momentum are 12 bytes a parameter."""
    return torch.optim.RMSprop(parameters, lr=lr, momentum=0.9)
