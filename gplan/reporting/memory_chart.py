"""Memory: the predicted peak of every stage by category, beside the measured peak, against what a device may hold."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from gplan.nouns import Action, Plan
from gplan.reporting.canvas import blank_figure, headline, legend, note, swatch
from gplan.reporting.colours import ACTIONS, CAPACITY, FAINT, INK, MEASURED_PEAK, MEMORY
from gplan.reporting.frames import MEASURED, PREDICTED, Subject, capacity_bytes, memory_frame, plan_of
from gplan.units import bytes_axis, bytes_text

_FARTHEST_CAPACITY = 3.0  # times the tallest bar; beyond that the line would flatten the bars


def memory_chart(subject: Subject) -> Figure:
    """Stacked predicted peak per stage, the measured peak beside it for a Run, and the capacity where it is near."""
    plan, memory = plan_of(subject), memory_frame(subject)
    figure = blank_figure(4.6)
    axes = figure.subplots()
    tallest = float(memory.groupby(["stage", "side"])["num_bytes"].sum().max())
    capacity = capacity_bytes(plan)
    near = capacity is not None and capacity <= _FARTHEST_CAPACITY * tallest
    top = max(tallest, float(capacity or 0)) if near else tallest
    unit, scale = bytes_axis(top)
    _draw_bars(axes, memory, scale=scale)
    axes.set(ylim=(0, 1.12 * top / scale or 1.0), ylabel=unit, xlim=(-0.6, plan.num_stages - 0.4))
    labels = [f"stage {x.index}\npeak: {_moment_text(x.memory.moment)}" for x in plan.stages]
    axes.set_xticks(range(plan.num_stages), labels, fontsize=8)
    axes.grid(axis="y")
    axes.tick_params(axis="x", length=0)
    handles = _category_handles(memory)
    if capacity is not None and near:
        handles.append(_draw_capacity(axes, capacity, scale=scale))
    axes.set_title(_capacity_text(plan, near=near), loc="right", fontsize=8.5, color=FAINT.light)
    legend(figure, handles)
    headline(figure, "Peak memory of each stage")
    return figure


def _draw_bars(axes: Axes, memory: pd.DataFrame, *, scale: float) -> None:
    both = MEASURED in set(memory["side"])
    width = 0.36 if both else 0.5
    predicted = memory[memory["side"] == PREDICTED].pivot(index="stage", columns="category", values="num_bytes")
    middle = predicted.index.to_numpy() - (0.2 if both else 0.0)
    tops = np.cumsum([np.zeros(len(predicted)), *(predicted[category] / scale for category in MEMORY)], axis=0)
    for look, (low, high) in zip(MEMORY.values(), pairwise(tops), strict=True):
        axes.bar(middle, high - low, bottom=low, width=width, color=look.colour)
    _write_totals(axes, middle, predicted.sum(axis="columns"), scale=scale)
    if both:
        measured = memory[memory["side"] == MEASURED].set_index("stage")["num_bytes"]
        beside = measured.index.to_numpy() + 0.2
        axes.bar(beside, measured / scale, width=width, color=MEASURED_PEAK.colour)
        _write_totals(axes, beside, measured, scale=scale)


def _write_totals(axes: Axes, middle: np.ndarray, totals: pd.Series, *, scale: float) -> None:
    for x, total in zip(middle, totals, strict=True):
        label = bytes_text(total)
        note(axes, x, total / scale, label, xytext=(0, 3), ha="center", va="bottom", fontsize=7.5, color=INK.light)


def _draw_capacity(axes: Axes, capacity: int, *, scale: float) -> Artist:
    style = {"color": CAPACITY.colour, "linewidth": 1.4, "linestyle": (0, (5, 3))}
    axes.axhline(capacity / scale, **style)  # type: ignore[arg-type]
    return Line2D([], [], label=CAPACITY.name, **style)  # type: ignore[arg-type]


def _category_handles(memory: pd.DataFrame) -> list[Artist]:
    present = set(memory.loc[memory["num_bytes"] > 0, "category"])
    looks = [look for category, look in MEMORY.items() if category in present]
    measured = [MEASURED_PEAK] if MEASURED in set(memory["side"]) else []
    return [swatch(look) for look in (*looks, *measured)]


def _capacity_text(plan: Plan, *, near: bool) -> str:
    capacity = capacity_bytes(plan)
    if capacity is None:
        return "no capacity is known for the devices"
    whose = "limit of each device" if plan.memory_limit_bytes is not None else "memory of each device"
    return f"{whose}: {bytes_text(capacity)}" + ("" if near else ", above this axis")


def _moment_text(moment: str) -> str:
    """The action at the peak in words: "forward 3" is the forward of micro-batch 3."""
    try:
        action = Action.parse(moment)
    except ValueError:  # the optimizer has no micro-batch
        return moment
    return f"{ACTIONS[action.kind].name} {action.microbatch}"
