"""What each device holds over the predicted step, by category, its peak marked with the action, against its limit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from gplan.memory_timeline import Holding, fullest, memory_timeline
from gplan.nouns import Plan
from gplan.reporting.canvas import HALF_INCHES, Handle, blank_figure, headline, legend, note
from gplan.reporting.colours import FAINT, INK, MEASURED_PEAK, MEMORY
from gplan.reporting.frames import Subject, measured_peaks, plan_of
from gplan.reporting.layout import stages_text
from gplan.reporting.memory_chart import capacity_text, category_handles, draw_capacity, moment_text, near_capacity
from gplan.units import bytes_axis, bytes_text, seconds_axis

_MOST_DEVICES = 8  # of more, those that hold most
_HEADROOM = 1.32  # for the words at the peak
_SHORTEST = 1 / 5000  # of the step that can be seen
_WORDS = 0.27  # of the height of the axis that they take
_MEASURED_LINE = {"color": MEASURED_PEAK.colour, "linewidth": 1.4}


def holdings_chart(subject: Subject) -> Figure | None:
    """One panel per device, all with the same axes; None where the plan does not say what its memory is made of."""
    plan, measured = plan_of(subject), measured_peaks(subject)
    held = memory_timeline(plan)
    if not held:
        return None
    peaks = [_peak(x, plan.stages_of(device)[0].memory.moment) for device, x in enumerate(held)]
    shown = sorted(sorted(range(len(held)), key=lambda device: -peaks[device].num_bytes)[:_MOST_DEVICES])
    most_bytes = max(*(x.num_bytes for x in peaks), *measured, 1)
    capacity = near_capacity(plan, most_bytes)
    top = max(most_bytes, capacity or 0)
    (unit, scale), (time_unit, time_scale) = bytes_axis(top), seconds_axis(plan.prediction.step_s)
    figure = blank_figure(1.4 + max(2.6, _panel_inches(len(shown)) * len(shown)), width_inches=HALF_INCHES)
    panels = figure.subplots(len(shown), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    panels[0].set_ylim(0, _HEADROOM * top / scale)
    handles = _handles(held, measured)
    for axes, device in zip(panels, shown, strict=True):
        draw_holdings(axes, held[device], scale=scale, time_scale=time_scale)
        lines = [*measured[device : device + 1], *([capacity] if capacity else [])]
        _mark_peak(axes, plan, peaks[device], lines, scale=scale, time_scale=time_scale)
        if measured:
            axes.axhline(measured[device] / scale, **_MEASURED_LINE)
        handle = draw_capacity(axes, capacity, scale=scale) if capacity is not None else None
        _name_panel(axes, plan, device)
    panels[0].set_title(f"in {unit}; {capacity_text(plan, most_bytes)}", loc="right", fontsize=8.5, color=FAINT.light)
    panels[-1].set(
        xlabel=f"time in the predicted step, {time_unit}", xlim=(0, 1.005 * plan.prediction.step_s / time_scale)
    )
    legend(figure, [*handles, *([handle] if handle else [])], most_in_a_row=3)
    which = "each device" if len(shown) == len(held) else f"the {len(shown)} devices of {len(held)} that hold most"
    headline(figure, f"Memory of {which}")
    return figure


def draw_holdings(axes: Axes, held: Sequence[Holding], *, scale: float, time_scale: float) -> None:
    """What one device holds as areas on top of each other; in units of `scale` bytes and `time_scale` seconds."""
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


def _panel_inches(num_panels: int) -> float:
    return 0.85 if num_panels <= 4 else 0.66


def _peak(held: Sequence[Holding], moment: str) -> Holding:
    """When a device holds most; of several times the one that the plan names."""
    num_bytes = fullest(held).num_bytes
    most = [x for x in held if x.num_bytes == num_bytes]
    return next((x for x in most if x.action == moment), most[0])


def _handles(held: Sequence[Sequence[Holding]], measured: Sequence[int]) -> list[Handle]:
    most = {category: max(y.category_bytes(category) for x in held for y in x) for category in MEMORY}
    line = Line2D([], [], label=MEASURED_PEAK.name, **_MEASURED_LINE)  # type: ignore[arg-type]
    return [*category_handles(most), *([line] if measured else [])]


def _mark_peak(axes: Axes, plan: Plan, peak: Holding, lines: Sequence[int], *, scale: float, time_scale: float) -> None:
    """A dot at the peak, and above it, and above such of the lines as are near,
    how much it is and what the device does."""
    x, y = (peak.start_s + peak.end_s) / 2 / time_scale, peak.num_bytes
    axes.plot([x], [y / scale], marker="o", markersize=4, color=INK.light, clip_on=False)
    for line in sorted(lines):
        y = max(y, line) if line < y + _WORDS * axes.get_ylim()[1] * scale else y
    several = plan.num_stages > plan.num_devices
    words = f"{bytes_text(peak.num_bytes)} in {moment_text(peak.action, with_stage=several)}"
    share = x * time_scale / plan.prediction.step_s
    align = "left" if share < 0.2 else "right" if share > 0.8 else "center"
    note(axes, x, y / scale, words, xytext=(0, 5), ha=align, va="bottom", fontsize=8, color=INK.light)


def _name_panel(axes: Axes, plan: Plan, device: int) -> None:
    several = plan.num_stages > plan.num_devices
    stages = f"\n{stages_text([x.index for x in plan.stages_of(device)])}" if several else ""
    axes.set_ylabel(f"device {device}{stages}", rotation=0, ha="right", va="center", labelpad=12, fontsize=8.5)
    axes.yaxis.label.set_color(INK.light)
    axes.locator_params(axis="y", nbins=3)
    axes.grid(axis="y")
