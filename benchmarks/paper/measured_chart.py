"""The chart of what was measured: above throughput beside the paper's, below the parts of a step,
predicted and measured."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gplan.core import ActionKind
from gplan.reporting.looks import ACTIONS
from paper.charts import DOTS_PER_INCH, GPLAN, PAPER, RULE
from paper.measured import SUBJECTS
from paper.measured_figures import BREAKDOWN, breakdowns, throughputs
from paper.published import DEVICE_COUNTS, Throughputs

__all__ = ["DOTS_PER_INCH", "chart"]

_COLOURS = {
    "forward": ACTIONS[ActionKind.FORWARD].colour,
    "backward": ACTIONS[ActionKind.BACKWARD].colour,
    "recompute": "#fbd9a8",
    "bubble": "#cfd6df",
    "imbalance": "#8b98a7",
    "passing": "#ffd35b",
    "optimizer": ACTIONS[ActionKind.OPTIMIZER].colour,
    "setup": "#1f2933",
}
_PROCESSES = "#1f7a4d"
_NAMES = {"passing": "transfers, engine", "setup": "set-up"}


def chart(table: pd.DataFrame) -> Figure:
    """Two panels for each model."""
    figure = Figure(figsize=(11, 8.4), layout="constrained")
    figures, parts = throughputs(table), breakdowns(table)
    models = list(dict.fromkeys(table.model))
    for model, (above, below) in zip(models, figure.subplots(2, len(models), squeeze=False).T, strict=True):
        published = {subject.title: subject.published for subject in SUBJECTS}.get(model, {})
        _draw_throughput(above, figures[figures.model == model], published)
        _draw_parts(below, parts[(parts.model == model) & (parts.way == "best")])
        above.set_title(model, loc="left", fontsize=10)
        below.set_title(f"{model}, M = {parts.m.max()}", loc="left", fontsize=10)
    return figure


def _draw_throughput(axes: Axes, table: pd.DataFrame, published: Throughputs) -> None:
    best = table[(table.way == "best") & (table.engine == "virtual")]
    device_counts, torch = sorted(set(best.k)), table[table.engine == "torch"]
    for place, m in enumerate(sorted(set(best.m))):
        part, thickness = best[best.m == m], 0.8 + 0.7 * place
        if m in published:
            axes.plot(DEVICE_COUNTS, published[m], ":", color=PAPER, linewidth=thickness)
        axes.plot(part.k, part.predicted, "o--", color=GPLAN, mfc="none", linewidth=thickness)
        axes.plot(part.k, part.measured, "x-", color=RULE, linewidth=thickness)
        axes.annotate(f"M = {m}", (part.k.iloc[-1], part.measured.iloc[-1]), xytext=(6, -3), textcoords="offset points")
    axes.plot(torch.k, torch.measured, "+", color=_PROCESSES, markersize=9)
    legend = (
        (":", PAPER, "paper"),
        ("o--", GPLAN, "predicted"),
        ("x-", RULE, "measured"),
        ("+", _PROCESSES, "measured, two processes"),
    )
    for look, colour, label in legend:
        axes.plot([], [], look, color=colour, mfc="none", label=label)
    axes.set_xticks(device_counts)
    axes.set(
        xlabel="devices K (gplan's best partition; thicker: more micro-batches)",
        ylabel="throughput, K = 2, M = 1 is 1",
        ylim=(0, None),
    )
    axes.set_xlim(1.6, 9.4)
    _finish(axes)


def _draw_parts(axes: Axes, table: pd.DataFrame) -> None:
    pairs = table.sort_values(["k", "engine"], ascending=[True, False]).to_dict("records")
    rows = [(x, origin) for x in pairs for origin in ("predicted", "measured")]
    places = [i + shift for i in range(len(pairs)) for shift in (-0.19, 0.19)]
    below = [0.0] * len(rows)
    for part in BREAKDOWN:
        heights = [100 * x[f"{origin}_{part}"] for x, origin in rows]
        axes.bar(places, heights, bottom=below, color=_COLOURS[part], width=0.34, label=_NAMES.get(part, part))
        below = [x + y for x, y in zip(below, heights, strict=True)]
    names = [f"K = {x['k']}" + (",\ntwo processes" if x["engine"] == "torch" else "") for x in pairs]
    axes.set_xticks(range(len(pairs)), names)
    axes.set(xlabel="left bar predicted, right bar measured", ylabel="% of the step, all devices", ylim=(0, 128))
    axes.set_yticks(range(0, 101, 20))
    _finish(axes, columns=4)


def _finish(axes: Axes, *, columns: int = 1) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e3e7ec", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, loc="upper left", fontsize=8, ncols=columns)
