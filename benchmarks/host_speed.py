"""The error of the predicted step, raw and at equal host speed.

    python benchmarks/host_speed.py                 the tables of all rows that are there, without running
    python benchmarks/host_speed.py --runs 20       20 runs of the demo's plan, one every 3 minutes; adds to rows.csv

`saved.csv` has the runs of versions whose yardstick had three parts, timed apart. The fixed work of today does them one
after the other, so its ratio is their mean, by the time that they take. The demo's model is profiled and planned once,
and its profile is kept beside the rows while the runs go on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from suite import REPORTS, Rows, example, options_of, write_report

import gplan
from gplan.core.units import percent_text
from gplan.evaluate.compare import STEP_TIME

SHARES = {"compute": 0.40, "memory": 0.15, "interpreter": 0.45}
"""Of the time of the fixed work (`FixedWork` of gplan_profiler/host/host_load.py)."""
BANDS = ((0.0, 0.02), (0.02, 0.05), (0.05, 0.1), (0.1, 9.0))
HEAD = "| raw: median | worst | three parts: median | worst | one ratio: median | worst |"


def main() -> None:
    """Make the runs that are asked for, then write the tables."""
    parser = options_of(__doc__, "host-speed")
    parser.add_argument("--runs", type=int, default=0, help="how many more")
    parser.add_argument("--every", type=float, default=180.0, metavar="SECONDS", help="from one start to the next")
    parser.add_argument("--steps", type=int, default=60, help="of each run")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    rows = Rows(options.output / "rows.csv", key=["at"])
    for index in range(options.runs):
        start_s = time.monotonic()
        rows.add(measured(options.output, options.steps))
        if index + 1 < options.runs:
            time.sleep(max(0.0, options.every - (time.monotonic() - start_s)))
    saved = pd.read_csv(REPORTS / "host-speed" / "saved.csv")
    write_report(options.output, [*saved_text(saved), *rows_text(rows.table())])


def measured(folder: Path, num_steps: int) -> dict[str, object]:
    """A run of the demo's plan: both errors of the step, and the ratio of the yardsticks."""
    path = folder / "profile.json"
    if not path.exists():
        gplan.save(gplan.profile(example("transformer_lm"), microbatch_sizes=[4]), path)
    profile = gplan.load(path)
    run = gplan.run(gplan.balance(profile, num_devices=2, num_microbatches=8), profile=profile, num_steps=num_steps)
    step, speed = gplan.compare(run).row(STEP_TIME), run.equal_speed
    return {
        "at": run.created,
        "measured_s": step.measured,
        "error": step.error,
        "equal_speed_error": step.equal_speed_error,
        "ratio": speed and speed.ratio,
        "uncertainty": speed and speed.uncertainty,
    }


def saved_text(saved: pd.DataFrame) -> Iterator[str]:
    """The errors of the saved runs by their kind, then by how far the speeds of run and profile were apart."""
    ratio = sum(share * saved[part] for part, share in SHARES.items())
    found = saved.assign(ratio=ratio, one_ratio_error=(1 + saved.error) * ratio - 1)
    yield "# The error of the step at equal host speed\n"
    yield (
        "Made by `python benchmarks/host_speed.py` from the saved runs of versions whose yardstick had three parts, weighted "
        "by the model, in windows of the run. Of the same readings the columns on the right take one ratio, that of one fixed "
        "work. An error is predicted over measured, less 1. In these runs the yardstick was read between actions, not "
        "between steps as now, and the spread of the readings was not kept, so every ratio is applied. Every run is in saved.csv. "
        f"The worst one is of a version whose yardstick read memory that the host had taken away.\n\n| runs | number {HEAD}"
    )
    yield "|---|---|---|---|---|---|---|---|"
    groups = [*found.groupby("runs", sort=False), ("all", found)]
    for name, part in groups:
        yield f"| {name} | {len(part)} | {errors_text(part)} |"
    yield f"\n| ratio of the yardsticks from 1 | number {HEAD}\n|---|---|---|---|---|---|---|---|"
    for least, most in BANDS:
        part = found[((found.ratio - 1).abs() > least) & ((found.ratio - 1).abs() <= most)]
        name = f"{100 * least:.0f} to {100 * most:.0f} %" if most < 1 else f"more than {100 * least:.0f} %"
        yield f"| {name} | {len(part)} | {errors_text(part)} |"


def errors_text(part: pd.DataFrame) -> str:
    """The median size and the worst of each kind of error, as cells."""
    columns = (part[name] for name in ("error", "three_parts_error", "one_ratio_error"))
    return " | ".join(
        f"{percent_text(x.abs().median())} | {percent_text(x.loc[x.abs().idxmax()], signed=True)}" for x in columns
    )


def rows_text(rows: pd.DataFrame) -> Iterator[str]:
    """Every run of this version."""
    if rows.empty:
        return
    yield "\n| at | error | at equal speed | ratio of the yardsticks |\n|---|---|---|---|"
    for row in rows.itertuples():
        errors = ("" if pd.isna(x) else percent_text(x, signed=True) for x in (row.error, row.equal_speed_error))
        yield f"| {row.at} | {' | '.join(errors)} | {row.ratio:.3f} ± {row.uncertainty:.3f} |"


if __name__ == "__main__":
    main()
