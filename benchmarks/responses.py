"""How much kinds of layers are slowed when the yardstick is: the exponent of each kind, on a shared host.

    python benchmarks/responses.py                  3 minutes on one core; writes reports/host-speed/responses/

Layers (forward and backward) and the yardstick take turns. Their mean times in windows of 10 s are compared, in
logarithms: the response is the slope over the yardstick's slowdown. The noise of the yardstick makes it some per cent too
small; on a host whose speed does not change it is nothing but noise.
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

from gplan.core.host_speed import slowdown_of
from gplan.core.units import seconds_text
from profiler.host.host_info import keep_freed_memory, processor
from profiler.timing.yardstick import NUM_WARMUPS, PARTS, yardstick_parts

ROOT = Path(__file__).parent.parent
LAYERS: Mapping[str, tuple[nn.Module, tuple[int, ...]]] = {
    "convolution 3 x 3, 64 channels, 56 x 56": (nn.Conv2d(64, 64, 3, padding=1), (1, 64, 56, 56)),
    "convolution 1 x 1, 256 to 64 channels, 56 x 56": (nn.Conv2d(256, 64, 1), (1, 256, 56, 56)),
    "batch norm, 64 channels, 112 x 112": (nn.BatchNorm2d(64), (1, 64, 112, 112)),
    "linear 768 to 3072, 128 tokens": (nn.Linear(768, 3072), (128, 768)),
    "GELU, 512 tokens of 3072": (nn.GELU(), (512, 3072)),
    "layer norm, 512 tokens of 768": (nn.LayerNorm(768), (512, 768)),
    "attention, 12 heads, 128 tokens": (nn.MultiheadAttention(768, 12, batch_first=True), (1, 128, 768)),
}
LEAST_WINDOWS = 3


def main() -> None:
    """Measure, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--window", type=float, default=10.0, metavar="SECONDS", help="that a mean is taken over")
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
    rows, start_s = [], time.monotonic()
    while (at_s := time.monotonic() - start_s) < seconds:
        row = {"at_s": at_s}
        for name, run in work.items():
            for _ in range(NUM_WARMUPS if name == "compute" else 1):
                run()
            begin_s = time.perf_counter()
            run()
            row[name] = time.perf_counter() - begin_s
        rows.append(row)
    return pd.DataFrame(rows)


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
    yardstick = np.log(slowdown_of(np.array([means[x] / means[x].mean() for x in PARTS])))
    yardstick -= yardstick.mean()
    lines = [
        "# How much layers are slowed when the yardstick is\n",
        f"Made by `python benchmarks/responses.py` on {processor()}, torch {torch.__version__}: {len(means)} windows of "
        f"{window_s:g} s, with {len(rows)} turns in all. The response is the slope of log(time) over log(slowdown) by the "
        f"yardstick, whose standard deviation over the windows is {100 * yardstick.std():.1f} %. The last column is the share "
        "of a layer's variance that it explains.\n",
        "| forward and backward | mean | standard deviation of windows | response | explained |",
        "|---|---|---|---|---|",
    ]
    for name in LAYERS:
        layer = logs[name] - logs[name].mean()
        response = float(layer @ yardstick / (yardstick @ yardstick))
        explained = 1 - fmean((layer - response * yardstick) ** 2) / fmean(layer**2)
        cells = (
            seconds_text(means[name].mean()),
            f"{100 * layer.std():.1f} %",
            f"{response:.2f}",
            f"{100 * explained:.0f} %",
        )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
