"""Thousands of devices on paper: how to train a model on N h100, and how long the search for it takes.

    python benchmarks/thousand_devices.py                     at most 17 minutes on 2 idle cores: 15 searches
    python benchmarks/thousand_devices.py --table             the tables and the chart of what is there, without running

A row is written after each search; a search that has a row is not run again (--again runs it again).

Searched are stages x replicas x what replicas divide x micro-batches x schedule x recompute for as many samples of 4096
tokens as there are devices, 80 GB each, in mixed precision (bf16 with float32 gradients, master weights and AdamW). Hosts
have eight devices; every link is taken as one between hosts, 50 GB/s a device (400 Gbit/s). The profiles are those of
benchmarks/large_model_configs.py, computed without weights. Stages receive just in time, as torch after 2.13 does: up to
2.13 its receive buffers of all micro-batches alone would fill a device. A search is a process of its own, which is
complete or stopped at the limit of seconds by the clock; what other work on the host took of that is seen beside its
processor seconds. The first search of a model makes its profile, which takes some seconds more.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
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
"""The search whose frontier the report shows."""

TIME_WAS_UP = "the time was up"
"""How the note of a search begins that ended by its limit."""

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
        help="of a search, by the clock (default: 60); more where other work runs beside it",
    )
    parser.add_argument("--again", action="store_true", help="search again what has a row")
    parser.add_argument("--models", nargs="*", choices=SIZES, default=list(SIZES))
    parser.add_argument("--devices", nargs="*", type=int, help="only these numbers")
    parser.add_argument("--output", type=Path, default=ROOT / "reports" / "thousand-devices")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "rows.csv"
    rows = pd.read_csv(path, keep_default_na=False) if path.exists() else pd.DataFrame()
    for key in () if options.table else keys(options):
        if is_there(rows, key) and not options.again:
            print(f"{key['model']} on {key['devices']} devices: has a row", flush=True)
            continue
        print(f"{key['model']} on {key['devices']} devices: ", end="", flush=True)
        row = {**key, "limit_s": options.limit, **searched(key, options.output, limit_s=options.limit)}
        print(told(row), flush=True)
        others = rows if rows.empty else rows[~(rows[list(key)].astype(str) == list(key.values())).all(axis=1)]
        rows = pd.concat([others.astype(object), pd.DataFrame([row], dtype=object)], ignore_index=True).fillna("")
        rows.to_csv(path, index=False)
    if rows.empty:
        raise SystemExit(f"{path} has no rows; run without --table")
    rows, place = pd.read_csv(path, keep_default_na=False), options.output / "frontier.csv"
    frontier = pd.read_csv(place, keep_default_na=False) if place.exists() else pd.DataFrame()
    growth_chart(rows).savefig(options.output / "growth.png", dpi=120)
    (options.output / "README.md").write_text(as_text(rows, frontier))
    print(f"written: README.md and growth.png of {len(rows)} searches in {options.output}")


def keys(options: argparse.Namespace) -> Iterator[dict[str, str]]:
    """The searches that were asked for."""
    for model in options.models:
        for num_devices in options.devices or SIZES[model]:
            yield {"model": model, "devices": str(num_devices)}


def told(row: Mapping[str, Any]) -> str:
    """A row in one line."""
    if row["outcome"] != "plan":
        return f"{row['outcome']} ({row['processor_s']:.0f} s of processor time)"
    plan = f"{row['stages']} stages x {row['replicas']}, {row['microbatches']} micro-batches, {row['schedule']}"
    return (
        f"{'complete' if is_complete(pd.DataFrame([row])).all() else 'stopped by the limit'} after {row['solve_s']:.1f} s, "
        f"{row['processor_s']:.1f} s of processor time; {plan}, step {seconds_text(row['step_s'])}, "
        f"gap {percent_text(row['gap'])}"
    )


def make_profile(model: str, path: Path) -> None:
    """Write a profile for the h100 between hosts, with the rules of a torch that receives just in time."""
    settings = ("--set", f"name={model}", "--microbatch-size", "1", "--device", "meta", "--hardware", "h100")
    ended = run(
        ("profile", str(MODEL_FILE), *settings, "--precision", "mixed", "--link", "50GB/s,10us", "--output", str(path))
    )
    if ended.code:
        raise SystemExit(ended.errors)
    json_files.save(replace(json_files.load(Profile, path), versions=(("torch", "2.14.0"),)), path)


def searched(key: Mapping[str, str], place: Path, *, limit_s: int) -> dict[str, Any]:
    """The row of a search; writes the frontier of the one that is shown."""
    model, num_devices = key["model"], key["devices"]
    profile, path = place / f"{model}.profile.json", place / f"{model}.plan.json"
    if not profile.exists():
        make_profile(model, profile)
    given = ("--devices", num_devices, "--batch-size", num_devices, "--memory", "80GB")
    limit = ("--time-limit", str(limit_s), "--output", str(path))
    ended = run(("balance", str(profile), *given, *OPTIONS, *limit))
    figures = {"processor_s": round(ended.processor_s, 2), "process_bytes": ended.peak_bytes}
    if ended.code:
        return {**figures, "outcome": ended.errors}
    plan = json_files.load(Plan, path)
    path.unlink()
    if (model, int(num_devices)) == SHOWN:
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
        "note": next((x for x in plan.notes if x.startswith(("the best of", TIME_WAS_UP))), ""),
    }


def growth_chart(rows: pd.DataFrame) -> Figure:
    """Processor seconds of searches by the number of devices, both logarithmic."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    rows = rows.assign(devices=rows.devices.astype(int), processor_s=rows.processor_s.astype(float))
    for (model, some), colour in zip(rows.groupby("model"), ("#3a62a5", "#c85304"), strict=False):
        some = some.sort_values("devices")
        axes.plot(some.devices, some.processor_s, color=colour, label=model)
        for is_whole, group in some.groupby(is_complete(some)):
            face = colour if is_whole else "white"
            axes.plot(group.devices, group.processor_s, "o", color=colour, markerfacecolor=face)
    axes.plot([], [], "o", color="#555555", label="complete")
    axes.plot([], [], "o", color="#555555", markerfacecolor="white", label="stopped by its limit of seconds")
    axes.set(xscale="log", yscale="log", xlabel="devices", ylabel="processor seconds of a search")
    devices = sorted(set(rows.devices))
    axes.set_xticks(devices, [f"{x:,}" for x in devices], fontsize=8)
    axes.set_xticks([], minor=True)
    lowest, highest = rows.processor_s.min(), rows.processor_s.max()
    steps = [x * 10**e for e in range(-2, 5) for x in (1, 2, 5)]
    ticks = [x for x in steps if lowest / 2.5 <= x <= 2.5 * highest]
    axes.set_yticks(ticks, [f"{x:g} s" for x in ticks])
    axes.set_yticks([], minor=True)
    axes.set_ylim(ticks[0], ticks[-1])
    axes.legend(frameon=False, fontsize=8)
    axes.grid(alpha=0.3)
    return figure


