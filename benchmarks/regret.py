"""Is the chosen cut the best one? Models of 124 to 223 million parameters, K = 2 on two processes, cuts beside the chosen one.

    python benchmarks/regret.py                about 80 minutes on 2 idle cores; goes on where it was
    python benchmarks/regret.py --rounds 0     the table of what is there, without running

GPT-2, Llama and T5, with and without recompute, are cut where the plan says and at the two layers to either side. The cuts
run in turns, every second round in reverse order, so that drift of the host hits all alike. A cut's time is the smallest
of its rounds' median steps, as disturbances only ever add. Regret: the chosen cut's time over the best one's, less 1; how
far a cut's two smallest rounds are apart says how much of that is noise. A second regret is by the median of the rounds'
steps, each at equal host speed. The profiles are those that benchmarks/real_size.py keeps; one of another day starts a new
measurement, with its own row in the table. `gplan verify` compares a plan of your own with its rivals in the same way.
"""

from __future__ import annotations

import math
from itertools import product

import pandas as pd
from real_size import profile_of, slowdown
from suite import Rows, markdown, options_of, write_report

import gplan
from gplan.core import Constraints, Profile, Run
from gplan.core.units import percent_text, seconds_text
from gplan.evaluate.compare import STEP_TIME

NUM_MICROBATCHES = 8
NUM_BESIDE = 2  # layers to either side of the chosen cut


def main() -> None:
    """Run the rounds that are missing, then write the table."""
    parser = options_of(__doc__, "regret")
    parser.add_argument("--models", nargs="*", default=["gpt2", "llama", "t5"])
    parser.add_argument("--recompute", nargs="*", default=["never", "always"])
    parser.add_argument("--rounds", type=int, default=2, help="over the cuts of a model")
    parser.add_argument("--steps", type=int, default=10, help="of each run")
    options = parser.parse_args()
    rows = Rows(options.output / "regret.csv", ("model", "created", "round"))
    for model, recompute in product(options.models, options.recompute) if options.rounds else ():
        profile, name = profile_of(model), f"{model}, recompute {recompute}"
        for number in range(options.rounds):
            if not rows.has({"model": name, "created": profile.created[:10], "round": number}):
                rows.add(*measured(name, profile, recompute, number, options.steps))
    write_report(options.output, report(rows.table()))


def measured(name: str, profile: Profile, recompute: str, number: int, num_steps: int) -> list[dict[str, object]]:
    """One row for each cut of a model in one round."""
    asked = {"num_devices": 2, "num_microbatches": NUM_MICROBATCHES, "recompute": recompute}
    chosen, found = gplan.balance(profile, **asked), list[dict[str, object]]()
    names = [layer.name for layer in profile.layers[:-1]]
    at = names.index(chosen.stages[0].layer_names[-1])
    cuts = names[max(0, at - NUM_BESIDE) : at + NUM_BESIDE + 1]
    for cut in cuts[:: -1 if number % 2 else 1]:
        plan = gplan.balance(profile, **asked, constraints=Constraints(cut_after=(cut,)))
        run = gplan.run(plan, profile=profile, num_steps=num_steps)
        print(name, number, cut, seconds_text(run.timeline.step_s), flush=True)
        found.append({
            "model": name, "round": number, "cut_after": cut, "is_chosen": plan.cuts == chosen.cuts,
            "predicted_s": plan.prediction.step_s, "measured_s": run.timeline.step_s, "slowdown": slowdown_of_run(run),
            "num_counted": run.num_counted, "num_disturbed": run.num_disturbed, "device": profile.device.name,
            "created": profile.created[:10], "torch": dict(run.versions)["torch"],
        })  # fmt: skip
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


def report(rows: pd.DataFrame) -> list[str]:
    """A row for each measurement of a model."""
    tables = [by_cut(part) for _, part in rows.groupby(["model", "created"], sort=False)]
    heads = ["model", "profiled on", "cuts", "rounds", "chosen: after", "measured", "best measured: after", "measured"]
    heads += ["regret", "two rounds apart", "rank correlation", "regret at equal host speed"]
    return [
        "# Cuts around the chosen one at real size, measured\n",
        f"`python benchmarks/regret.py`: K = 2 on two processes, GPipe, M = {NUM_MICROBATCHES} micro-batches of 1, rounds of "
        "8 to 10 steps over the cuts, every second one in reverse order; all are in regret.csv. "
        f"{', '.join(rows.device.unique())}; torch {', '.join(rows.torch.unique())}. Regret is the chosen cut's measured step over the "
        "best measured one's, less 1, by the smallest step of the rounds; *two rounds apart* is the median over the cuts "
        "of what a cut's two smallest rounds differ by. The last column is by the median of the rounds' steps, each at the "
        "speed that the host had in the profile.\n",
        *markdown(heads, map(_cells, tables)),
    ]


def _cells(table: pd.DataFrame) -> list[object]:
    chosen, best = table[table.is_chosen].iloc[0], table.iloc[table.measured_s.argmin()]
    return [
        chosen.model, chosen.created, len(table), chosen.rounds, chosen.cut_after, seconds_text(chosen.measured_s),
        best.cut_after, seconds_text(best.measured_s), percent_text(chosen.measured_s / best.measured_s - 1),
        percent_text(table.rounds_apart.median()), f"{table.predicted_s.rank().corr(table.measured_s.rank()):.2f}",
        equal_speed_text(table),
    ]  # fmt: skip


def equal_speed_text(table: pd.DataFrame) -> str:
    """The regret at equal host speed, with the best cut if that is another one; "-" if the speed was not measured."""
    if table.equal_s.isna().any():
        return "-"
    chosen, best = table[table.is_chosen].iloc[0], table.iloc[table.equal_s.argmin()]
    regret = percent_text(chosen.equal_s / best.equal_s - 1)
    return regret if best.is_chosen else f"{regret} (after {best.cut_after})"


if __name__ == "__main__":
    main()
