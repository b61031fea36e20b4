"""The charts beside the tables: the largest models by accelerators, throughput by accelerators and micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

PAPER, GPLAN, RULE = "#1f2933", "#397af2", "#c85308"
DOTS_PER_INCH = 130


def draw(tables: Mapping[str, pd.DataFrame], directory: Path) -> None:
    """Write largest.png and throughput.png."""
    largest_chart(tables["largest"]).savefig(directory / "largest.png", dpi=DOTS_PER_INCH)
    throughput_chart(tables["throughput"]).savefig(directory / "throughput.png", dpi=DOTS_PER_INCH)


def largest_chart(table: pd.DataFrame) -> Figure:
    """Parameters of the largest pipelined model against K, both models."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    for axes, model, title in zip(
        figure.subplots(1, 2),
        ("AmoebaNet-D", "Transformer"),
        ("AmoebaNet-D, 8 GiB each", "Transformer-L, 16 GiB each"),
        strict=True,
    ):
        part = table[(table.model == model) & table.is_pipelined]
        _draw_largest(axes, part)
        axes.set_title(title, loc="left")
    return figure


def _draw_largest(axes: Axes, table: pd.DataFrame) -> None:
    published = table.drop_duplicates("num_devices")
    axes.plot(published.num_devices, published.num_parameters / 1e9, "o-", color=PAPER, label="paper")
    for num_bytes, look in ((12, "s--"), (16, "^:")):
        part = table[table.bytes_per_parameter == num_bytes]
        label = f"gplan, {num_bytes} bytes a parameter"
        axes.plot(part.num_devices, part.found_parameters / 1e9, look, color=GPLAN, mfc="none", label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xticks(published.num_devices, [str(k) for k in published.num_devices])
    axes.set(xlabel="accelerators K", ylabel="billion parameters")
    _finish(axes)


def throughput_chart(table: pd.DataFrame) -> Figure:
    """A panel for each model: throughput against K, a line for each M."""
    subjects = list(table.groupby(["table", "model", "hardware"], sort=False))
    figure = Figure(figsize=(11, 7.6), layout="constrained")
    for axes, ((name, model, hardware), part) in zip(figure.subplots(2, 2).flat, subjects, strict=True):
        _draw_throughput(axes, part)
        axes.set_title(f"{name}: {model}, {hardware}", loc="left")
    return figure


def _draw_throughput(axes: Axes, table: pd.DataFrame) -> None:
    finest = table[table.cut == table.cut.iloc[-1]]
    layers = table[table.cut == "layers"]
    best = "gplan, cut between operations" if len(finest) < len(table) else "gplan's best"
    for place, (m, part) in enumerate(finest.groupby("m")):
        rule = layers[layers.m == m]
        label: Sequence[str] = ("paper", best, "GPipe's rule, whole layers") if place == 0 else ("", "", "")
        axes.plot(part.k, part.paper, "o-", color=PAPER, label=label[0])
        axes.plot(part.k, part.best, "s--", color=GPLAN, mfc="none", label=label[1])
        axes.plot(rule.k, rule.rule, "x:", color=RULE, label=label[2])
        axes.annotate(f"M = {m}", (part.k.iloc[-1], part.paper.iloc[-1]), xytext=(6, -3), textcoords="offset points")
    axes.set_xticks(sorted(set(table.k)))
    axes.set(xlabel="accelerators K", ylabel="throughput, first cell = 1", xlim=(1.6, 9.2), ylim=(0, None))
    _finish(axes)


def _finish(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e3e7ec", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, loc="upper left")