def is_complete(rows: pd.DataFrame) -> pd.Series[bool]:
    """Whether searches ended before their limit, with no setting left open."""
    was_up = rows.note.str.startswith(TIME_WAS_UP)
    return (rows.outcome == "plan") & (rows.solve_s < 0.98 * rows.limit_s) & ~was_up


def as_text(rows: pd.DataFrame, frontier: pd.DataFrame) -> str:
    """The report: all searches, and the frontier of one."""
    model, num_devices = SHOWN
    lines = [
        "# A thousand devices on paper",
        "",
        "Made by `python benchmarks/thousand_devices.py`, whose docstring has the conditions; every figure is in [rows.csv](rows.csv), "
        "the frontier in [frontier.csv](frontier.csv). A search was complete, or stopped at a limit by the clock; seconds are by the clock, in "
        "brackets those of the processor, start of the process included: where other work ran beside it, they are fewer. The gap is over all settings. One replica is `stages` on as many devices unless the schedule has "
        "several on each. K is at most the number of layers, so the number of settings stops growing with the devices.",
        "",
        "![processor seconds by devices](growth.png)",
        "",
        "| model | devices | stages x replicas, micro-batches | shard | schedule | recompute | step | bubble | peak | weights, gradients, state, "
        "activations, workspace | gap | search | limit | left |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
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
        return f"| {row.model} | {row.devices} | {row.outcome} {'| ' * 9}| ({float(row.processor_s):.0f} s) | {row.limit_s} s | |"
    parts = (row.weight, row.gradient, row.optimizer, row.activation, row.workspace)
    cells = (
        row.model, row.devices, f"{int(float(row.stages))} x {int(float(row.replicas))}, {int(float(row.microbatches))}",
        row.sharding, schedule_info(row.schedule).title, row.recompute, seconds_text(float(row.step_s)),
        percent_text(float(row.bubble)), bytes_text(int(float(row.peak_bytes))),
        ", ".join(bytes_text(int(float(x))) for x in parts), percent_text(float(row.gap)),
        f"{float(row.solve_s):.0f} s ({float(row.processor_s):.0f} s)", f"{row.limit_s} s", row.note,
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()
