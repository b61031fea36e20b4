"""The GPipe bubble on two real processes, beside (K-1)/(M+K-1).

    python benchmarks/gpipe_bubble.py            about 3 minutes; writes reports/bubble/

The micro-batch size is fixed, so that M changes nothing but the number of micro-batches. Each M is planned from one
profile and run; the table holds theory (equal stages, free transfers), gplan's prediction, and the measurement.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

import gplan
from gplan.nouns import Profile
from gplan.units import percent_text, seconds_text

ROOT = Path(__file__).parent.parent
MICROBATCHES = (1, 2, 4, 8, 16)


def main() -> None:
    """Measure, then write the table and the chart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "examples" / "transformer_lm.py"))
    parser.add_argument("--microbatch-size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output", type=Path, default=ROOT / "reports" / "bubble")
    options = parser.parse_args()
    profile = gplan.profile(options.model, microbatch_sizes=[options.microbatch_size])
    table = pd.DataFrame([measure(profile, m, options.steps) for m in MICROBATCHES])
    options.output.mkdir(parents=True, exist_ok=True)
    table.to_csv(options.output / "bubble.csv", index=False)
    draw(table).savefig(options.output / "bubble.png", dpi=150)
    (options.output / "README.md").write_text(as_text(table, profile, options))
    print((options.output / "README.md").read_text())


def measure(profile: Profile, num_microbatches: int, num_steps: int) -> dict[str, float]:
    """One row: theory, prediction and measurement for one M."""
    plan = gplan.balance(profile, num_stages=2, num_microbatches=num_microbatches)
    run = gplan.run(plan, num_steps=num_steps)
    print(
        f"M = {num_microbatches}: predicted {plan.prediction.bubble:.3f}, measured {run.timeline.bubble:.3f}",
        flush=True,
    )
    return {
        "num_microbatches": num_microbatches,
        "theory": plan.prediction.ideal_bubble,
        "predicted": plan.prediction.bubble,
        "measured": run.timeline.bubble,
        "predicted_step_s": plan.prediction.step_s,
        "measured_step_s": run.timeline.step_s,
        "num_disturbed": run.num_disturbed,
        "num_counted": run.num_counted,
    }


def draw(table: pd.DataFrame) -> Figure:
    """Bubble against M: the law as a line, predicted and measured as points."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(table.num_microbatches, 100 * table.theory, color="0.6", label="(K-1)/(M+K-1)")
    axes.plot(table.num_microbatches, 100 * table.predicted, "o", mfc="none", color="#397af2", label="predicted")
    axes.plot(table.num_microbatches, 100 * table.measured, "x", color="#c85308", label="measured")
    axes.set_xscale("log", base=2)
    axes.set_xticks(table.num_microbatches, [str(m) for m in table.num_microbatches])
    axes.set(xlabel="micro-batches M", ylabel="bubble, % of device time", ylim=(0, None))
    axes.set_title("GPipe on two processes, fixed micro-batch size", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def as_text(table: pd.DataFrame, profile: Profile, options: argparse.Namespace) -> str:
    """The table as Markdown, with what it was measured on."""
    head = "| M | (K-1)/(M+K-1) | predicted bubble | measured bubble | predicted step | measured step | error | steps counted, disturbed |"
    lines = [head, "|" + "---|" * 8]
    for row in table.itertuples():
        error = row.predicted_step_s / row.measured_step_s - 1
        lines.append(
            f"| {row.num_microbatches} | {percent_text(row.theory)} | {percent_text(row.predicted)} | "
            f"{percent_text(row.measured)} | {seconds_text(row.predicted_step_s)} | {seconds_text(row.measured_step_s)} | "
            f"{percent_text(error, signed=True)} | {row.num_counted}, {row.num_disturbed} |"
        )
    versions = ", ".join(f"{name} {version}" for name, version in profile.versions)
    return "\n".join(
        [
            "# The GPipe bubble on two processes\n",
            f"`python benchmarks/gpipe_bubble.py`: {Path(options.model).name}, micro-batches of {options.microbatch_size}, "
            f"K = 2, {options.steps} steps for each M, one core a process. {profile.device.name}; {versions}; "
            f"{profile.created[:10]}. Bubbles are of the micro-batch loop; steps include the optimizer; the error is that "
            "of the prediction against the measurement, uncalibrated.\n",
            *lines,
            "\n![bubble against M](bubble.png)\n",
        ]
    )


if __name__ == "__main__":
    main()
