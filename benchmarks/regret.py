"""Is the chosen cut the best one? Every cut into K = 2 stages of four examples, run on two processes.

    python benchmarks/regret.py                about 15 minutes on 2 idle cores; writes reports/regret/
    python benchmarks/regret.py --real-size    GPT-2, Llama and T5 of 124 to 223 million parameters, with and without
                                               recompute: the chosen cut and the two to either side; about 80 minutes;
                                               writes reports/regret/real-size/

Each model is profiled once; then its cuts run in turns, every second round in reverse order, so that drift of the
host hits all alike. A cut's time is the smallest of its rounds' median steps, as disturbances only ever add. Regret: the
chosen cut's time over the best one's, less 1; how far a cut's two smallest rounds are apart says how much of that is
noise. A second regret is by the median of the rounds' steps, each at equal host speed. At real size the profiles are
those that benchmarks/real_size.py keeps. Rounds that were run with them are not run again: --rounds 4 adds two. A profile
of another day starts a new measurement, with its own row in the table. --rounds 0 writes table and chart anew.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from real_size import profile_of, slowdown
from suite import REPORTS, Rows, example, markdown, write_report

import gplan
from gplan.core import Constraints, Plan, Profile, Run
from gplan.core.units import percent_text, seconds_text
from gplan.evaluate.compare import STEP_TIME

NUM_MICROBATCHES, MICROBATCH_SIZE = 8, 4
NUM_BESIDE = 2  # layers to either side of the chosen cut, at real size


@dataclass(frozen=True, slots=True)
class Case:
    """A model and how it recomputes."""

    model: str
    recompute: str = "never"
    is_real_size: bool = False

    @property
    def name(self) -> str:
        """In tables and charts."""
        return self.model if not self.is_real_size else f"{self.model}, recompute {self.recompute}"

    def profile(self) -> Profile:
        """Measured now, or that of the real-size suite."""
        if self.is_real_size:
            return profile_of(self.model)
        return gplan.profile(example(self.model), microbatch_sizes=[MICROBATCH_SIZE])

    def planned(self, profile: Profile, cut_after: str | None = None) -> Plan:
        """The best plan, or that with the given cut."""
        return gplan.balance(
            profile,
            num_devices=2,
            num_microbatches=NUM_MICROBATCHES,
            recompute=self.recompute,
            constraints=Constraints() if cut_after is None else Constraints(cut_after=(cut_after,)),
        )

    def cuts(self, profile: Profile, chosen: Plan) -> list[str]:
        """The layers to cut after: all, or those around the chosen one."""
        names = [layer.name for layer in profile.layers[:-1]]
        if not self.is_real_size:
            return names
        at = names.index(chosen.stages[0].layer_names[-1])
        return names[max(0, at - NUM_BESIDE) : at + NUM_BESIDE + 1]


EXAMPLES = tuple(Case(x) for x in ("transformer_lm", "gpt2_hf", "resnet", "unet"))
REAL_SIZE = tuple(Case(x, recompute, True) for x in ("gpt2", "llama", "t5") for recompute in ("never", "always"))


def main() -> None:
    """Run the cuts of every case, then write the table and the chart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", help="only these")
    parser.add_argument("--real-size", action="store_true", help="models of real size, cuts around the chosen one")
    parser.add_argument("--recompute", nargs="*", default=["never", "always"], help="only these")
    parser.add_argument("--rounds", type=int, default=2, help="over the cuts of a case")
    parser.add_argument("--steps", type=int, default=10, help="of each run")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    cases = [
        x
        for x in (REAL_SIZE if options.real_size else EXAMPLES)
        if x.model in (options.models or [x.model]) and x.recompute in options.recompute
    ]
    folder = options.output or REPORTS / "regret" / ("real-size" if options.real_size else "")
    folder.mkdir(parents=True, exist_ok=True)
    rows = Rows(folder / "regret.csv", ("model", "created", "round"))
    if options.rounds and not options.real_size:
        rows.path.unlink(missing_ok=True)
    for case in cases if options.rounds else []:
        profile = case.profile()
        for number in range(options.rounds):
            if not rows.has({"model": case.name, "created": profile.created[:10], "round": number}):
                rows.add(*measured(case, profile, number, options.steps))
    tables = [by_cut(part) for _, part in rows.table().groupby(["model", "created"], sort=False)]
    newest = {table.model[0]: table for table in sorted(tables, key=lambda x: x.created[0])}
    draw([x for x in tables if x is newest[x.model[0]]]).savefig(folder / "regret.png", dpi=150)
    write_report(folder, report(tables, options))


