"""Runs of one plan over an hour or more: their raw errors, and those at equal host speed.

    python benchmarks/host_speed.py --every 180      20 runs of the demo's plan, one every 3 minutes
    python benchmarks/host_speed.py --runs 1         one more run; goes on where it was
    python benchmarks/host_speed.py --table          the table and the chart of what is there, without running

The demo's model is profiled and planned once, and the profile is kept beside the rows while the runs go on. A row is
added when a run ends. The errors at equal host speed should spread at most half as much as the raw ones.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from profiler.timing.yardstick import PARTS

import gplan
from gplan.core import Plan, Run
from gplan.core.units import percent_text, seconds_text
from gplan.evaluate.compare import STEP_TIME, compare

ROOT = Path(__file__).parent.parent
NUM_RUNS = 20
ERRORS = {"error": "raw", "equal_speed_error": "at equal host speed"}


def main() -> None:
    """Make the runs that are missing, then write the table and the chart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, help=f"how many more; default: until there are {NUM_RUNS}")
    parser.add_argument("--every", type=float, default=180.0, metavar="SECONDS", help="from one start to the next")
    parser.add_argument("--steps", type=int, default=60, help="of each run")
    parser.add_argument("--table", action="store_true", help="write the table and the chart only")
    parser.add_argument("--output", type=Path, default=ROOT / "reports" / "host-speed")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "rows.csv"
    rows = pd.read_csv(path) if path.exists() else pd.DataFrame()
    missing = max(0, NUM_RUNS - len(rows)) if options.runs is None else options.runs
    for index in range(0 if options.table else missing):
        start_s = time.monotonic()
        rows = pd.concat([rows, pd.DataFrame([measured(planned(options.output), options.steps)])], ignore_index=True)
        rows.to_csv(path, index=False)
        if index + 1 < missing:
            time.sleep(max(0.0, options.every - (time.monotonic() - start_s)))
    draw(rows).savefig(options.output / "host-speed.png", dpi=150)
    (options.output / "README.md").write_text(as_text(rows))
    print((options.output / "README.md").read_text())


def planned(folder: Path) -> Plan:
    """The demo's plan, by the profile in the folder, which is made where there is none."""
    path = folder / "profile.json"
    if not path.exists():
        gplan.save(gplan.profile(str(ROOT / "examples" / "transformer_lm.py"), microbatch_sizes=[4]), path)
    return gplan.balance(gplan.load(path), num_devices=2, num_microbatches=8)


def measured(plan: Plan, num_steps: int) -> dict[str, Any]:
    """Both errors of the step, and the yardstick's parts over those of the profile."""
    run = gplan.run(plan, num_steps=num_steps)
    step = compare(run).row(STEP_TIME)
    print(run.created, percent_text(step.error or 0.0, signed=True), seconds_text(step.measured), flush=True)
    return {
        "at": run.created,
        "predicted_s": step.predicted,
        "measured_s": step.measured,
        "error": step.error,
        "equal_speed_error": step.equal_speed_error,
        **yardstick_of(run),
    }


def yardstick_of(run: Run) -> dict[str, float]:
    """The yardstick's parts over those of the profile, the means over ranks and steps; {} without readings."""
    reference = run.plan.host_speed
    times = [(x, len(window.ranks)) for window in run.timed_speed for x in window.ranks if x is not None]
    if reference is None or not times:
        return {}
    parts = zip(*(reference.ratios(x, num_devices=num) for x, num in times), strict=True)
    return dict(zip(PARTS, map(geometric_mean, parts), strict=True))


def draw(rows: pd.DataFrame) -> Figure:
    """Both errors by time, and below them the yardstick."""
    minutes = (pd.to_datetime(rows["at"]) - pd.to_datetime(rows["at"].iloc[0])).dt.total_seconds() / 60
    figure = Figure(figsize=(9, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    upper.axhline(0, color="0.8", zorder=0)
    for (name, words), mark in zip(ERRORS.items(), "ox", strict=True):
        upper.plot(minutes, 100 * rows[name], mark, mfc="none", label=words)
    upper.set(ylabel="error of the predicted step, %")
    lower.axhline(1, color="0.8", zorder=0)
    for part, mark in zip(PARTS, "^s.", strict=True):
        lower.plot(minutes, rows[part], mark, mfc="none", label=part)
    lower.set(ylabel="yardstick, times the profile's", xlabel="minutes since the first run")
    for axes in (upper, lower):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    return figure


def as_text(rows: pd.DataFrame) -> str:
    """The medians and spreads of both errors, then every run."""
    lines = [
        f"# {len(rows)} runs of one plan\n",
        "Made by `python benchmarks/host_speed.py`, which goes on where it was: the demo's plan, K = 2 on two processes. "
        "The spread is the distance of the first and the third quartile, beside the standard deviation; an error is predicted over measured, less 1; "
        "the yardstick's parts are over those of the profile, the means over ranks and steps.\n",
        "| error | median | median size | spread | standard deviation | least | largest |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, words in ERRORS.items():
        errors = rows[name]
        figures = (errors.median(), errors.min(), errors.max())
        middle, least, largest = (percent_text(x, signed=True) for x in figures)
        size, spread = errors.abs().median(), errors.quantile(0.75) - errors.quantile(0.25)
        spreads = f"{percent_text(spread)} | {percent_text(errors.std())}"
        lines.append(f"| {words} | {middle} | {percent_text(size)} | {spreads} | {least} | {largest} |")
    lines += [
        "\n![errors and yardstick by time](host-speed.png)\n",
        "| at | step | error | at equal speed | compute | memory | interpreter |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows.itertuples():
        errors = " | ".join(percent_text(x, signed=True) for x in (row.error, row.equal_speed_error))
        parts = " | ".join(f"{x:.2f}" for x in (row.compute, row.memory, row.interpreter))
        lines.append(f"| {row.at} | {seconds_text(row.measured_s)} | {errors} | {parts} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
