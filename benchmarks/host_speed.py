"""The error of the predicted step of saved runs, raw and at equal host speed.

    python benchmarks/host_speed.py

`saved.csv` has the runs of versions whose yardstick had three parts, timed apart. The fixed work of today does them one
after the other, so its ratio is their mean, by the time that they take. Runs of today have both errors in
`benchmarks/real_size.py`, and `gplan run` prints them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd
from suite import REPORTS, options_of, write_report

from gplan.core.units import percent_text

SHARES = {"compute": 0.40, "memory": 0.15, "interpreter": 0.45}
"""Of the time of the fixed work (`FixedWork` of gplan_profiler/host/host_load.py)."""
BANDS = ((0.0, 0.02), (0.02, 0.05), (0.05, 0.1), (0.1, 9.0))
HEAD = "| raw: median | worst | three parts: median | worst | one ratio: median | worst |"


def main() -> None:
    """Write the tables."""
    options = options_of(__doc__, "host-speed").parse_args()
    write_report(options.output, saved_text(pd.read_csv(REPORTS / "host-speed" / "saved.csv")))


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


if __name__ == "__main__":
    main()
