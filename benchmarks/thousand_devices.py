"""Thousands of devices on paper: how to train a model on N h100, and how long the search for it takes.

    python benchmarks/thousand_devices.py                     at most 17 minutes on 2 idle cores: 15 searches
    python benchmarks/thousand_devices.py --table             the tables of what is there, without running

A row is written after each search; a search that has a row is not run again (--again runs it again).

Searched are stages x replicas x what replicas divide x micro-batches x schedule x recompute for as many samples of 4096
tokens as there are devices, 80 GB each, in mixed precision (bf16 with float32 gradients, master weights and AdamW). Hosts
have eight devices; every link is taken as one between hosts, 50 GB/s a device (400 Gbit/s). The profiles are those of
benchmarks/large_model_configs.py, computed without weights. A search is a process of its own, which is
complete or stopped at the limit of seconds by the clock; what other work on the host took of that is seen beside its
processor seconds. The first search of a model makes its profile, which takes some seconds more.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
from large_models import make_profile, planned, setting_cells, told
from suite import Rows, markdown, options_of, write_report

from gplan.core.units import bytes_text, percent_text, seconds_text
from gplan.reporting.text.plan import alternative_text

SHOWN = ("llama3-405b", 1024)
"""The search whose frontier the report shows."""

SIZES = {
    "llama3-405b": (1024, 512, 2048, 4096, 8192, 16384),
    "llama3-8b": (8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384),
}
OPTIONS = ("--microbatches", "auto", "--schedule", "auto", "--recompute", "auto", "--shard", "auto")
PARTS = ("weight", "gradient", "optimizer", "activation", "workspace")


def main() -> None:
    """Run what is not there yet, then write the tables."""
    parser = options_of(__doc__, "thousand-devices")
    parser.add_argument("--table", action="store_true", help="write the tables only")
    parser.add_argument("--limit", type=int, default=60, metavar="SECONDS",
                        help="of a search, by the clock (default: 60); more where other work runs beside it")  # fmt: skip
    parser.add_argument("--again", action="store_true", help="search again what has a row")
    parser.add_argument("--models", nargs="*", choices=SIZES, default=list(SIZES))
    parser.add_argument("--devices", nargs="*", type=int, help="only these numbers")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    rows = Rows(options.output / "rows.csv", ("model", "devices"))
    for model in () if options.table else options.models:
        for num_devices in options.devices or SIZES[model]:
            if options.again or not rows.has({"model": model, "devices": num_devices}):
                rows.add(told(searched(model, num_devices, options)), replace=True)
    place = options.output / "frontier.csv"
    frontier = pd.read_csv(place, keep_default_na=False) if place.exists() else pd.DataFrame()
    table = rows.table(keep_default_na=False)
    write_report(options.output, report(table, frontier))


def searched(model: str, num_devices: int, options: argparse.Namespace) -> dict[str, Any]:
    """The row of a search; writes the frontier of the one that is shown."""
    path: Path = options.output / f"{model}.profile.json"
    if not path.exists():
        make_profile(model, path, "--precision", "mixed", "--link", "50GB/s,10us")
    given = ("--devices", str(num_devices), "--batch-size", str(num_devices), "--memory", "80GB")
    row, plan = planned(path, (*given, *OPTIONS, "--time-limit", str(options.limit)))
    row = {"model": model, "devices": num_devices, "limit_s": options.limit, **row}
    if plan is None:
        return row
    if (model, num_devices) == SHOWN:
        found = pd.DataFrame([{"setting": alternative_text(x), **asdict(x)} for x in plan.frontier])
        found.to_csv(options.output / "frontier.csv", index=False)
    fullest = max(plan.stages, key=lambda x: x.memory.peak_bytes)
    return {
        **row,
        "solve_s": round(plan.proof.solve_s, 2),
        "devices_of_a_replica": plan.num_devices,
        "sharding": plan.sharding,
        **{x: getattr(fullest.memory, f"{x}_bytes") for x in PARTS},
        "gathered": fullest.gathered_bytes,
    }


def report(rows: pd.DataFrame, frontier: pd.DataFrame) -> list[str]:
    """All searches, and the frontier of one."""
    model, num_devices = SHOWN
    heads = ["model", "devices", "stages x replicas, micro-batches", "schedule", "recompute", "shard", "step", "bubble"]
    heads += ["peak", "weights, gradients, state, activations, workspace", "gap", "search", "limit", "left"]
    points = (
        [x.setting, seconds_text(float(x.step_s)), percent_text(float(x.bubble)), bytes_text(int(x.peak_bytes))]
        for x in frontier.itertuples()
    )
    return [
        "# A thousand devices on paper\n",
        "Made by `python benchmarks/thousand_devices.py`, whose docstring has the conditions; every figure is in [rows.csv](rows.csv), "
        "the frontier in [frontier.csv](frontier.csv). A search was complete, or stopped at a limit by the clock; seconds are by the clock, in "
        "brackets those of the processor, start of the process included: where other work ran beside it, they are fewer. The gap is over all settings. One replica is `stages` on as many devices unless the schedule has "
        "several on each. K is at most the number of layers, so the number of settings stops growing with the devices. "
        "Llama-3 405B keeps large gaps: bounds of settings with several stages a device are loose within this memory, so a "
        "faster plan may exist. `gplan layout`, which has tensor widths too, [proves it within 1.6 %](../machine-layouts/README.md).\n",
        *markdown(heads, (_cells(row) for row in rows.sort_values(["model", "devices"]).itertuples())),
        f"\n## {model} on {num_devices:,} devices: less memory, longer steps\n",
        *markdown(["setting", "step", "bubble", "peak"], points),
    ]


def _cells(row: Any) -> list[object]:
    taken, limit = f"{float(row.processor_s):.0f} s", f"{row.limit_s} s"
    if row.outcome != "plan":
        return [row.model, row.devices, row.outcome, *[""] * 8, f"({taken})", limit, ""]
    return [
        row.model, row.devices, *setting_cells(row), row.sharding, seconds_text(float(row.step_s)),
        percent_text(float(row.bubble)), bytes_text(int(float(row.peak_bytes))),
        ", ".join(bytes_text(int(float(getattr(row, x)))) for x in PARTS), percent_text(float(row.gap)),
        f"{float(row.solve_s):.0f} s ({taken})", limit, row.note,
    ]  # fmt: skip


if __name__ == "__main__":
    main()
