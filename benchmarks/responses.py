"""How much kinds of layers are slowed when the yardstick is: the exponent of each kind, on a shared host.

    python benchmarks/responses.py                  9 minutes on one core; writes reports/host-speed/responses/

Layers and small models (forward and backward) and the yardstick take turns. Their mean times in windows of 30 s are
compared, in logarithms: the response is the slope over the yardstick's slowdown. The noise of the yardstick makes it some
per cent too small; on a host whose speed does not change it is nothing but noise. Other weights of the yardstick's parts
are compared by how far the layers are from their slowdown, also with a Python loop as the interpreter's part.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import fmean

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from gplan.core.host_speed import PASS_WEIGHTS, PartWeights, slowdown_of
from gplan.core.units import seconds_text
from profiler.host.host_info import keep_freed_memory, processor
from profiler.timing.yardstick import PARTS, WARMUPS, yardstick_parts

ROOT = Path(__file__).parent.parent
CACHED = tuple(range(8)) * 300  # integers up to 256, which Python keeps


def transformer(width: int, *, depth: int) -> nn.Module:
    """Blocks of attention and an MLP without dropout."""
    return nn.Sequential(
        *(
            nn.TransformerEncoderLayer(width, width // 32, 4 * width, 0.0, "gelu", batch_first=True)
            for _ in range(depth)
        )
    )


def convolutions(channels: int, *, depth: int) -> nn.Module:
    """Convolutions of 3 x 3 with batch norm and ReLU."""
    return nn.Sequential(
        *(
            nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())
            for _ in range(depth)
        )
    )


LAYERS: Mapping[str, tuple[nn.Module, tuple[int, ...]]] = {
    "convolution 3 x 3, 64 channels, 56 x 56": (nn.Conv2d(64, 64, 3, padding=1), (1, 64, 56, 56)),
    "convolution 1 x 1, 256 to 64 channels, 56 x 56": (nn.Conv2d(256, 64, 1), (1, 256, 56, 56)),
    "batch norm, 64 channels, 112 x 112": (nn.BatchNorm2d(64), (1, 64, 112, 112)),
    "linear 768 to 3072, 128 tokens": (nn.Linear(768, 3072), (128, 768)),
    "GELU, 512 tokens of 3072": (nn.GELU(), (512, 3072)),
    "layer norm, 512 tokens of 768": (nn.LayerNorm(768), (512, 768)),
    "attention, 12 heads, 128 tokens": (nn.MultiheadAttention(768, 12, batch_first=True), (1, 128, 768)),
    "2 transformer blocks 384 wide, 4 x 128 tokens": (transformer(384, depth=2), (4, 128, 384)),
    "4 transformer blocks 128 wide, 4 x 64 tokens": (transformer(128, depth=4), (4, 64, 128)),
    "4 convolutions with batch norm, 32 channels, 4 x 32 x 32": (convolutions(32, depth=4), (4, 32, 32, 32)),
}
LOOP = "loop"
EACH_A_THIRD, WITHOUT_INTERPRETER = "each part a third", "compute and memory"
WITH_LOOP = (*PARTS[:2], LOOP)
RULES: Mapping[str, tuple[tuple[str, ...], PartWeights]] = {
    EACH_A_THIRD: (PARTS, PASS_WEIGHTS),
    "compute alone": (PARTS, (1.0, 0.0, 0.0)),
    WITHOUT_INTERPRETER: (PARTS, (1 / 2, 1 / 2, 0.0)),
    "compute and interpreter": (PARTS, (1 / 2, 0.0, 1 / 2)),
    "compute twice, memory, interpreter": (PARTS, (1 / 2, 1 / 4, 1 / 4)),
    "compute, memory, loop": (WITH_LOOP, PASS_WEIGHTS),
    "compute and loop": (WITH_LOOP, (1 / 2, 0.0, 1 / 2)),
    "compute four times, loop": (WITH_LOOP, (4 / 5, 0.0, 1 / 5)),
}
LEAST_WINDOWS = 3


def main() -> None:
    """Measure, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--window", type=float, default=30.0, metavar="SECONDS", help="that a mean is taken over")
    parser.add_argument("--output", type=Path, default=ROOT / "reports" / "host-speed" / "responses")
    options = parser.parse_args()
    if options.seconds < LEAST_WINDOWS * options.window:
        parser.error(f"expected --seconds of at least {LEAST_WINDOWS} times --window")
    torch.set_num_threads(1)
    keep_freed_memory()
    rows = measured(options.seconds)
    options.output.mkdir(parents=True, exist_ok=True)
    rows.to_csv(options.output / "rows.csv", index=False)
    (options.output / "README.md").write_text(as_text(rows, options.window))
    print((options.output / "README.md").read_text())


