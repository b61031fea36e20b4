"""How many products a core needs before they are at full speed, by the work that it did before.

    python benchmarks/warm_up.py                    4 minutes on one core; writes reports/host-speed/warm-up/

After a training pass of each model, and after a wait, the yardstick's compute is timed many times in a row.
A reading of the yardstick runs 14 products first; the table says how far one with fewer is off.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pandas as pd
import torch
from real_size import MODELS, ROOT

from gplan.core.units import percent_text, seconds_text
from profiler.host.host_info import keep_freed_memory, processor
from profiler.model.load import load_model_file
from profiler.timing.yardstick import PAGES, WARMUPS, yardstick_parts

EXAMPLES = ("transformer_lm", "gpt2_hf", "resnet", "unet", "amoebanet_d")
EXAMPLE_SIZE = 4  # samples; models of real size have one
NUM_WARMUPS = WARMUPS["compute"]
NUM_PRODUCTS = 2 * NUM_WARMUPS
SHOWN = (0, 4, 8, NUM_WARMUPS)
WAIT, WAIT_S = "wait of 30 ms", 0.03


def main() -> None:
    """Measure, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=[*EXAMPLES, *MODELS], default=[*EXAMPLES, *MODELS])
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--output", type=Path, default=ROOT / "reports" / "host-speed" / "warm-up")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    works = [*options.models, WAIT]
    rows = pd.DataFrame([row for name in works for row in measured(name, options.turns)])
    options.output.mkdir(parents=True, exist_ok=True)
    rows.to_csv(options.output / "rows.csv", index=False)
    (options.output / "README.md").write_text(as_text(rows))
    print((options.output / "README.md").read_text())


def measured(name: str, num_turns: int) -> list[dict[str, object]]:
    """The seconds of each product after the work, in every turn."""
    work, parts = work_of(name), yardstick_parts()
    (touch, _), (multiply, _) = parts[PAGES], parts["compute"]
    work()
    rows = list[dict[str, object]]()
    for turn in range(num_turns):
        work()
        touch()
        for number in range(NUM_PRODUCTS):
            begin_s = time.perf_counter()
            multiply()
            rows.append({"work": name, "turn": turn, "number": number, "seconds": time.perf_counter() - begin_s})
    print(name, flush=True)
    return rows


def work_of(name: str) -> Callable[[], object]:
    """A training pass of a model, or a wait."""
    if name == WAIT:
        return partial(time.sleep, WAIT_S)
    path, settings = MODELS.get(name, (f"examples/{name}.py", {}))
    file = load_model_file(str(ROOT / path), settings=settings)
    inputs, target = next(file.batches(1 if name in MODELS else EXAMPLE_SIZE))
    return lambda: file.loss(file.forward(inputs), target).backward()  # type: ignore[no-untyped-call]


def as_text(rows: pd.DataFrame) -> str:
    """How long products take by their number, over what those after `NUM_WARMUPS` take."""
    lines = [
        "# How many products a core needs before they are at full speed\n",
        f"Made by `python benchmarks/warm_up.py` on {processor()}, torch {torch.__version__}: medians over "
        f"{rows.turn.nunique()} turns. A product is the yardstick's compute. Full speed is the median of those after "
        f"{NUM_WARMUPS}, which a reading of the yardstick runs first.\n",
        f"| after | at full speed | {' | '.join(f'after {x} products' for x in SHOWN)} |",
        f"|---|---|{'---|' * len(SHOWN)}",
    ]
    for name, part in rows.groupby("work", sort=False):
        full_s = part[part.number >= NUM_WARMUPS].seconds.median()
        by_number = part.groupby("number").seconds.median()
        cells = [seconds_text(full_s), *(percent_text(by_number[x] / full_s - 1, signed=True) for x in SHOWN)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
