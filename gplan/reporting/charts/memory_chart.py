"""Memory: the predicted peak of every device by category, and its course over the step, against the memory limit.

A run's measured peaks are beside them. If devices hold several stages, each category is divided among the stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from gplan.core import Plan
from gplan.core.schedule import moment_text
from gplan.core.units import bytes_axis, bytes_text, seconds_axis
from gplan.reporting.charts.canvas import HALF_INCHES, Handle, blank_figure, headline, legend, note, stages_text, swatch
from gplan.reporting.looks import CAPACITY, FAINT, INK, MEASURED_PEAK, MEMORY, PAPER
from gplan.reporting.subject import Subject, capacity_bytes, capacity_name, measured_peaks, plan_of
from gplan.simulation.memory_timeline import Holding, fullest, memory_timeline

_FARTHEST_CAPACITY = 3.0  # times the largest peak; a higher limit would flatten the chart
_HEADROOM = 1.12, 1.25  # for totals; upright ones are longer
_MOST_NAMED, _MOST_NUMBERED = 4, 20  # devices for which there is room


def memory_chart(subject: Subject) -> Figure:
    """Stacked predicted peak per device, for a run the measured peak beside it, and the limit if it is near."""
    plan, measured = plan_of(subject), measured_peaks(subject)
    figure = blank_figure(min(5.6, 1.4 + 0.85 * max(3, plan.num_devices)), width_inches=HALF_INCHES)
    axes = figure.subplots()
    tallest = max(*plan.device_peak_bytes, *measured, 0)
    capacity = near_capacity(plan, tallest)
    top = max(tallest, capacity or 0)
    unit, scale = bytes_axis(top)
    _draw_bars(axes, plan, measured, scale=scale)
    axes.set(
        ylim=(0, _HEADROOM[plan.num_devices > _MOST_NAMED] * top / scale or 1.0),
        ylabel=unit,
        xlim=(-0.6, plan.num_devices - 0.4),
    )
    devices = range(plan.num_devices)
    if len(devices) > _MOST_NAMED:  # their numbers alone
        axes.set_xticks(devices[:: -(-len(devices) // _MOST_NUMBERED)])
        axes.set_xlabel("device")
    else:
        axes.set_xticks(devices, [_device_text(plan, i) for i in devices], fontsize=8)
    axes.grid(axis="y")
    axes.tick_params(axis="x", length=0)
    held = {category: sum(getattr(x.memory, category) for x in plan.stages) for category in MEMORY}
    handles = [*category_handles(held), *([swatch(MEASURED_PEAK)] if measured else [])]
    if capacity is not None:
        handles.append(draw_capacity(axes, capacity, scale=scale))
    axes.set_title(capacity_text(plan, tallest), loc="right", fontsize=8.5, color=FAINT.light)
    legend(figure, handles, most_in_a_row=3)
    headline(figure, "Peak memory of each device")
    return figure


def near_capacity(plan: Plan, most_bytes: int) -> int | None:
    """The memory limit of a device if it is known and near enough to the peaks to be drawn."""
    capacity = capacity_bytes(plan)
    return capacity if capacity is not None and capacity <= _FARTHEST_CAPACITY * most_bytes else None


def draw_capacity(axes: Axes, capacity: int, *, scale: float) -> Artist:
    """A dashed line at the memory limit; returns its handle for the legend."""
    style = {"color": CAPACITY.colour, "linewidth": 1.4, "linestyle": (0, (5, 3))}
    axes.axhline(capacity / scale, **style)  # type: ignore[arg-type]
    return Line2D([], [], label=CAPACITY.name, **style)  # type: ignore[arg-type]


def capacity_text(plan: Plan, most_bytes: int) -> str:
    """The memory limit in words."""
    capacity = capacity_bytes(plan)
    if capacity is None:
        return "no memory limit is known"
    far = near_capacity(plan, most_bytes) is None
    return f"{capacity_name(plan)}: {bytes_text(capacity)}" + (", above this axis" if far else "")


def category_handles(held_bytes: Mapping[str, int]) -> list[Artist]:
    """The legend of the categories that are not empty."""
    return [swatch(look) for category, look in MEMORY.items() if held_bytes[category] > 0]


def _draw_bars(axes: Axes, plan: Plan, measured: Sequence[int], *, scale: float) -> None:
    places, stages = np.arange(plan.num_devices), [plan.stages_of(device) for device in range(plan.num_devices)]
    aside, width = (0.2, 0.36) if measured else (0.0, 0.5)
    seam_points = 0.5 if plan.has_chunks else 0.0
    bottom = np.zeros(plan.num_devices)
    for (category, look), chunk in product(MEMORY.items(), range(max(map(len, stages)))):
        held = [getattr(own[chunk].memory, category) if chunk < len(own) else 0 for own in stages]
        height = np.array(held) / scale
        axes.bar(
            places - aside, height, bottom=bottom, width=width, color=look.colour, edgecolor=PAPER.light,
            linewidth=seam_points,
        )  # fmt: skip
        bottom = bottom + height
    _write_totals(axes, plan.device_peak_bytes, aside=-aside, scale=scale)
    if measured:
        axes.bar(places + aside, np.array(measured) / scale, width=width, color=MEASURED_PEAK.colour)
        _write_totals(axes, measured, aside=aside, scale=scale)


def _write_totals(axes: Axes, totals: Sequence[int], *, aside: float, scale: float) -> None:
    rotation = 90 if len(totals) > _MOST_NAMED else 0
    for device, total in enumerate(totals):
        x, y, words = device + aside, total / scale, bytes_text(total)
        style = {"ha": "center", "va": "bottom", "fontsize": 7.5, "color": INK.light, "rotation": rotation}
        note(axes, x, y, words, xytext=(0, 3), **style)


def _device_text(plan: Plan, device: int) -> str:
    """A device with its stages and the moment of its peak."""
    stages = plan.stages_of(device)
    numbers = [stages_text([x.index for x in stages])] if plan.has_chunks else []
    peak = f"peak: {moment_text(stages[0].memory.moment, with_stage=plan.has_chunks)}"
    return "\n".join([f"device {device}", *numbers, peak.replace(" of ", "\nof ").replace(" in ", "\nin ")])


_MOST_DEVICES = 8  # of more, those with the largest peaks
_TIMELINE_HEADROOM = 1.32  # for the words at the peak
_SHORTEST = 1 / 5000  # visible share of the step
_WORDS = 0.27  # their share of the axis
_MEASURED_LINE = {"color": MEASURED_PEAK.colour, "linewidth": 1.4}


def holdings_chart(subject: Subject) -> Figure | None:
    """One panel per device, all with the same axes; None if the plan has no memory by category."""
    plan, measured = plan_of(subject), measured_peaks(subject)
    held = memory_timeline(plan)
    if not held:
        return None
    peaks = list[Holding]()
    for device, own in enumerate(held):  # of several moments of a device's peak the one that the plan names
        most = [x for x in own if x.num_bytes == fullest(own).num_bytes]
        named = plan.stages_of(device)[0].memory.moment
        peaks.append(next((x for x in most if x.action == named), most[0]))
    shown = sorted(sorted(range(len(held)), key=lambda device: -peaks[device].num_bytes)[:_MOST_DEVICES])
    most_bytes = max(*(x.num_bytes for x in peaks), *measured, 1)
    capacity = near_capacity(plan, most_bytes)
    top = max(most_bytes, capacity or 0)
    (unit, scale), (time_unit, time_scale) = bytes_axis(top), seconds_axis(plan.prediction.step_s)
    panel_inches = 0.85 if len(shown) <= 4 else 0.66
    figure = blank_figure(1.4 + max(2.6, panel_inches * len(shown)), width_inches=HALF_INCHES)
    panels = figure.subplots(len(shown), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    panels[0].set_ylim(0, _TIMELINE_HEADROOM * top / scale)
    handles: list[Handle] = [
        *category_handles({category: max(y.category_bytes(category) for x in held for y in x) for category in MEMORY}),
        *([Line2D([], [], label=MEASURED_PEAK.name, **_MEASURED_LINE)] if measured else []),  # type: ignore[arg-type]
    ]
    for axes, device in zip(panels, shown, strict=True):
        draw_holdings(axes, held[device], scale=scale, time_scale=time_scale)
        lines = [*measured[device : device + 1], *([capacity] if capacity else [])]
        _mark_peak(axes, plan, peaks[device], lines, scale=scale, time_scale=time_scale)
        if measured:
            axes.axhline(measured[device] / scale, **_MEASURED_LINE)
        limit = [draw_capacity(axes, capacity, scale=scale)] if capacity is not None else []
        stages = f"\n{stages_text([x.index for x in plan.stages_of(device)])}" if plan.has_chunks else ""
        axes.set_ylabel(f"device {device}{stages}", rotation=0, ha="right", va="center", labelpad=12, fontsize=8.5)
        axes.yaxis.label.set_color(INK.light)
        axes.locator_params(axis="y", nbins=3)
        axes.grid(axis="y")
    panels[0].set_title(f"in {unit}; {capacity_text(plan, most_bytes)}", loc="right", fontsize=8.5, color=FAINT.light)
    panels[-1].set(
        xlabel=f"time in the predicted step, {time_unit}", xlim=(0, 1.005 * plan.prediction.step_s / time_scale)
    )
    legend(figure, [*handles, *limit], most_in_a_row=3)
    which = (
        "each device" if len(shown) == len(held) else f"the {len(shown)} of {len(held)} devices with the largest peaks"
    )
    headline(figure, f"Memory of {which}")
    return figure


def draw_holdings(axes: Axes, held: Sequence[Holding], *, scale: float, time_scale: float) -> None:
    """The memory of one device as stacked areas, in units of `scale` bytes and `time_scale` seconds."""
    lasting = [x for x in held if x.end_s - x.start_s > _SHORTEST * held[-1].end_s]
    edges = np.array([*(x.start_s for x in lasting), lasting[-1].end_s]) / time_scale
    low = np.zeros(len(lasting))
    for category, look in MEMORY.items():
        high = low + np.array([x.category_bytes(category) for x in lasting]) / scale
        is_new = np.concatenate([[True], (np.diff(low) != 0) | (np.diff(high) != 0)])
        if (high > low).any():
            where = np.append(edges[:-1][is_new], edges[-1])
            axes.stairs(high[is_new], where, baseline=low[is_new], fill=True, color=look.colour, linewidth=0)
        low = high


def _mark_peak(axes: Axes, plan: Plan, peak: Holding, lines: Sequence[int], *, scale: float, time_scale: float) -> None:
    """A dot at the peak, and above it and any line near it the bytes and the action."""
    x, y = (peak.start_s + peak.end_s) / 2 / time_scale, peak.num_bytes
    axes.plot([x], [y / scale], marker="o", markersize=4, color=INK.light, clip_on=False)
    for line in sorted(lines):
        y = max(y, line) if line < y + _WORDS * axes.get_ylim()[1] * scale else y
    words = f"{bytes_text(peak.num_bytes)} in {moment_text(peak.action, with_stage=plan.has_chunks)}"
    share = x * time_scale / plan.prediction.step_s
    align = "left" if share < 0.2 else "right" if share > 0.8 else "center"
    note(axes, x, y / scale, words, xytext=(0, 5), ha=align, va="bottom", fontsize=8, color=INK.light)
