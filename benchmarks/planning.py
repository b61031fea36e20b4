"""How long plans take to find and to prove: published optima, graphs, long chains.

    python benchmarks/planning.py                        about three minutes
    python benchmarks/planning.py --parts chains         some of it; the other tables stay as they are

- published: every row of reference.csv (data/README.md there) by the dynamic program and by the mixed-integer program,
  60 s each; an optimum counts as found if it is within 1e-9, INFEASIBLE included;
- graphs: the published profiles, and the examples by single operations computed for an H100, K = 2, 4, 8, the default
  objective (the step of GPipe with M = 4 K) and 1F1B;
- chains: made-up chains, with and without transfers and a memory limit that binds.

The published data are looked for in the folder that GPLAN_REFERENCE_DATA names, by default ../shared/data beside the
project. One thread; seconds are of one run, as they came.
"""

from __future__ import annotations

import csv
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import numpy as np
import pandas as pd
from published import Answer, PublishedGraph, read_graph, solve
from published.solving import Solver
from suite import DATA, ROOT, example, markdown, options_of, write_report

sys.path.insert(0, str(ROOT))

import gplan
from gplan.core import Link, Plan, Profile, Value, ValueCost
from gplan.core.errors import GplanError
from gplan.graph.down_sets import down_sets
from gplan.graph.layer_graph import LayerGraph
from tests.made import make_profile

PEERS = DATA / "peers"
SOLVERS: tuple[Solver, ...] = ("dp", "milp")
EXAMPLES = ("transformer_lm", "unet", "resnet", "gpt2_hf", "bert_hf", "llama_hf", "t5_hf", "amoebanet_d")

Row = dict[str, Any]


