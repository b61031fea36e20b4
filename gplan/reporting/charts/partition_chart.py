"""The partition: the cost of every layer in model order with the cuts, and below it the cost of each stage.

A stage's bar is its time of one micro-batch: forward, backward (or its halves), recompute, and the transfers that it
receives.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gplan.core import ActionKind, Plan, Run
from gplan.core.units import counted, ends_text, pipeline_text, seconds_axis, seconds_text
from gplan.reporting.charts.canvas import (
    blank_figure,
    end_of_name,
    headline,
    legend,
    note,
    short_names,
    stage_text,
    swatch,
)
from gplan.reporting.looks import ACTIONS, BAND, COMMUNICATION, FAINT, INK, RECOMPUTE, Look
from gplan.reporting.subject import MEASURED, PASSES, PREDICTED, Load, Subject, plan_of, stage_loads

_PARTS: dict[str, Look] = {
    **{part: ACTIONS[kind] for part, kind in PASSES.items()},
    "recompute_s": RECOMPUTE,
    "communication_s": COMMUNICATION,
}
_LONGEST_NAME, _LONGEST_UPRIGHT = 22, 18  # characters
_MOST_SLANTED = 26
_MOST_LABELS = 60  # that stand side by side, upright
_FLAT_CHARACTERS = 120  # that fit on one line under the layers


def partition_chart(subject: Subject) -> Figure:
    """Layers with the cuts above, cost of each stage below; for a run, measured beside predicted."""
    plan, loads = plan_of(subject), stage_loads(subject)
    stage_inches = 0.5 + plan.num_stages * (0.62 if isinstance(subject, Run) else 0.42)
    figure = blank_figure(3.6 + stage_inches)
    above, below = figure.subplots(2, 1, height_ratios=[2.6, stage_inches])
    _draw_layers(above, plan)
    _draw_stages(below, plan, loads)
    used = {part for side in loads.values() for load in side for part, seconds in load.items() if seconds > 0}
    legend(figure, [swatch(look) for part, look in _PARTS.items() if part in used or part == "backward_s"])
    name = end_of_name(plan.model.name, 60)
    cut = f"{counted(len(plan.layer_names), 'layer')} in {pipeline_text(plan.num_stages, plan.num_devices)}"
    headline(figure, f"Partition of {name}: {cut}")
    return figure


def _draw_layers(axes: Axes, plan: Plan) -> None:
    times_s = np.array([times for stage in plan.stages for times in stage.layer_times_s])
    unit, scale = seconds_axis(float(times_s.sum(axis=1).max()))
    forward, backward = times_s.T / scale
    for bottom, height, kind in ((0, forward, ActionKind.FORWARD), (forward, backward, ActionKind.BACKWARD)):
        colour = ACTIONS[kind].colour
        axes.bar(range(len(times_s)), height, bottom=bottom, width=0.86, color=colour)
    top = 1.16 * float((forward + backward).max()) or 1.0
    axes.set(xlim=(-0.5, len(times_s) - 0.5), ylim=(0, top), ylabel=f"{unit} per micro-batch")
    axes.set_title("Layers in model order, cut into stages", loc="left")
    axes.grid(axis="y")
    _draw_cuts(axes, plan, top=top)
    _label_layers(axes, plan.layer_names)


def _draw_cuts(axes: Axes, plan: Plan, *, top: float) -> None:
    """A band per stage, a dashed line at every cut, the stage's number on top."""
    for stage in plan.stages:
        index, first, last = stage.index, stage.first_layer, stage.end_layer - 1
        if index % 2:
            axes.axvspan(first - 0.5, last + 0.5, facecolor=BAND.light, zorder=0)
        if index:
            axes.axvline(first - 0.5, color=INK.light, linewidth=1.0, linestyle=(0, (4, 3)))
        wide = stage.num_layers / len(plan.layer_names) > 0.065
        label = f"stage {index}" if wide else str(index)
        axes.text((first + last) / 2, 0.97 * top, label, ha="center", va="top", color=FAINT.light, fontsize=8.5)


def _label_layers(axes: Axes, layers: Sequence[str]) -> None:
    """Names horizontal if they fit, else slanted; of many layers only some, vertical."""
    longest = _LONGEST_NAME if len(layers) <= _MOST_SLANTED else _LONGEST_UPRIGHT
    names = short_names(layers, longest)
    every = -(-len(names) // _MOST_LABELS)
    positions = range(0, len(names), every)
    flat = len(names) * (max(len(name) for name in names) + 2) <= _FLAT_CHARACTERS
    rotation, size = (0, 8.5) if flat else (35, 8) if len(names) <= _MOST_SLANTED else (90, 7)
    axes.set_xticks(positions, [names[i] for i in positions], rotation=rotation, fontsize=size)
    for label in axes.get_xticklabels():
        label.set(ha="right" if rotation == 35 else "center", rotation_mode="anchor" if rotation == 35 else "default")
    axes.tick_params(axis="x", length=0)


def _draw_stages(axes: Axes, plan: Plan, loads: dict[str, list[Load]]) -> None:
    largest_s = max(sum(load.values()) for side in loads.values() for load in side)
    unit, scale = seconds_axis(largest_s)
    height = 0.74 / len(loads)
    for place, (side, own) in enumerate(loads.items()):
        middle = np.arange(plan.num_stages) + (place - (len(loads) - 1) / 2) * height
        left = np.zeros(plan.num_stages)
        for part, look in _PARTS.items():
            width = np.array([load[part] for load in own]) / scale
            axes.barh(middle, width, left=left, height=0.86 * height, color=look.colour)
            left = left + width
        for y, end, load in zip(middle, left, own, strict=True):
            colour = INK.light if side == MEASURED else FAINT.light
            label = f"{seconds_text(sum(load.values()))} {side}"
            note(axes, end, y, label, xytext=(4, 0), va="center", fontsize=8.5, color=colour)
    mean_s = sum(sum(load.values()) for load in loads[PREDICTED]) / plan.num_stages
    axes.axvline(mean_s / scale, color=INK.light, linewidth=1.0, linestyle=(0, (1, 2)))
    mean = f"dotted: mean of the predicted stages {seconds_text(mean_s)}"
    axes.set_title(mean, loc="right", fontsize=8.5, color=FAINT.light)
    shorter = short_names(plan.layer_names, _LONGEST_UPRIGHT)
    layers = [shorter[x.first_layer : x.end_layer] for x in plan.stages]
    names = [f"{stage_text(plan, i)}\n{ends_text(own)}" for i, own in enumerate(layers)]
    axes.set_yticks(range(plan.num_stages), names)
    axes.set(ylim=(plan.num_stages - 0.5, -0.5), xlim=(0, 1.22 * largest_s / scale or 1.0))
    axes.set_xlabel(f"{unit} per micro-batch")
    axes.set_title("Cost of each stage", loc="left")
    axes.grid(axis="x")
    axes.tick_params(axis="y", length=0)