def measured(seconds: float) -> pd.DataFrame:
    """The seconds of every kind of work in each turn, and since when."""
    torch.manual_seed(0)
    work: dict[str, Callable[[], object]] = {name: training_pass(*layer) for name, layer in LAYERS.items()}
    parts = yardstick_parts()
    for name in PARTS:
        work[name] = partial(repeat, *parts[name])
    work[LOOP] = loop
    rows, start_s = [], time.monotonic()
    while (at_s := time.monotonic() - start_s) < seconds:
        row = {"at_s": at_s}
        for name, run in work.items():
            for _ in range(WARMUPS.get(name, 1)):
                run()
            begin_s = time.perf_counter()
            run()
            row[name] = time.perf_counter() - begin_s
        rows.append(row)
    return pd.DataFrame(rows)


def loop() -> None:
    """Python alone."""
    number = 0
    for i in CACHED:
        number = (number + i) & 127


def repeat(work: Callable[[], object], count: int) -> None:
    """Do it this many times."""
    for _ in range(count):
        work()


def training_pass(layer: nn.Module, shape: tuple[int, ...]) -> Callable[[], object]:
    """Forward and backward of the layer."""
    inputs = torch.randn(shape, requires_grad=True)

    def run() -> None:
        found = layer(inputs, inputs, inputs)[0] if isinstance(layer, nn.MultiheadAttention) else layer(inputs)
        output: Tensor = found
        output.backward(torch.ones_like(output))  # type: ignore[no-untyped-call]
        for x in (inputs, *layer.parameters()):
            x.grad = None

    return run


def as_text(rows: pd.DataFrame, window_s: float) -> str:
    """The response of each kind, and how far the windows are from it."""
    means = rows.groupby((rows.at_s // window_s).astype(int)).mean().drop(columns="at_s")
    logs = np.log(means / means.mean())
    yardsticks = [by_rule(means, *RULES[name]) for name in (EACH_A_THIRD, WITHOUT_INTERPRETER)]
    lines = [
        "# How much layers are slowed when the yardstick is\n",
        f"Made by `python benchmarks/responses.py` on {processor()}, torch {torch.__version__}: {len(means)} windows of "
        f"{window_s:g} s, with {len(rows)} turns in all. The response is the slope of log(time) over log(slowdown) by the "
        f"yardstick, whose standard deviation over the windows is {100 * yardsticks[0].std():.1f} % if each part counts a "
        "third. The share of a layer's variance that it explains is in brackets.\n",
        f"| forward and backward | mean | standard deviation of windows | response to {EACH_A_THIRD} | to {WITHOUT_INTERPRETER} |",
        "|---|---|---|---|---|",
    ]
    for name in LAYERS:
        layer = logs[name] - logs[name].mean()
        cells = [seconds_text(means[name].mean()), f"{100 * layer.std():.1f} %"]
        for yardstick in yardsticks:
            response = float(layer @ yardstick / (yardstick @ yardstick))
            explained = 1 - fmean((layer - response * yardstick) ** 2) / fmean(layer**2)
            cells.append(f"{response:.2f} ({100 * explained:.0f} %)")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += [
        "\nHow far the layers are from the slowdown by other weights of the parts, in the same windows and at a response of 1. "
        "The loop is Python alone; the interpreter's part is a forward and backward of a tiny model.\n",
        "| slowdown by | root mean square over layers and windows | responses |",
        "|---|---|---|",
    ]
    layers = logs[list(LAYERS)] - logs[list(LAYERS)].mean()
    for rule, of in RULES.items():
        slowdown = by_rule(means, *of)
        far = float(np.sqrt((layers.sub(slowdown, axis=0) ** 2).to_numpy().mean()))
        responses = layers.mul(slowdown, axis=0).sum() / (slowdown @ slowdown)
        lines.append(f"| {rule} | {100 * far:.1f} % | {responses.min():.2f} to {responses.max():.2f} |")
    return "\n".join([*lines, ""])


def by_rule(means: pd.DataFrame, parts: tuple[str, ...], weights: PartWeights) -> pd.Series:
    """The logarithm of the slowdown in each window, less its mean."""
    found = np.log(slowdown_of(np.array([means[x] / means[x].mean() for x in parts]), weights))
    return pd.Series(found - found.mean(), index=means.index)


if __name__ == "__main__":
    main()