def published() -> Iterator[Row]:
    """Every published optimum by both methods."""
    with (PEERS / "reference.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        graph, found = read_graph(PEERS / row["input"]), {"input": row["input"], "k": row["k"]}
        found |= {"memory": row["memory_limit_bytes"], "optimum": row["optimum"]}
        memory_bytes = int(row["memory_limit_bytes"]) if row["memory_limit_bytes"] else None
        for solver in SOLVERS:
            answer = solve(graph, num_devices=int(row["k"]), memory_bytes=memory_bytes, solver=solver)
            found[f"{solver}_s"] = f"{answer.seconds:.2f}"
            found[solver] = verdict(answer, None if row["optimum"] == "INFEASIBLE" else float(row["optimum"]))
        yield found


def verdict(answer: Answer, expected: float | None) -> str:
    """How an answer compares with the published one."""
    if expected is None or answer.value is None:
        return "equal" if expected == answer.value else f"{answer.value} where {expected} was expected"
    is_equal = abs(answer.value / expected - 1) <= 1e-9
    text = "equal" if is_equal else f"{answer.value / expected - 1:+.1%}"
    return text if answer.is_proven else f"{text}, not proven"


def graphs() -> Iterator[Row]:
    """Branched profiles, each K, both schedules."""
    for name, profile in branched():
        positions = down_sets(LayerGraph(len(profile.layers), profile.precedence), most=10**6)
        for num_devices in (2, 4, 8):
            num_positions = positions.size if positions else "over 1,000,000"
            row: Row = {"profile": name, "layers": len(profile.layers), "down-sets": num_positions, "k": num_devices}
            for schedule in ("gpipe", "1f1b"):
                asked = {"num_devices": num_devices, "num_microbatches": 4 * num_devices, "schedule": schedule}
                plan, taken_s = timed_plan(profile, **asked)
                row |= {f"{schedule}_s": round(taken_s, 2), f"{schedule}_gap": gap_text(plan)}
            yield row


def branched() -> Iterator[tuple[str, Profile]]:
    """The published profiles without a memory limit, and the examples' operations."""
    for path in published_files():
        yield path.name, published_profile(read_graph(path))
    for name in EXAMPLES:
        yield f"{name}, operations", gplan.profile(example(name), device="meta", hardware="h100", granularity="op")


def published_profile(graph: PublishedGraph) -> Profile:
    """A published graph as a profile: a backward takes twice its forward, values move at 1 GB/s, half of it back."""
    order, unit_s = graph.running_order, {"ms": 1e-3, "s": 1.0}[graph.unit]
    place = {layer: i for i, layer in enumerate(order)}
    after = {(place[a], place[b]) for a, b in graph.precedence}
    moved: dict[tuple[int, ...], float] = {}
    for ends, seconds in graph.shared.items():
        producer, *readers = sorted(place[x] for x in ends)
        if all((producer, x) in after for x in readers):
            moved[(producer, *readers)] = seconds * unit_s
    kept = {(producer, x) for producer, *readers in moved for x in readers}
    moved |= dict.fromkeys(sorted(after - kept), 0.0)
    values = []
    for (producer, *readers), seconds in moved.items():
        num_bytes = round(seconds / 2 * 1e9)
        cost = ValueCost(microbatch_size=1, num_bytes=num_bytes, gradient_bytes=num_bytes)
        values.append(Value(producer=producer, consumers=tuple(readers), costs=(cost,)))
    made = make_profile([graph.compute[x] * unit_s / 3 for x in order], link=Link(latency_s=0.0, bytes_per_s=1e9))
    return replace(made, values=tuple(values))


def published_files() -> list[Any]:
    """The published profiles of both planners."""
    return sorted([*PEERS.glob("dnn-partitioning/*.json"), *PEERS.glob("pipedream/*.graph.txt")])


def chain_profile(num_layers: int, *, has_transfers: bool) -> Profile:
    """Layers of random cost, weights and activations; a backward takes twice its forward."""
    draw, drawn = np.random.default_rng(0), list[tuple[float, int, int, int]]()
    for _ in range(num_layers):
        forward_s, weights, stash = draw.uniform(1e-3, 6e-3), draw.integers(1, 100), draw.integers(1, 100)
        output = draw.integers(1, 10) if has_transfers else 0
        drawn.append((float(forward_s), int(weights) << 20, int(stash) << 20, int(output) << 20))
    seconds, weights, stashes, outputs = zip(*drawn, strict=True)
    link = Link(latency_s=1e-5, bytes_per_s=1e10)
    return make_profile(seconds, weight_bytes=weights, stash_bytes=stashes, output_bytes=outputs, link=link)


def chains() -> Iterator[Row]:
    """Long chains."""
    cases = [
        (1_000, 64, "max-stage", True, True),
        (10_000, 128, "max-stage", False, False),
        (10_000, 128, "max-stage", True, False),
        (100, 8, "step-time", True, True),
        (1_000, 16, "step-time", True, True),
        (1_000, 64, "step-time", True, False),
    ]
    for num_layers, num_devices, minimize, has_transfers, has_memory in cases:
        profile = chain_profile(num_layers, has_transfers=has_transfers)
        asked: Row = {"num_devices": num_devices, "num_microbatches": 4 * num_devices, "minimize": minimize}
        for schedule in ("gpipe", "1f1b") if minimize == "step-time" else ("1f1b",):
            if has_memory:
                free = gplan.balance(profile, schedule=schedule, **(asked | {"memory_bytes": None}))
                asked["memory_bytes"] = int(0.97 * free.peak_bytes)
            plan, taken_s = timed_plan(profile, schedule=schedule, **asked)
            yield {
                "layers": num_layers, "k": num_devices, "minimize": minimize, "schedule": schedule, "transfers": has_transfers,
                "memory": has_memory, "seconds": round(taken_s, 2), "gap": gap_text(plan),
            }  # fmt: skip


PARTS: dict[str, Callable[[], Iterator[Row]]] = {"published": published, "graphs": graphs, "chains": chains}


def timed_plan(profile: Profile, **asked: Any) -> tuple[Plan | str, float]:
    """A plan, or the name of the error in its place, and the seconds it took."""
    started_s = time.perf_counter()
    try:
        plan: Plan | str = gplan.balance(profile, **asked)
    except GplanError as error:
        plan = type(error).__name__
    return plan, time.perf_counter() - started_s


def gap_text(plan: Plan | str) -> str:
    """The gap of a plan; "proven" for none."""
    if isinstance(plan, str):
        return plan
    return "proven" if plan.proof.is_proven else f"{plan.proof.gap:.2%}"


def main() -> None:
    """Run the parts and write their tables."""
    parser = options_of(__doc__, "planning")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    for part in options.parts:
        rows = []
        for row in PARTS[part]():
            print(part, row, flush=True)
            rows.append(row)
        pd.DataFrame(rows).to_csv(options.output / f"{part}.csv", index=False)
    host = f"{platform.machine()}, {os.cpu_count()} cores, python {platform.python_version()}, numpy {np.__version__}"
    lines = [
        "# How long plans take\n",
        f"`python benchmarks/planning.py`: {host}; {datetime.now(tz=timezone.utc):%Y-%m-%d}. What the tables hold is said at the top "
        "of `benchmarks/planning.py`.",
    ]
    for part in PARTS:
        path = options.output / f"{part}.csv"
        if path.exists():
            table = pd.read_csv(path, dtype=str, keep_default_na=False)
            lines += ["", f"## {part.capitalize()}", "", *markdown(table.columns, table.to_numpy())]
    write_report(options.output, lines)


if __name__ == "__main__":
    main()
