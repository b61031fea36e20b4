"""Memory: the predicted peak of every device by category, beside the measured peak, against what a device may hold.

Where devices hold several stages, each category is divided among them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from gplan.nouns import Action, Plan
from gplan.reporting.canvas import HALF_INCHES, blank_figure, headline, legend, note, swatch
from gplan.reporting.colours import ACTIONS, CAPACITY, FAINT, INK, MEASURED_PEAK, MEMORY, PAPER
from gplan.reporting.frames import Subject, capacity_bytes, measured_peaks, memory_frame, plan_of
from gplan.reporting.layout import stages_text
from gplan.units import bytes_axis, bytes_text

_FARTHEST_CAPACITY = 3.0  # times the most that is held; beyond that the line would flatten the rest
_HEADROOM = 1.12, 1.25  # for totals; upright ones are longer
_MOST_NAMED, _MOST_NUMBERED = 4, 20  # devices for which there is room


def memory_chart(subject: Subject) -> Figure:
    """Stacked predicted peak per device, the measured peak beside it for a Run, and the capacity where it is near."""
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
    _name_devices(axes, plan)
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
    """What a device may hold, where that is known and near enough to what is held to be drawn beside it."""
    capacity = capacity_bytes(plan)
    return capacity if capacity is not None and capacity <= _FARTHEST_CAPACITY * most_bytes else None


def draw_capacity(axes: Axes, capacity: int, *, scale: float) -> Artist:
    """A dashed line at what a device may hold; returns its handle for the legend."""
    style = {"color": CAPACITY.colour, "linewidth": 1.4, "linestyle": (0, (5, 3))}
    axes.axhline(capacity / scale, **style)  # type: ignore[arg-type]
    return Line2D([], [], label=CAPACITY.name, **style)  # type: ignore[arg-type]


def capacity_text(plan: Plan, most_bytes: int) -> str:
    """What a device may hold, in words."""
    capacity = capacity_bytes(plan)
    if capacity is None:
        return "no capacity is known for the devices"
    whose = "limit of each device" if plan.memory_limit_bytes is not None else "memory of each device"
    far = near_capacity(plan, most_bytes) is None
    return f"{whose}: {bytes_text(capacity)}" + (", above this axis" if far else "")


def category_handles(held_bytes: Mapping[str, int]) -> list[Artist]:
    """The legend of the categories of which anything is held."""
    return [swatch(look) for category, look in MEMORY.items() if held_bytes[category] > 0]


def moment_text(moment: str, *, with_stage: bool) -> str:
    """An action in words: "forward 3" is the forward of micro-batch 3."""
    try:
        action = Action.parse(moment)
    except ValueError:  # the optimizer has no micro-batch
        return moment
    where = f", stage {action.stage}" if with_stage else ""
    return f"{ACTIONS[action.kind].name} {action.microbatch}{where}"


def _draw_bars(axes: Axes, plan: Plan, measured: Sequence[int], *, scale: float) -> None:
    memory, places = memory_frame(plan), np.arange(plan.num_devices)
    aside, width = (0.2, 0.36) if measured else (0.0, 0.5)
    seam_points = 0.5 if plan.num_stages > plan.num_devices else 0.0
    bottom = np.zeros(plan.num_devices)
    for (category, look), chunk in product(MEMORY.items(), range(1 + int(memory["chunk"].max()))):
        held = memory[(memory["category"] == category) & (memory["chunk"] == chunk)].set_index("device")["num_bytes"]
        height = held.reindex(places, fill_value=0).to_numpy() / scale
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


def _name_devices(axes: Axes, plan: Plan) -> None:
    """Each device with its stages and the moment of its peak; of many their numbers alone."""
    devices = range(plan.num_devices)
    if len(devices) > _MOST_NAMED:
        axes.set_xticks(devices[:: -(-len(devices) // _MOST_NUMBERED)])
        axes.set_xlabel("device")
    else:
        axes.set_xticks(devices, [_device_text(plan, i) for i in devices], fontsize=8)


def _device_text(plan: Plan, device: int) -> str:
    stages = plan.stages_of(device)
    several = plan.num_stages > plan.num_devices
    words = moment_text(stages[0].memory.moment, with_stage=several)
    if not several:
        return f"device {device}\npeak: {words}"
    return "\n".join([f"device {device}", stages_text([x.index for x in stages]), "peak:", *words.split(", ")])
