"""Is the chosen cut the best one? Every cut into K = 2 stages of four examples, run on two processes.

    python benchmarks/regret.py            about 15 minutes on 2 idle cores; writes reports/regret/

Each model is profiled once; then all its cuts run in turns, the second round in reverse order, so that drift of the
host hits all alike. A cut's time is the smaller of its two rounds' median steps, as disturbances only ever add. Regret:
the chosen cut's time over the best one's, less 1; the two rounds of the same cut say how much of that is noise.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median

import pandas as pd
from matplotlib.figure import Figure

import gplan
from gplan.core import Constraints, Plan, Profile
from gplan.core.units import percent_text, seconds_text
from gplan.evaluate.verify import rank_correlation

ROOT = Path(__file__).parent.parent
MODELS = ("transformer_lm", "gpt2_hf", "resnet", "unet")
NUM_MICROBATCHES, MICROBATCH_SIZE = 8, 4


def main() -> None:
    """Run every cut of every model, then write the table and the chart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--steps", type=int, default=10, help="of each run")
    parser.add_argument("--output", type=Path, default=ROOT / "reports" / "regret")
    options = parser.parse_args()
    tables = [measured(model, options.steps) for model in options.models]
    table = pd.concat(tables, ignore_index=True)
    options.output.mkdir(parents=True, exist_ok=True)
    table.to_csv(options.output / "regret.csv", index=False)
    draw(tables).savefig(options.output / "regret.png", dpi=150)
    (options.output / "README.md").write_text(as_text(tables, options.steps))
    print((options.output / "README.md").read_text())


def measured(model: str, num_steps: int) -> pd.DataFrame:
    """One row for each cut of a model."""
    profile = gplan.profile(str(ROOT / "examples" / f"{model}.py"), microbatch_sizes=[MICROBATCH_SIZE])
    chosen = planned(profile, Constraints())
    plans = [planned(profile, Constraints(cut_after=(layer.name,))) for layer in profile.layers[:-1]]
    rounds = [[gplan.run(plan, num_steps=num_steps) for plan in turn] for turn in (plans, plans[::-1])]
    rows = []
    for plan, one, other in zip(plans, rounds[0], rounds[1][::-1], strict=True):
        steps_s = one.timeline.step_s, other.timeline.step_s
        rows.append(
            {
                "model": model,
                "cut_after": plan.stages[0].layer_names[-1],
                "is_chosen": plan.cuts == chosen.cuts,
                "predicted_s": plan.prediction.step_s,
                "measured_s": min(steps_s),
                "rounds_apart": max(steps_s) / min(steps_s) - 1,
                "num_counted": one.num_counted + other.num_counted,
                "num_disturbed": one.num_disturbed + other.num_disturbed,
                "device": profile.device.name,
                "created": one.created[:10],
                "torch": dict(one.versions)["torch"],
            }
        )
        print(
            model, rows[-1]["cut_after"], seconds_text(plan.prediction.step_s), *map(seconds_text, steps_s), flush=True
        )
    return pd.DataFrame(rows)


def planned(profile: Profile, constraints: Constraints) -> Plan:
    """The best plan that grants the constraints."""
    return gplan.balance(profile, num_devices=2, num_microbatches=NUM_MICROBATCHES, constraints=constraints)


def draw(tables: list[pd.DataFrame]) -> Figure:
    """For each model predicted and measured steps by cut, the chosen cut marked."""
    figure = Figure(figsize=(11, 3.2 * ((len(tables) + 1) // 2)), layout="constrained")
    for axes, table in zip(figure.subplots((len(tables) + 1) // 2, 2).flat, tables, strict=False):
        chosen = table.index[table.is_chosen][0]
        axes.axvspan(chosen - 0.5, chosen + 0.5, color="0.92", zorder=0)
        axes.plot(table.index, 1e3 * table.predicted_s, "o", mfc="none", color="#397af2", label="predicted")
        axes.plot(table.index, 1e3 * table.measured_s, "x", color="#c85308", label="measured")
        axes.set_xticks(table.index, table.cut_after, rotation=60, ha="right", fontsize=7)
        axes.set(ylabel="step, ms", ylim=(0, 1.06e3 * table[["predicted_s", "measured_s"]].max().max()))
        axes.set_title(f"{table.model[0]}: cut after (chosen: shaded)", loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    return figure


def as_text(tables: list[pd.DataFrame], num_steps: int) -> str:
    """The regret of each model's chosen cut, and how it was measured."""
    first = tables[0].iloc[0]
    head = "| model | cuts | chosen: after | measured | best measured: after | measured | regret | two rounds apart | rank correlation |"
    lines = [head, "|" + "---|" * 9]
    for table in tables:
        chosen, best = table[table.is_chosen].iloc[0], table.iloc[table.measured_s.argmin()]
        rank = rank_correlation(list(table.predicted_s), list(table.measured_s))
        lines.append(
            f"| {chosen.model} | {len(table)} | {chosen.cut_after} | {seconds_text(chosen.measured_s)} | {best.cut_after} | "
            f"{seconds_text(best.measured_s)} | {percent_text(chosen.measured_s / best.measured_s - 1)} | "
            f"{percent_text(median(table.rounds_apart))} | {rank:.2f} |"
        )
    return "\n".join(
        [
            "# Every cut of four models, measured\n",
            f"`python benchmarks/regret.py`: K = 2 on two processes, GPipe, M = {NUM_MICROBATCHES} micro-batches of "
            f"{MICROBATCH_SIZE}, two rounds of {num_steps} steps for each cut, the second in reverse order; all cuts are in "
            f"regret.csv. {first.device}; torch {first.torch}; {first.created}. Regret is the chosen cut's measured step "
            "over the best measured one's, less 1; *two rounds apart* is the median over the cuts of what the same cut's "
            "two rounds differ by.\n",
            *lines,
            "\n![every cut](regret.png)\n",
        ]
    )


if __name__ == "__main__":
    main()
