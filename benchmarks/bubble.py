"""The bubble on two real processes: of GPipe for several M, beside (K-1)/(M+K-1), and of every schedule at one M.

    python benchmarks/bubble.py            about 8 minutes on 2 idle cores; writes reports/bubble/

All plans are made from one profile at one micro-batch size, so that M changes nothing but the number of micro-batches.
The tables hold the bubble of equal stages with free transfers, gplan's prediction, and the measurement. Runs come in
two rounds, the second in reverse order, so that drift of the host hits all alike; a row is the mean of its two runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from suite import error_text, example, markdown, options_of, write_report

import gplan
from gplan.core import Plan, Run
from gplan.core.units import percent_text, seconds_text
from gplan.schedules.registry import schedule_info

NUM_DEVICES = 2
MICROBATCHES = (1, 2, 4, 8, 16)
SCHEDULES = (
    "gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b:2", "interleaved-1f1b:4", "looped-bfs:2", "zb-h1", "zb-v",
)  # fmt: skip
OWN_ORDER = "custom:0F0 0F1 0B0 0F2 0F3 0B1 0B2 0F4 0F5 0B3 0B4 0F6 0F7 0B5 0B6 0B7 / 1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 1F4 1B4 1F5 1B5 1F6 1B6 1F7 1B7"
"""1F1B on the last device; the first takes its forwards and backwards two at a time where it can."""


def main() -> None:
    """Measure, then write the tables."""
    parser = options_of(__doc__, "bubble")
    parser.add_argument("--model", default=example("transformer_lm"))
    parser.add_argument("--microbatch-size", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8, help="M of the table of schedules")
    parser.add_argument("--steps", type=int, default=20, help="of each run")
    options = parser.parse_args()
    profile = gplan.profile(options.model, microbatch_sizes=[options.microbatch_size])
    asked = [("gpipe", m) for m in MICROBATCHES]
    asked += [(name, options.microbatches) for name in (*SCHEDULES, OWN_ORDER)]
    plans = [gplan.balance(profile, num_devices=NUM_DEVICES, num_microbatches=m, schedule=name) for name, m in asked]
    runs = [measured(plan, options.steps) for plan in [*plans, *reversed(plans)]]
    table = pd.DataFrame([row(plan, runs[i], runs[-1 - i]) for i, plan in enumerate(plans)])
    options.output.mkdir(parents=True, exist_ok=True)
    table.to_csv(options.output / "bubble.csv", index=False)
    of_gpipe, of_schedules = table[: len(MICROBATCHES)], table[len(MICROBATCHES) :]
    versions = ", ".join(f"{name} {version}" for name, version in profile.versions)
    lines = [
        "# The bubble on two processes\n",
        f"`python benchmarks/bubble.py`: {Path(options.model).name}, micro-batches of {options.microbatch_size}, "
        f"K = {NUM_DEVICES}, two runs of {options.steps} steps for each row, one core a process. {profile.device.name}; "
        f"{versions}; {profile.created[:10]}. Bubbles are of the micro-batch loop; steps include the optimizer; the error "
        "is that of the prediction against the measurement, uncalibrated.\n",
        *rows_of(of_gpipe, "M", "num_microbatches"),
        f'\nEvery schedule at M = {options.microbatches}; "equal stages" is the bubble that the schedule would have with '
        "equal stages and free transfers, at the same share of forward and backward.\n",
        *rows_of(of_schedules, "schedule", "schedule"),
    ]
    write_report(options.output, lines)


def measured(plan: Plan, num_steps: int) -> Run:
    """One run, with a line on it."""
    run, title = gplan.run(plan, num_steps=num_steps), schedule_info(plan.schedule).title
    bubbles = f"predicted {plan.prediction.bubble:.3f}, measured {run.timeline.bubble:.3f}"
    print(f"{title}, M = {plan.num_microbatches}: bubble {bubbles}", flush=True)
    return run


def row(plan: Plan, *runs: Run) -> dict[str, float | str]:
    """One row: equal stages, prediction and the mean of the runs."""
    bubbles, steps = [x.timeline.bubble for x in runs], [x.timeline.step_s for x in runs]
    return {
        "schedule": schedule_info(plan.schedule).title,
        "num_microbatches": plan.num_microbatches,
        "ideal": plan.prediction.ideal_bubble,
        "predicted": plan.prediction.bubble,
        "measured": sum(bubbles) / len(runs),
        "measured_step_s": sum(steps) / len(runs),
        "spread": max(bubbles) - min(bubbles),
        "predicted_step_s": plan.prediction.step_s,
        "num_disturbed": sum(x.num_disturbed for x in runs),
        "num_counted": sum(x.num_counted for x in runs),
    }


def rows_of(table: pd.DataFrame, title: str, column: str) -> list[str]:
    """One table, its first column as given."""

    def cells() -> Iterator[list[object]]:
        for x in table.to_dict("records"):
            bubbles = [percent_text(x[name]) for name in ("ideal", "predicted", "measured", "spread")]
            steps = [seconds_text(x[name]) for name in ("predicted_step_s", "measured_step_s")]
            error = error_text(x["predicted_step_s"] / x["measured_step_s"] - 1)
            yield [x[column], *bubbles, *steps, error, f"{x['num_counted']:.0f}, {x['num_disturbed']:.0f}"]

    heads = ["equal stages", "predicted bubble", "measured bubble", "the two runs apart", "predicted step"]
    return markdown([title, *heads, "measured step", "error", "steps counted, disturbed"], cells())


if __name__ == "__main__":
    main()
