"""Thousands of devices on paper: how to train a model on N h100, and how long the search for it takes.

    python benchmarks/thousand_devices.py                     some 20 minutes; goes on where it stopped
    python benchmarks/thousand_devices.py --table             the tables and the chart of what is there, without running

Searched are stages x replicas x what replicas divide x micro-batches x schedule x recompute for as many samples of 4096
tokens as there are devices, 80 GB each, in mixed precision (bf16 with float32 gradients, master weights and AdamW). Hosts
have eight devices; every link is taken as one between hosts, 50 GB/s a device (400 Gbit/s). The profiles are those of
benchmarks/large_model_configs.py, computed without weights. Stages receive just in time, as torch after 2.13 does: up to
2.13 its receive buffers of all micro-batches alone would fill a device. A search is a process of its own, with a time limit by the
clock; its processor seconds are told, as other work on the host lengthens the rest.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from benchmarks.large_models import MODEL_FILE, ROOT, is_there, run
from gplan.core import Plan, Profile
from gplan.core.units import bytes_text, percent_text, seconds_text
from gplan.files import json_files
from gplan.reporting.text.plan import alternative_text
from gplan.schedules.registry import schedule_info

SHOWN = ("llama3-405b", 1024)
"""The search whose frontier is told."""

SIZES = {
    "llama3-405b": (1024, 512, 2048, 4096, 8192, 16384),
    "llama3-8b": (8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384),
}
OPTIONS = ("--microbatches", "auto", "--schedule", "auto", "--recompute", "auto", "--shard", "auto")


def main() -> None:
    """Run what is not there yet, then write tables and chart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="write tables and chart only")
    parser.add_argument(
        "--limit",
        type=int,
        default=60,
        metavar="SECONDS",
        help="for a search, by the clock; more where other work runs beside it",
    )
    parser.add_argument("--models", nargs="*", choices=SIZES, default=list(SIZES))
    parser.add_argument("--devices", nargs="*", type=int, help="only these numbers")
    parser.add_argument("--output", type=Path, default=ROOT / "reports" / "thousand-devices")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "rows.csv"
    rows = pd.read_csv(path, keep_default_na=False) if path.exists() else pd.DataFrame()
    for row in () if options.table else missing_rows(rows, options):
        print(", ".join(f"{key} {value}" for key, value in row.items() if value != ""), flush=True)
        rows = pd.concat([rows.astype(object), pd.DataFrame([row], dtype=object)], ignore_index=True).fillna("")
        rows.to_csv(path, index=False)
    rows = pd.read_csv(path, keep_default_na=False)
    frontier = pd.read_csv(options.output / "frontier.csv", keep_default_na=False)
    growth_chart(rows).savefig(options.output / "growth.png", dpi=120)
    (options.output / "README.md").write_text(as_text(rows, frontier))


