"""From runs to the figures of the tables: normalised throughputs and shares of the step, medians over the rounds.

Every figure is made within one round first, so that a host which was slower in one round than in another changes none.
"""

from __future__ import annotations

import pandas as pd

from paper.measured_parts import PARTS

BREAKDOWN = ("forward", "backward", "recompute", *PARTS[2:])
_CELL = ["model", "way", "engine", "k", "m"]


def throughputs(table: pd.DataFrame) -> pd.DataFrame:
    """By model, way, engine, k and m: how many times the throughput of the engine's first cell, gplan's best with
    the fewest devices and micro-batches.

    `even` is what was measured, had a sample cost in every micro-batch what it cost in that first cell; `spread` is the
    largest over the smallest of the rounds, less 1.
    """
    found = table[table.recompute == "always"].copy()
    found["computing_s"] = found.k * found.measured_step_s * (found.measured_forward + found.measured_backward)
    first = found[(found.way == "best") & (found.k == found.k.min()) & (found.m == found.m.min())]
    place = ["model", "engine", "round"]
    seconds = ["predicted_step_s", "measured_step_s", "computing_s"]
    joined = found.join(first.set_index(place)[seconds].add_suffix("_first"), on=place)
    joined["predicted"] = joined.predicted_step_s_first / joined.predicted_step_s
    joined["measured"] = joined.measured_step_s_first / joined.measured_step_s
    joined["cost"] = joined.computing_s / joined.computing_s_first
    joined["even"] = joined.measured * joined.cost
    grouped = joined.groupby(_CELL, sort=False)
    medians = grouped[["predicted", "measured", "even", "cost", "predicted_step_s", "measured_step_s"]].median()
    medians["spread"] = grouped.measured.max() / grouped.measured.min() - 1
    return medians.reset_index()


def breakdowns(table: pd.DataFrame) -> pd.DataFrame:
    """By model, way, engine and k: shares of the step with the most micro-batches, predicted_* and measured_*.

    Of a measured backward the same part is recompute as where its plan was run without: the layers are the same
    whatever the stages.
    """
    full = table[(table.m == table.m.max()) & (table.recompute == "always")].copy()
    share = recompute_of_backward(table)
    of_backward = [share[model, number] for model, number in zip(full.model, full["round"], strict=True)]
    full["measured_recompute"] = full.measured_backward * of_backward
    for origin in ("predicted", "measured"):
        full[f"{origin}_backward"] -= full[f"{origin}_recompute"]
    columns = [f"{origin}_{part}" for origin in ("predicted", "measured") for part in BREAKDOWN]
    found: pd.DataFrame = full.groupby(_CELL, sort=False)[columns].median().reset_index()
    return found


def recompute_of_backward(table: pd.DataFrame) -> dict[tuple[str, int], float]:
    """By model and round: what share of a recomputing backward is not there without recompute,
    on the virtual engine."""
    without = table[table.recompute == "never"]
    keys = ["model", "way", "engine", "k", "m", "round"]
    pairs = without.merge(table[table.recompute == "always"], on=keys, suffixes=("_without", "_with"))
    plain_s, whole_s = (pairs[f"measured_backward_{x}"] * pairs[f"measured_step_s_{x}"] for x in ("without", "with"))
    shares = (1 - plain_s / whole_s).clip(lower=0.0)
    return dict(zip(zip(pairs.model, pairs["round"], strict=True), shares, strict=True))
