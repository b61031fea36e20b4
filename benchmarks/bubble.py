"""The bubble on two real processes: of GPipe for several M, beside (K-1)/(M+K-1), and of every schedule at one M.

    python benchmarks/bubble.py            about 8 minutes on 2 idle cores; writes reports/bubble/

All plans are made from one profile at one micro-batch size, so that M changes nothing but the number of micro-batches.
The tables hold the bubble of equal stages with free transfers, gplan's prediction, and the measurement. Runs come in
two rounds, the second in reverse order, so that drift of the host hits all alike; a row is the mean of its two runs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

import gplan
from gplan.core import Plan, Profile
from gplan.core.units import percent_text, seconds_text
from gplan.schedules.registry import schedule_info

ROOT = Path(__file__).parent.parent
NUM_DEVICES = 2
MICROBATCHES = (1, 2, 4, 8, 16)
SCHEDULES = (
    "gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b:2", "interleaved-1f1b:4", "looped-bfs:2", "zb-h1", "zb-v",
)  # fmt: skip
OWN_ORDER = "custom:0F0 0F1 0B0 0F2 0F3 0B1 0B2 0F4 0F5 0B3 0B4 0F6 0F7 0B5 0B6 0B7 / 1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 1F4 1B4 1F5 1B5 1F6 1B6 1F7 1B7"
"""1F1B on the last device; the first takes its forwards and backwards two at a time where it can."""


def main() -> None:
    """Measure, then write the tables and the chart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "examples" / "transformer_lm.py"))
    parser.add_argument("--microbatch-size", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8, help="M of the table of schedules")
    parser.add_argument("--steps", type=int, default=20, help="of each run")
    parser.add_argument("--output", type=Path, default=ROOT / "reports" / "bubble")
    options = parser.parse_args()
    profile = gplan.profile(options.model, microbatch_sizes=[options.microbatch_size])
    asked = [("gpipe", m) for m in MICROBATCHES]
    asked += [(name, options.microbatches) for name in (*SCHEDULES, OWN_ORDER)]
    plans = [gplan.balance(profile, num_devices=NUM_DEVICES, num_microbatches=m, schedule=name) for name, m in asked]
    measured = [measure(plan, options.steps) for plan in plans]
    again = [measure(plan, options.steps) for plan in reversed(plans)]
    rows = [row(plan, *runs) for plan, *runs in zip(plans, measured, reversed(again), strict=True)]
    table = pd.DataFrame(rows)
    options.output.mkdir(parents=True, exist_ok=True)
    table.to_csv(options.output / "bubble.csv", index=False)
    of_gpipe, of_schedules = table[: len(MICROBATCHES)], table[len(MICROBATCHES) :]
    draw(of_gpipe, of_schedules).savefig(options.output / "bubble.png", dpi=150)
    (options.output / "README.md").write_text(as_text(of_gpipe, of_schedules, profile, options))
    print((options.output / "README.md").read_text())


def measure(plan: Plan, num_steps: int) -> dict[str, float]:
    """What one run measured."""
    run = gplan.run(plan, num_steps=num_steps)
    title = schedule_info(plan.schedule).title
    print(
        f"{title}, M = {plan.num_microbatches}: bubble predicted {plan.prediction.bubble:.3f}, measured "
        f"{run.timeline.bubble:.3f}",
        flush=True,
    )
    return {
        "measured": run.timeline.bubble,
        "measured_step_s": run.timeline.step_s,
        "num_disturbed": run.num_disturbed,
        "num_counted": run.num_counted,
    }


def row(plan: Plan, *runs: dict[str, float]) -> dict[str, float | str]:
    """One row: equal stages, prediction and the mean of the runs."""
    mean = {name: sum(x[name] for x in runs) / len(runs) for name in ("measured", "measured_step_s")}
    return {
        "schedule": schedule_info(plan.schedule).title,
        "num_microbatches": plan.num_microbatches,
        "ideal": plan.prediction.ideal_bubble,
        "predicted": plan.prediction.bubble,
        **mean,
        "spread": max(x["measured"] for x in runs) - min(x["measured"] for x in runs),
        "predicted_step_s": plan.prediction.step_s,
        "num_disturbed": sum(x["num_disturbed"] for x in runs),
        "num_counted": sum(x["num_counted"] for x in runs),
    }