def measured(case: Case, profile: Profile, number: int, num_steps: int) -> list[dict[str, object]]:
    """One row for each cut of a model in one round."""
    chosen, found = case.planned(profile), list[dict[str, object]]()
    plans = [case.planned(profile, cut) for cut in case.cuts(profile, chosen)]
    for plan in plans[:: -1 if number % 2 else 1]:
        run = gplan.run(plan, profile=profile, num_steps=num_steps)
        row = {
            "model": case.name,
            "round": number,
            "cut_after": plan.stages[0].layer_names[-1],
            "is_chosen": plan.cuts == chosen.cuts,
            "predicted_s": plan.prediction.step_s,
            "measured_s": run.timeline.step_s,
            "slowdown": slowdown_of_run(run),
            "num_counted": run.num_counted,
            "num_disturbed": run.num_disturbed,
            "device": profile.device.name,
            "created": profile.created[:10],
            "torch": dict(run.versions)["torch"],
        }
        print(case.name, number, row["cut_after"], seconds_text(run.timeline.step_s), flush=True)
        found.append(row)
    return found


def slowdown_of_run(run: Run) -> float:
    """How many times longer than in the profile the step takes as the host is slower; nan if that was not measured."""
    step = gplan.compare(run).row(STEP_TIME)
    if step.error is None or step.equal_speed_error is None:
        return math.nan
    return slowdown(step.error, step.equal_speed_error)


def by_cut(rows: pd.DataFrame) -> pd.DataFrame:
    """One row for each cut of a model, in the model's order: its smallest step, and how far the second one is apart."""
    lines = []
    for _, part in rows.groupby("cut_after", sort=False):
        least, *others = sorted(part.measured_s)
        apart = others[0] / least - 1 if others else math.nan
        equal_s = (part.measured_s / part.get("slowdown", math.nan)).median(skipna=False)
        line = {"measured_s": least, "equal_s": equal_s, "rounds_apart": apart, "rounds": len(part)}
        lines.append({**part.iloc[0], **line})
    return pd.DataFrame(lines)


def draw(tables: list[pd.DataFrame]) -> Figure:
    """For each model predicted and measured steps by cut, the chosen cut marked."""
    num_rows = (len(tables) + 1) // 2
    figure = Figure(figsize=(11, 3.2 * num_rows), layout="constrained")
    for index, table in enumerate(tables):
        axes = figure.add_subplot(num_rows, 2, index + 1)
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


def report(tables: list[pd.DataFrame], options: argparse.Namespace) -> list[str]:
    """A row for each measurement of a model."""
    cells = []
    for table in tables:
        chosen, best = table[table.is_chosen].iloc[0], table.iloc[table.measured_s.argmin()]
        rank = table.predicted_s.rank().corr(table.measured_s.rank())
        cells.append([
            chosen.model, chosen.created, len(table), chosen.rounds, chosen.cut_after, seconds_text(chosen.measured_s),
            best.cut_after, seconds_text(best.measured_s), percent_text(chosen.measured_s / best.measured_s - 1),
            percent_text(table.rounds_apart.median()), f"{rank:.2f}", equal_speed_text(table),
        ])  # fmt: skip
    devices, versions = (", ".join(dict.fromkeys(x[column].iloc[0] for x in tables)) for column in ("device", "torch"))
    heads = ["model", "profiled on", "cuts", "rounds", "chosen: after", "measured", "best measured: after", "measured"]
    heads += ["regret", "two rounds apart", "rank correlation", "regret at equal host speed"]
    return [
        f"# {'Cuts around the chosen one at real size' if options.real_size else 'Every cut of four models'}, measured\n",
        f"`python benchmarks/regret.py{' --real-size' if options.real_size else ''}`: K = 2 on two processes, GPipe, "
        f"M = {NUM_MICROBATCHES} micro-batches of {1 if options.real_size else MICROBATCH_SIZE}, rounds of "
        "8 to 10 steps over the cuts, every second one in reverse order; all are in regret.csv. "
        f"{devices}; torch {versions}. Regret is the chosen cut's measured step over the "
        "best measured one's, less 1, by the smallest step of the rounds; *two rounds apart* is the median over the cuts "
        "of what a cut's two smallest rounds differ by. The last column is by the median of the rounds' steps, each at the "
        "speed that the host had in the profile. The chart shows the newest measurement of each model.\n",
        *markdown(heads, cells),
        "\n![every cut](regret.png)",
    ]


def equal_speed_text(table: pd.DataFrame) -> str:
    """The regret at equal host speed, with the best cut if that is another one; "-" if the speed was not measured."""
    if table.equal_s.isna().any():
        return "-"
    chosen, best = table[table.is_chosen].iloc[0], table.iloc[table.equal_s.argmin()]
    regret = percent_text(chosen.equal_s / best.equal_s - 1)
    return regret if best.is_chosen else f"{regret} (after {best.cut_after})"


if __name__ == "__main__":
    main()
