"""Every example on both engines: gradients and losses against the plain model, and the prediction as it came.

    python benchmarks/engine_grid.py             about 12 minutes; writes reports/grid/

Five examples x (gpipe, 1f1b) x recompute (never, always) x (torch engine K = 2, virtual engine K = 4), default sizes,
M = 8 micro-batches of 4. `loss difference` is the largest relative difference of a step's loss from the plain model
trained beside it with the same micro-batches.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path

import pandas as pd

import gplan
from gplan.execute.reference import plain_losses
from gplan.nouns import Plan, Profile
from gplan.units import percent_text, seconds_text
from profiler.host.share import device_share
from profiler.model.load import load_model_file

ROOT = Path(__file__).parent.parent
EXAMPLES = ("transformer_lm", "gpt2_hf", "resnet", "unet", "amoebanet_d")


def main() -> None:
    """Run the grid, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--examples", nargs="*", default=EXAMPLES)
    parser.add_argument("--output", type=Path, default=ROOT / "reports" / "grid")
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    for name in options.examples:
        reference = str(ROOT / "examples" / f"{name}.py")
        profile = gplan.profile(reference, microbatch_sizes=[4])
        for schedule, recompute, (engine, num_stages) in product(
            ("gpipe", "1f1b"), ("never", "always"), (("torch", 2), ("virtual", 4))
        ):
            plan = gplan.balance(
                profile, num_stages=num_stages, num_microbatches=8, schedule=schedule, recompute=recompute
            )
            rows.append(measure(name, plan, engine, options.steps))
            print(rows[-1], flush=True)
    table = pd.DataFrame(rows)
    options.output.mkdir(parents=True, exist_ok=True)
    table.to_csv(options.output / "grid.csv", index=False)
    (options.output / "README.md").write_text(as_text(table, profile, options.steps))


def measure(name: str, plan: Plan, engine: str, num_steps: int) -> dict[str, object]:
    """One row of the grid."""
    run = gplan.run(plan, engine=engine, num_steps=num_steps, check=True)
    with device_share(plan.device.num_threads):
        losses = plain_losses(load_model_file(plan.model.name), plan, num_steps=num_steps)
    assert run.check is not None
    predicted, measured = plan.prediction.step_s, run.timeline.step_s
    peaks = [x.memory.peak_bytes for x in plan.stages]
    worst = max((p / m - 1 for p, m in zip(peaks, run.peak_bytes, strict=True)), key=abs)
    return {
        "model": name,
        "engine": engine,
        "num_stages": plan.num_stages,
        "schedule": plan.schedule,
        "recompute": plan.recompute,
        "gradient_error": run.check.max_relative_error,
        "loss_difference": max(abs(a - b) / max(abs(b), 1e-3) for a, b in zip(run.losses, losses, strict=True)),
        "predicted_step_s": predicted,
        "measured_step_s": measured,
        "step_error": predicted / measured - 1,
        "bubble_points": 100 * (plan.prediction.bubble - run.timeline.bubble),
        "worst_memory_error": worst,
        "num_disturbed": run.num_disturbed,
    }


def as_text(table: pd.DataFrame, profile: Profile, num_steps: int) -> str:
    """The table as Markdown with its medians, and what it was measured on."""
    head = (
        "| model | engine | K | schedule | recompute | gradient error | loss difference | predicted step | measured step "
        "| error | bubble | worst memory |"
    )
    lines = [head, "|" + "---|" * 12]
    for row in table.itertuples():
        lines.append(
            f"| {row.model} | {row.engine} | {row.num_stages} | {row.schedule} | {row.recompute} | "
            f"{row.gradient_error:.1e} | {row.loss_difference:.1e} | {seconds_text(row.predicted_step_s)} | "
            f"{seconds_text(row.measured_step_s)} | {percent_text(row.step_error, signed=True)} | "
            f"{row.bubble_points:+.1f} points | {percent_text(row.worst_memory_error, signed=True)} |"
        )
    by_engine = table.groupby("engine")
    summary = [
        f"- engine {engine}: median error of the step {percent_text(part.step_error.abs().median())}, worst "
        f"{percent_text(part.step_error.abs().max())}; median bubble {part.bubble_points.abs().median():.1f} points off; "
        f"worst memory {percent_text(part.worst_memory_error.abs().max())}; largest gradient error "
        f"{part.gradient_error.max():.1e}"
        for engine, part in by_engine
    ]
    versions = ", ".join(f"{name} {version}" for name, version in profile.versions)
    return "\n".join(
        [
            "# Every example on both engines\n",
            f"`python benchmarks/engine_grid.py`: M = 8 micro-batches of 4, {num_steps} steps each, one core a process, "
            f"uncalibrated, as it came. {profile.device.name}; {versions}; {profile.created[:10]}.\n",
            *summary,
            "",
            *lines,
            "",
        ]
    )


if __name__ == "__main__":
    main()