def missing_rows(rows: pd.DataFrame, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The searches that are not there yet."""
    for model in options.models:
        profile = options.output / f"{model}.profile.json"
        for num_devices in options.devices or SIZES[model]:
            key = {"model": model, "devices": str(num_devices)}
            if not is_there(rows, key):
                if not profile.exists():
                    make_profile(model, profile)
                yield {**key, "limit_s": options.limit, **searched(model, num_devices, profile, limit_s=options.limit)}


def make_profile(model: str, path: Path) -> None:
    """Write a profile for the h100 between hosts, with the rules of a torch that receives just in time."""
    settings = ("--set", f"name={model}", "--microbatch-size", "1", "--device", "meta", "--hardware", "h100")
    ended = run(
        ("profile", str(MODEL_FILE), *settings, "--precision", "mixed", "--link", "50GB/s,10us", "--output", str(path))
    )
    if ended.code:
        raise SystemExit(ended.errors)
    json_files.save(replace(json_files.load(Profile, path), versions=(("torch", "2.14.0"),)), path)


def searched(model: str, num_devices: int, profile: Path, *, limit_s: int) -> dict[str, Any]:
    """The row of a search; writes the frontier of the one that is shown."""
    path = profile.with_name(f"{model}.plan.json")
    given = ("--devices", str(num_devices), "--batch-size", str(num_devices), "--memory", "80GB")
    limit = ("--time-limit", str(limit_s), "--output", str(path))
    ended = run(("balance", str(profile), *given, *OPTIONS, *limit))
    figures = {"processor_s": round(ended.processor_s, 2), "process_bytes": ended.peak_bytes}
    if ended.code:
        return {**figures, "outcome": ended.errors}
    plan = json_files.load(Plan, path)
    path.unlink()
    if (model, num_devices) == SHOWN:
        found = pd.DataFrame([{"setting": alternative_text(x), **asdict(x)} for x in plan.frontier])
        found.to_csv(profile.with_name("frontier.csv"), index=False)
    fullest = max(plan.stages, key=lambda x: x.memory.peak_bytes)
    parts = {
        x: getattr(fullest.memory, f"{x}_bytes") for x in ("weight", "gradient", "optimizer", "activation", "workspace")
    }
    return {
        **figures,
        "outcome": "plan",
        "solve_s": round(plan.proof.solve_s, 2),
        "stages": plan.num_stages,
        "devices_of_a_replica": plan.num_devices,
        "replicas": plan.num_replicas,
        "sharding": plan.sharding,
        "microbatches": plan.num_microbatches,
        "schedule": plan.schedule,
        "recompute": plan.recompute,
        "step_s": plan.prediction.step_s,
        "bubble": plan.prediction.bubble,
        "gap": plan.proof.gap,
        "peak_bytes": plan.peak_bytes,
        **parts,
        "gathered": fullest.gathered_bytes,
        "note": next((x for x in plan.notes if x.startswith(("the best of", "the time was up"))), ""),
    }


def growth_chart(rows: pd.DataFrame) -> Figure:
    """Processor seconds of searches by the number of devices, both logarithmic."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    for (model, some), colour in zip(rows.groupby("model"), ("#3a62a5", "#c85304"), strict=False):
        some = some.assign(devices=some.devices.astype(int)).sort_values("devices")
        axes.plot(some.devices, some.processor_s.astype(float), marker="o", color=colour, label=model)
    axes.set(xscale="log", yscale="log", xlabel="devices", ylabel="processor seconds of a search")
    axes.set_xscale("log", base=2)
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    return figure


def as_text(rows: pd.DataFrame, frontier: pd.DataFrame) -> str:
    """The report: all searches, and the frontier of one."""
    model, num_devices = SHOWN
    lines = [
        "# A thousand devices on paper",
        "",
        "Made by `python benchmarks/thousand_devices.py`, whose docstring has the conditions; every figure is in [rows.csv](rows.csv), "
        "the frontier in [frontier.csv](frontier.csv). Searches had a time limit by the clock (`limit_s`) and other work beside them: what they took is told in processor "
        "seconds, start of the process included. The gap is over all settings. One replica is `stages` on as many devices unless the schedule has "
        "several on each. K is at most the number of layers, so the number of settings, and with it the time of a search, stops growing "
        "with the devices; where the limit came first, the gap tells what was left.",
        "",
        "![processor seconds by devices](growth.png)",
        "",
        "| model | devices | stages x replicas, micro-batches | shard | schedule | recompute | step | bubble | peak | weights, gradients, state, "
        "activations, workspace | gap | search | left |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
        *(_line(row) for row in sorted(rows.itertuples(), key=_by_size)),
        "",
        f"## {model} on {num_devices:,} devices: less memory, longer steps",
        "",
        "| setting | step | bubble | peak |",
        "|---|---|---|---|",
        *(_point_line(x) for x in frontier.itertuples()),
        "",
    ]
    return "\n".join(lines)


def _by_size(row: Any) -> tuple[str, int]:
    return row.model, int(row.devices)


def _point_line(x: Any) -> str:
    step, peak = seconds_text(float(x.step_s)), bytes_text(int(x.peak_bytes))
    return f"| {x.setting} | {step} | {percent_text(float(x.bubble))} | {peak} |"


def _line(row: Any) -> str:
    if row.outcome != "plan":
        return f"| {row.model} | {row.devices} | {row.outcome} {'| ' * 9}| {float(row.processor_s):.0f} s | |"
    parts = (row.weight, row.gradient, row.optimizer, row.activation, row.workspace)
    cells = (
        row.model, row.devices, f"{int(float(row.stages))} x {int(float(row.replicas))}, {int(float(row.microbatches))}",
        row.sharding, schedule_info(row.schedule).title, row.recompute, seconds_text(float(row.step_s)),
        percent_text(float(row.bubble)), bytes_text(int(float(row.peak_bytes))),
        ", ".join(bytes_text(int(float(x))) for x in parts), percent_text(float(row.gap)),
        f"{float(row.processor_s):.0f} s", row.note,
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()