def draw(of_gpipe: pd.DataFrame, of_schedules: pd.DataFrame) -> Figure:
    """Left GPipe's bubble against M, the law as a line; right every schedule; predicted and measured as points."""
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.2))
    left.plot(of_gpipe.num_microbatches, 100 * of_gpipe.ideal, color="0.6", label="(K-1)/(M+K-1)")
    left.set_xscale("log", base=2)
    left.set_xticks(of_gpipe.num_microbatches, [str(m) for m in of_gpipe.num_microbatches])
    left.set(xlabel="micro-batches M", ylabel="bubble, % of device time")
    left.set_title("GPipe", loc="left")
    right.plot(100 * of_schedules.ideal, of_schedules.schedule, "|", color="0.4", markersize=14, label="equal stages")
    right.invert_yaxis()
    right.set(xlabel="bubble, % of device time")
    right.set_title(f"all schedules, M = {of_schedules.num_microbatches.iloc[0]}", loc="left")
    for axes, table, is_upright in ((left, of_gpipe, True), (right, of_schedules, False)):
        places = table.num_microbatches if is_upright else table.schedule
        for name, look in (
            ("predicted", {"marker": "o", "mfc": "none", "color": "#397af2"}),
            ("measured", {"marker": "x", "color": "#c85308"}),
        ):
            values = 100 * table[name]
            axes.plot(*((places, values) if is_upright else (values, places)), linestyle="none", label=name, **look)
        axes.set(**{"ylim" if is_upright else "xlim": (0, None)})
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    return figure


def as_text(of_gpipe: pd.DataFrame, of_schedules: pd.DataFrame, profile: Profile, options: argparse.Namespace) -> str:
    """The tables as Markdown, with what they were measured on."""
    versions = ", ".join(f"{name} {version}" for name, version in profile.versions)
    return "\n".join(
        [
            "# The bubble on two processes\n",
            f"`python benchmarks/bubble.py`: {Path(options.model).name}, micro-batches of {options.microbatch_size}, "
            f"K = {NUM_DEVICES}, two runs of {options.steps} steps for each row, one core a process. {profile.device.name}; "
            f"{versions}; {profile.created[:10]}. Bubbles are of the micro-batch loop; steps include the optimizer; the error "
            "is that of the prediction against the measurement, uncalibrated.\n",
            *rows_of(of_gpipe, "M", "num_microbatches"),
            f'\nEvery schedule at M = {options.microbatches}; "equal stages" is the bubble that the schedule would have with '
            "equal stages and free transfers, at the same share of forward and backward.\n",
            *rows_of(of_schedules, "schedule", "schedule"),
            "\n![bubbles](bubble.png)\n",
        ]
    )


def rows_of(table: pd.DataFrame, title: str, column: str) -> list[str]:
    """One table, its first column as given."""
    head = (
        f"| {title} | equal stages | predicted bubble | measured bubble | the two runs apart | predicted step | measured step | "
        "error | steps counted, disturbed |"
    )
    lines = [head, "|" + "---|" * 9]
    for values in table.to_dict("records"):
        error = values["predicted_step_s"] / values["measured_step_s"] - 1
        lines.append(
            f"| {values[column]} | {percent_text(values['ideal'])} | {percent_text(values['predicted'])} | "
            f"{percent_text(values['measured'])} | {percent_text(values['spread'])} | "
            f"{seconds_text(values['predicted_step_s'])} | {seconds_text(values['measured_step_s'])} | "
            f"{percent_text(error, signed=True)} | {values['num_counted']:.0f}, {values['num_disturbed']:.0f} |"
        )
    return lines


if __name__ == "__main__":
    main()
