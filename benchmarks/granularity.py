"""What dividing large layers gains: the step of plans from profiles of each granularity, for hierarchical models.

    python benchmarks/granularity.py            tables into reports/granularity, about ten minutes
    python benchmarks/granularity.py unet       only these models, printed

The models are Swin-S, ConvNeXt-B, SegFormer-B2, ResNet-50 and UPerNet on a Swin-T backbone as transformers builds them, and a U-Net of 94
million parameters by nesting; their weights are random and not built. Seconds are computed for one CPU core, so that the
comparison repeats exactly. The aim: at most 80 layers, and steps within 2 % of cuts between operations.
This file is also the model file that it profiles: `gplan profile benchmarks/granularity.py --set kind=swin`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

NUM_DEVICES = (2, 4, 8)
GRANULARITIES = ("layer", "auto", "op")
_IMAGE = 224


class Convolutions(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(given, made, 3, padding=1), nn.Conv2d(made, made, 3, padding=1)
        self.norm, self.shortcut = nn.GroupNorm(8, made), nn.Conv2d(given, made, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.norm(self.first(x)))) + self.shortcut(x)


class Level(nn.Module):
    """A level of a U-Net around the levels below it."""

    def __init__(self, given: int, channels: int, inner: nn.Module, inner_channels: int) -> None:
        super().__init__()
        self.down, self.pool = Convolutions(given, channels), nn.Conv2d(channels, channels, 2, 2)
        self.inner, self.grow = inner, nn.ConvTranspose2d(inner_channels, channels, 2, 2)
        self.up = Convolutions(2 * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(x)
        return self.up(torch.cat([x, self.grow(self.inner(self.pool(x)))], 1))


def unet() -> nn.Module:
    """A U-Net of 94 million parameters, built by nesting."""
    channels = (64, 128, 256, 512)
    net: nn.Module = nn.Sequential(*(Convolutions(512 if i == 0 else 1536, 1536) for i in range(2)))
    inner = 1536
    for level in reversed(range(len(channels))):
        net = Level(channels[max(level - 1, 0)], channels[level], net, inner)
        inner = channels[level]
    return nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), net, nn.Conv2d(64, 4, 1))


KINDS = ("swin", "convnext", "segformer", "resnet", "unet", "upernet")


def model(kind: str = "swin") -> nn.Module:
    """One of the models, with random weights."""
    import transformers as hf

    match kind:
        case "swin":
            config = hf.SwinConfig(depths=[2, 2, 18, 2], num_heads=[3, 6, 12, 24], drop_path_rate=0.0)
            return hf.SwinForImageClassification(config)
        case "convnext":
            sizes = [128, 256, 512, 1024]
            return hf.ConvNextForImageClassification(hf.ConvNextConfig(depths=[3, 3, 27, 3], hidden_sizes=sizes))
        case "segformer":
            sizes = {"hidden_sizes": [64, 128, 320, 512], "decoder_hidden_size": 768}
            config = hf.SegformerConfig(depths=[3, 4, 6, 3], drop_path_rate=0.0, classifier_dropout_prob=0.0, **sizes)
            return hf.SegformerForSemanticSegmentation(config)
        case "resnet":
            return hf.ResNetForImageClassification(hf.ResNetConfig())
        case "upernet":
            backbone = hf.SwinConfig(out_features=["stage1", "stage2", "stage3", "stage4"], drop_path_rate=0.0)
            return hf.UperNetForSemanticSegmentation(hf.UperNetConfig(backbone_config=backbone))
    return unet()


def example_inputs(batch_size: int, image: int = _IMAGE) -> Tensor:
    return torch.randn(batch_size, 3, image, image)


def batches(batch_size: int, image: int = _IMAGE) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    while True:
        yield torch.randn(batch_size, 3, image, image, generator=generator), torch.zeros(batch_size)


def loss(output: Any, _target: Tensor) -> Tensor:
    values = getattr(output, "logits", output)
    return (values * torch.linspace(0.5, 1.5, values[0].numel()).view_as(values[0])).mean()


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


def rows_of(kind: str) -> Iterator[list[object]]:
    """A row of the table for each number of devices."""
    import gplan

    given: dict[str, Any] = {"settings": {"kind": kind}, "device": "meta", "hardware": "cpu", "microbatch_sizes": [4]}
    profiles = {x: gplan.profile(__file__, granularity=x, **given) for x in GRANULARITIES}
    counts: list[object] = [len(x.layers) for x in profiles.values()]
    for num_devices in NUM_DEVICES:
        found = []
        for profile in profiles.values():
            setting = {"num_devices": num_devices, "num_microbatches": 2 * num_devices, "schedule": "1f1b"}
            is_possible = len(profile.layers) >= num_devices
            found.append(gplan.balance(profile, time_limit_s=20, **setting).prediction if is_possible else None)
        bubbles = [x and percent_text(x.bubble) for x in found]
        over = [x and percent_text(x.step_s / found[-1].step_s - 1, signed=True) for x in found[:-1]]
        yield [kind, num_devices, *counts, *bubbles, *over]


def main(kinds: list[str]) -> int:
    """Print the table of some models; of all, also write the report."""
    rows = []
    for kind in kinds or KINDS:
        for row in rows_of(kind):
            rows.append(row)
            print(*row, sep="  ", flush=True)
    heads = ["model", "K", *(f"layers: {x}" for x in GRANULARITIES), *(f"bubble: {x}" for x in GRANULARITIES)]
    lines = [
        "# Dividing large layers",
        "",
        "Made by `python benchmarks/granularity.py`: 1F1B, micro-batches of 4 and twice as many as devices; seconds computed",
        'for one CPU core. "Over op" is how much longer a step is than with cuts between operations.',
        "",
        *markdown([*heads, "layer over op", "auto over op"], rows),
    ]
    if not kinds:
        write_report(REPORTS / "granularity", lines)
    return 0


if __name__ == "__main__":
    from suite import REPORTS, markdown, write_report

    from gplan.core.units import percent_text

    sys.exit(main(sys.argv[1:]))
