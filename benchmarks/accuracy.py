"""Predicted against measured: every example on both engines, whatever came out.

    python benchmarks/accuracy.py                     some hours on 2 idle cores; writes reports/accuracy/
    python benchmarks/accuracy.py --rounds 1 --models unet resnet --microbatches 8
    python benchmarks/accuracy.py --rounds 1 --engines torch --schedules zb-h1 zb-v --output OTHER    other schedules

All examples x (gpipe, 1f1b) x M (4, 8, 16) x recompute (never, always), at K = 2 on two processes (torch engine) and at
K = 2, 4, 8 on one (virtual engine). A shared host's speed drifts within minutes, which no prediction can know, so
profiles and runs take turns: every few runs have a profile of their own, taken right before, and a setting's error is
the median over the rounds. Errors of the step are raw, and at equal host speed. Rows are written as they come; what
reports/accuracy/accuracy.csv has is not run again.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator
from itertools import groupby, product
from typing import Any

import pandas as pd
from host_speed import yardstick_of
from suite import Rows, error_text, example, markdown, median_and_worst, options_of, write_report

import gplan
from gplan.core import Plan, Profile, Run
from gplan.core.units import percent_text, seconds_text
from gplan.evaluate.compare import BUBBLE, STEP_TIME

MODELS = (
    "transformer_lm", "gpt2_hf", "bert_hf", "llama_hf", "t5_hf", "vit_hf", "resnet", "unet", "amoebanet_d", "transformer_l",
)  # fmt: skip
MICROBATCH_SIZE = 4
SETTING = ["model", "engine", "num_devices", "schedule", "num_microbatches", "recompute"]
KEY = [*SETTING, "round"]
ENGINES = ("torch", "virtual")


def main() -> None:
    """Run what is not there yet, then write the tables."""
    parser = options_of(__doc__, "accuracy")
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--microbatches", nargs="*", type=int, default=(4, 8, 16))
    parser.add_argument("--k", nargs="*", type=int, default=(2, 4, 8), help="devices of the virtual engine")
    parser.add_argument("--schedules", nargs="*", default=("gpipe", "1f1b"))
    parser.add_argument("--engines", nargs="*", default=ENGINES)
    parser.add_argument("--rounds", type=int, default=3, help="over everything")
    parser.add_argument("--steps", type=int, default=16, help="of a run at least")
    parser.add_argument("--seconds", type=float, default=15.0, help="of a run at least, by its prediction")
    options = parser.parse_args()
    rows = Rows(options.output / "accuracy.csv", KEY)
    for number, model in product(range(options.rounds), options.models):
        wanted = [x for x in settings(model, number, options) if not rows.has(x)]
        for _, few in groupby(wanted, key=lambda x: (x["num_microbatches"], x["recompute"])):
            profile = gplan.profile(example(model), microbatch_sizes=[MICROBATCH_SIZE])
            for setting in few:
                rows.add(measured(setting, profile, options))
    runs = rows.table().dropna(subset=["measured_step_s"])
    order = {"engine": ENGINES.index, "model": [*MODELS, *runs.model.unique()].index}
    runs = runs.sort_values(list(order), key=lambda column: column.map(order[column.name]), kind="stable")
    table = over_rounds(runs)
    write_report(options.output, report(table, runs.device.unique()))


def settings(model: str, number: int, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The grid of one model in one round; those of one M and way to recompute come next to each other."""
    places = [("torch", 2), *(("virtual", k) for k in options.k)]
    for num_microbatches, recompute, (engine, k), schedule in product(
        options.microbatches, ("never", "always"), places, options.schedules
    ):
        if engine in options.engines:
            yield dict(zip(KEY, (model, engine, k, schedule, num_microbatches, recompute, number), strict=True))


