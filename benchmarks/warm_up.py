"""How often a part of the yardstick must run before it is at full speed, by the work that the core did before.

    python benchmarks/warm_up.py                    4 minutes on one core; writes reports/host-speed/warm-up/

After a training pass of each model, and after a wait, each part of the yardstick is timed many times in a row, in the
order of a reading. A reading runs each part some times first; the tables say how far one with fewer is off.
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
from profiler.timing.yardstick import PAGES, PARTS, WARMUPS, yardstick_parts

EXAMPLES = ("transformer_lm", "gpt2_hf", "resnet", "unet", "amoebanet_d")
EXAMPLE_SIZE = 4  # samples; models of real size have one
NUM_AT_FULL_SPEED = 8
SHOWN = {"compute": (0, 4, 8), "memory": (0, 1), "interpreter": (0, 1, 2, 4)}  # and after what a reading runs first
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
    """The seconds of each repetition of each part after the work, in every turn."""
    work, parts, first = work_of(name), yardstick_parts(), num_first()
    touch, _ = parts[PAGES]
    work()
    rows = list[dict[str, object]]()
    for turn in range(num_turns):
        work()
        touch()
        for part in PARTS:
            run, _ = parts[part]
            for number in range(first[part] + NUM_AT_FULL_SPEED):
                begin_s = time.perf_counter()
                run()
                seconds = time.perf_counter() - begin_s
                rows.append({"work": name, "turn": turn, "part": part, "number": number, "seconds": seconds})
    print(name, flush=True)
    return rows


def num_first() -> dict[str, int]:
    """By part, how many repetitions a reading runs before it times some."""
    return {name: WARMUPS[name] * count for name, (_, count) in yardstick_parts().items() if name in WARMUPS}


def work_of(name: str) -> Callable[[], object]:
    """A training pass of a model, or a wait."""
    if name == WAIT:
        return partial(time.sleep, WAIT_S)
    path, settings = MODELS.get(name, (f"examples/{name}.py", {}))
    file = load_model_file(str(ROOT / path), settings=settings)
    inputs, target = next(file.batches(1 if name in MODELS else EXAMPLE_SIZE))
    return lambda: file.loss(file.forward(inputs), target).backward()  # type: ignore[no-untyped-call]


def as_text(rows: pd.DataFrame) -> str:
    """How long each part takes by its number, over what those after the warm-up of a reading take."""
    lines = [
        "# How often a part of the yardstick must run before it is at full speed\n",
        f"Made by `python benchmarks/warm_up.py` on {processor()}, torch {torch.__version__}: medians over "
        f"{rows.turn.nunique()} turns. Full speed is the median after as many repetitions as a reading of the "
        "yardstick runs first.",
    ]
    num_by_part = num_first()
    for part, of_part in rows.groupby("part", sort=False):
        first = num_by_part[str(part)]
        shown = (*SHOWN[str(part)], first)
        lines += [
            f"\n## {str(part).capitalize()}: a reading runs {first} first\n",
            f"| after | at full speed | {' | '.join(f'after {x}' for x in shown)} |",
            f"|---|---|{'---|' * len(shown)}",
        ]
        for name, found in of_part.groupby("work", sort=False):
            full_s = found[found.number >= first].seconds.median()
            by_number = found.groupby("number").seconds.median()
            cells = [seconds_text(full_s), *(percent_text(by_number[x] / full_s - 1, signed=True) for x in shown)]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
