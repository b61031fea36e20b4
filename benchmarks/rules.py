"""The largest stage that published rules leave, over the smallest possible, on profiles that others published.

    python benchmarks/rules.py                   about a minute; writes reports/rules/

Each profile is taken as a chain: its layers in an order in which they can run, forward and backward seconds together,
no transfers and no memory. The optimum is gplan's (`--minimize max-stage`, proven). The data are looked for in the
folder that GPLAN_REFERENCE_DATA names, by default ../shared/data beside the project.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import pandas as pd
from planning_cases import UNITS_S, made_layer, made_profile
from published import read_graph

import gplan
from gplan.core import Profile
from gplan.core.errors import NoPlanError
from gplan.core.machine import FREE_LINK
from gplan.partition.baselines import RULES

ROOT = Path(__file__).parent.parent
DATA = Path(os.environ.get("GPLAN_REFERENCE_DATA", ROOT.parent / "shared" / "data"))
FILES = ("peers/dnn-partitioning/*.json", "peers/pipedream/*.graph.txt")
STAGES = (2, 4, 8, 16)


def main() -> None:
    """Compare, then write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "reports" / "rules")
    options = parser.parse_args()
    paths = sorted(path for pattern in FILES for path in DATA.glob(pattern))
    if not paths:
        parser.error(f"{DATA} has none of {', '.join(FILES)}; name its folder in GPLAN_REFERENCE_DATA")
    table = pd.DataFrame(
        [row for path in paths for num_stages in STAGES for row in compare(chain_of(path), num_stages)]
    )
    options.output.mkdir(parents=True, exist_ok=True)
    table.to_csv(options.output / "rules.csv", index=False)
    (options.output / "README.md").write_text(as_text(table))
    print((options.output / "README.md").read_text())


def chain_of(path: Path) -> Profile:
    """The layers of a published file as a chain without transfers and limits; a backward takes twice its forward."""
    graph = read_graph(path)
    unit_s, num_parameters = UNITS_S[graph.unit], [x // 4 for x in graph.parameter_bytes] or [0] * graph.num_layers
    layers = [
        replace(made_layer(str(i), forward_s=graph.compute[i] * unit_s / 3), num_parameters=num_parameters[i])
        for i in graph.running_order
    ]
    return made_profile(path.name, layers, FREE_LINK)


def compare(chain: Profile, num_stages: int) -> list[dict[str, object]]:
    """A row for each rule: its largest stage and the smallest possible, or why it has no plan."""
    plan = gplan.balance(chain, num_devices=num_stages, num_microbatches=1, minimize="max-stage")
    assert plan.proof.is_proven
    costs = [x.costs[0].forward.median_s + x.costs[0].backward.median_s for x in chain.layers]
    optimum_s = _largest_s(costs, plan.cuts)
    rows: list[dict[str, object]] = []
    for rule in RULES:
        largest_s, reason = largest_by(rule, chain, costs, num_stages)
        rows.append(
            {
                "profile": chain.model.name,
                "num_layers": len(costs),
                "num_stages": num_stages,
                "rule": rule,
                "largest_stage_s": largest_s,
                "optimum_s": optimum_s,
                "ratio": None if largest_s is None else largest_s / optimum_s,
                "no_plan": reason,
            }
        )
    return rows


def largest_by(rule: str, chain: Profile, costs: list[float], num_stages: int) -> tuple[float | None, str]:
    """Seconds of the largest stage that a rule leaves; None and the reason where it has no plan."""
    num_parameters = [x.num_parameters for x in chain.layers]
    try:
        return _largest_s(costs, RULES[rule](costs, num_parameters=num_parameters, num_stages=num_stages)), ""
    except NoPlanError as error:
        return None, str(error)


def _largest_s(costs: list[float], cuts: tuple[int, ...]) -> float:
    return max(sum(costs[i:j]) for i, j in pairwise((0, *cuts, len(costs))))


def as_text(table: pd.DataFrame) -> str:
    """Geometric mean and worst of each rule for each K, then every row, as Markdown."""
    return "\n".join(
        [
            "# Published rules against the optimum\n",
            f"`python benchmarks/rules.py`, {datetime.now(UTC).date()}: {table.profile.nunique()} profiles published with "
            "dnn-partitioning and PipeDream, each as a chain of its layers' forward and backward seconds. The figures are "
            "the largest stage over the smallest possible: 1.00 is the optimum, which gplan finds and proves on every one. "
            "Each cell has the geometric mean, the worst, and on how many profiles the rule has a plan at all.\n",
            *_summary(table),
            "",
            "DeepSpeed's default looks at parameter counts, which only PipeDream's profiles have. GPipe's rule, which its "
            "authors feed with FLOPs and which here has the seconds, and torchgpipe's leave a stage empty on some: then "
            "they have no plan, and their means are over the others. `rules.csv` has the reasons; the rules are in "
            "`gplan/partition/baselines.py`, with their sources.\n",
            "## Every profile\n",
            *_rows(table),
            "",
        ]
    )


def _summary(table: pd.DataFrame) -> list[str]:
    lines = ["| rule | " + " | ".join(f"K = {k}" for k in STAGES) + " |", "|" + "---|" * (len(STAGES) + 1)]
    for rule in RULES:
        parts = [table[(table.rule == rule) & (table.num_stages == k)].ratio for k in STAGES]
        lines.append(f"| {rule} | " + " | ".join(_cell(x) for x in parts) + " |")
    proven = [f"1.00, worst 1.00, {table.profile.nunique()} of {table.profile.nunique()}"] * len(STAGES)
    return [*lines, "| gplan | " + " | ".join(proven) + " |"]


def _cell(ratios: pd.Series[float]) -> str:
    found = ratios.dropna().astype(float)
    counted = f"{len(found)} of {len(ratios)}"
    if found.empty:
        return f"no plan, {counted}"
    return f"{found.prod() ** (1 / len(found)):.2f}, worst {found.max():.2f}, {counted}"


def _rows(table: pd.DataFrame) -> list[str]:
    lines = ["| profile | layers | K | " + " | ".join(RULES) + " |", "|" + "---|" * (3 + len(RULES))]
    for (profile, num_layers, num_stages), part in table.groupby(["profile", "num_layers", "num_stages"]):
        cells = ["no plan" if pd.isna(x) else f"{x:.3f}" for x in part.set_index("rule").ratio.reindex(list(RULES))]
        lines.append(f"| {profile} | {num_layers} | {num_stages} | " + " | ".join(cells) + " |")
    return lines


if __name__ == "__main__":
    main()