def measured(setting: dict[str, Any], profile: Profile, options: argparse.Namespace) -> dict[str, Any]:
    """What one run of the best plan gives; where there are fewer layers than stages, the setting alone."""
    if setting["num_devices"] > len(profile.layers):
        return setting
    asked = ("num_devices", "schedule", "num_microbatches", "recompute")
    plan = gplan.balance(profile, **{name: setting[name] for name in asked})
    num_steps = max(options.steps, math.ceil(options.seconds / plan.prediction.step_s))
    run = gplan.run(plan, profile=profile, engine=setting["engine"], num_steps=num_steps)
    row = {**setting, "num_steps": num_steps, **errors_of(run.plan, run)}
    print(*setting.values(), error_text(row["step_error"]), flush=True)
    return {**row, "device": profile.device.name, "created": run.created[:10], "torch": dict(run.versions)["torch"]}


def errors_of(plan: Plan, run: Run) -> dict[str, Any]:
    """The errors, each as a share of what was measured: positive where the prediction was too high."""
    comparison = gplan.compare(run)
    step, bubble = comparison.row(STEP_TIME), comparison.row(BUBBLE)
    peaks = zip(plan.device_peak_bytes, run.peak_bytes, strict=True)
    return {
        "predicted_step_s": step.predicted,
        "measured_step_s": step.measured,
        "step_error": step.error,
        "equal_speed_error": step.equal_speed_error,
        "bubble_points": 100 * (bubble.error or 0.0),
        "equal_speed_bubble_points": math.nan if bubble.equal_speed_error is None else 100 * bubble.equal_speed_error,
        "memory_error": max((predicted / found - 1 for predicted, found in peaks), key=abs),
        "num_counted": run.num_counted,
        "num_disturbed": run.num_disturbed,
        **yardstick_of(run),
    }


def over_rounds(rows: pd.DataFrame) -> pd.DataFrame:
    """One row a setting: medians over its rounds, and all steps counted."""
    named = {"device": "first", "created": "min", "torch": "first", "num_steps": "min"}
    ways = dict.fromkeys(rows.columns.difference([*KEY, *named]), "median") | named
    ways |= {"num_counted": "sum", "num_disturbed": "sum", "round": "count"}
    grouped = rows.groupby(SETTING, sort=False)
    return grouped.agg(ways).assign(most_steps=grouped.num_steps.max()).reset_index()


def report(table: pd.DataFrame, devices: Iterable[str]) -> list[str]:
    """The summary by engine and by model, and how it was measured."""
    refused = table.num_disturbed.sum() / (table.num_disturbed + table.num_counted).sum()
    dates = ", ".join(f"{engine} {x.max()}" for engine, x in table.groupby("engine", sort=False).created)
    return [
        "# How wrong the predictions are\n",
        f"Made by `python benchmarks/accuracy.py`: {len(table)} settings with {table['round'].sum()} runs of {table.num_steps.min():.0f} "
        f"to {table.most_steps.max():.0f} steps. "
        f"Micro-batches have {MICROBATCH_SIZE} samples, each process has one core, and nothing is calibrated. Every run is in "
        "accuracy.csv, whatever came out. Runs with the same M and recompute share a profile, taken right before them. A "
        f"setting's error is the median over its rounds. "
        f"{percent_text(refused)} of the steps were left out as disturbed. {' and '.join(devices)}; torch {table.torch[0]}; "
        f"made: {dates}.\n",
        "An error is predicted over measured, less 1. *At equal speed*: the prediction at the host's speed during the "
        "run, by the yardstick that profile and run read.\n",
        *summary(table, ["engine"]),
        "",
        *summary(table, ["engine", "model"]),
    ]


def summary(table: pd.DataFrame, by: list[str]) -> list[str]:
    """Medians and worst of each group."""
    shown = {
        "step_error": "step", "equal_speed_error": "at equal speed", "bubble_points": "bubble",
        "equal_speed_bubble_points": "at equal speed", "memory_error": "memory",
    }  # fmt: skip
    heads = [*by, "runs", *(x for words in shown.values() for x in (f"{words}: median", "worst")), "measured steps"]
    lines = []
    for names, part in table.groupby(by, sort=False):
        cells = [*map(str, names), str(part["round"].sum())]
        for name in shown:
            is_points = name.endswith("points")
            cells += median_and_worst(part[name] / 100 if is_points else part[name], points=is_points)
        steps = part.measured_step_s
        lines.append([*cells, f"{seconds_text(steps.min())} to {seconds_text(steps.max())}"])
    return markdown(heads, lines)


if __name__ == "__main__":
    main()
