"""The Gantt chart of timelines: a row for every device, idle time by cause, the micro-batch in each box.

device 0 | 0 1 2 . . . 0 0 1 1 2 2 O      lighter boxes: later stages of the device
device 1 | . 0 1 2 0 0 1 1 2 2 . . O      a yellow strip below a row: a transfer of its output
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from statistics import median

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from gplan.core import ActionKind, Run, Timeline
from gplan.core.units import counted, percent_text, pipeline_text, seconds_axis, seconds_text
from gplan.reporting.charts.canvas import (
    WIDTH_INCHES,
    Handle,
    blank_figure,
    boxes,
    end_of_name,
    headline,
    legend,
    stages_text,
    swatch,
)
from gplan.reporting.looks import ACTIONS, ANY_ACTION, BEFORE, COMMUNICATION, IDLE, INK, Look, of_chunk, shades_of
from gplan.reporting.subject import MEASURED, PREDICTED, Subject, plan_of, side_text, timelines_of
from gplan.schedules.registry import schedule_info
from gplan.simulation.bubble import idle_pieces
from gplan.simulation.schedule_trial import has_whole_backward

_ROW, _BOX, _STRIP = 0.88, 0.72, 0.12  # heights, of 1 per device
_AXIS_POINTS = 72 * (WIDTH_INCHES - 1.0)  # what labels leave of the width
_DIGIT_POINTS = 0.66  # width of a digit at a font size of 1
_SMALLEST_FONT, _LARGEST_FONT = 5.5, 8.5
_SEEN = 0.002  # of the step
_WHOLE = " (on stage 0 the whole backward)"


def draw_gantt(axes: Axes, timeline: Timeline, *, longest_s: float, scale: float) -> None:
    """Draw a timeline on a time axis up to `longest_s`, in units of `scale` seconds."""
    num_chunks, idle = timeline.num_chunks, idle_pieces(timeline)
    if begins_late(timeline):
        before = [(device, 0.0, timeline.loop_start_s) for device in range(timeline.num_devices)]
        _draw_boxes(axes, before, BEFORE, scale=scale)
    for cause, look in IDLE.items():
        _draw_boxes(axes, [(x.device, x.start_s, x.end_s) for x in idle if x.cause is cause], look, scale=scale)
    points_per_s = _AXIS_POINTS / longest_s
    seam = min(0.7, 0.15 * points_per_s * median(x.duration_s for x in timeline.spans))
    for (kind, look), chunk in product(ACTIONS.items(), range(num_chunks)):
        spans = [x for x in timeline.spans if x.action.kind is kind and timeline.chunks[x.action.stage] == chunk]
        shade = of_chunk(look, chunk, num_chunks=num_chunks)
        _draw_boxes(axes, [(x.device, x.start_s, x.end_s) for x in spans], shade, scale=scale, gap_points=seam)
    sent = [(x.source, x.start_s, x.end_s) for x in timeline.transfers]
    _draw_boxes(axes, sent, COMMUNICATION, scale=scale, height=_STRIP, top=_ROW / 2 - _STRIP)
    _draw_numbers(axes, timeline, scale=scale, points_per_s=points_per_s)
    _name_rows(axes, timeline)


def begins_late(timeline: Timeline) -> bool:
    """Whether the time before the first action is long enough to be visible."""
    return timeline.loop_start_s > _SEEN * timeline.step_s


def gantt_handles(timelines: Sequence[Timeline]) -> Iterator[Handle]:
    """The legend of what the timelines contain, with the shades of a device's stages side by side."""
    shown, num_chunks = shown_looks(timelines), timelines[0].num_chunks
    for kind, look in ACTIONS.items():
        if look in shown:
            words = _WHOLE if kind is ActionKind.WEIGHT_GRADIENT and any(map(has_whole_backward, timelines)) else ""
            yield _shades(look, num_chunks, words=words)
    if any(map(begins_late, timelines)):
        yield swatch(BEFORE)
    yield from (swatch(look) for look in (COMMUNICATION, *IDLE.values()) if look in shown)
    if num_chunks > 1:
        yield _shades(ANY_ACTION, num_chunks)


def shown_looks(timelines: Sequence[Timeline]) -> list[Look]:
    """The looks of all kinds of action, transfers and idle time that take time in any of the timelines."""
    spans = (ACTIONS[x.action.kind] for timeline in timelines for x in timeline.spans if x.duration_s > 0)
    transfers = (COMMUNICATION for timeline in timelines for x in timeline.transfers if x.end_s > x.start_s)
    idle = (IDLE[x.cause] for timeline in timelines for x in idle_pieces(timeline))
    return list(dict.fromkeys((*spans, *transfers, *idle)))


def _shades(look: Look, num_chunks: int, *, words: str = "") -> Handle:
    """The shades of a look, named by its name and `words`."""
    return tuple(swatch(replace(x, name=look.name + words)) for x in shades_of(look, num_chunks))


def _draw_boxes(
    axes: Axes, pieces: Sequence[tuple[int, float, float]], look: Look, *, scale: float, height: float = _BOX,
    gap_points: float = 0.0, top: float = -_ROW / 2,
) -> None:  # fmt: skip
    """Boxes from start to end in the row of their device; `top` is from the middle of the row, down."""
    device, start_s, end_s = np.array(pieces, dtype=float).reshape(-1, 3).T
    left, right, bottom = start_s / scale, end_s / scale, device + top
    boxes(axes, look, left=left, right=right, bottom=bottom, height=height, gap_points=gap_points)


def _draw_numbers(axes: Axes, timeline: Timeline, *, scale: float, points_per_s: float) -> None:
    """The micro-batch in the boxes of kinds whose boxes are wide enough, all in one font size."""
    loop = [
        (x, (points_per_s * x.duration_s - 1.5) / (_DIGIT_POINTS * len(str(x.action.microbatch))))
        for x in timeline.loop_spans
    ]
    fitting: dict[ActionKind, float] = {}
    for kind in ACTIONS:
        largest = [size for x, size in loop if x.action.kind is kind and size > 0]  # some input gradients take no time
        if largest and (usual := float(np.quantile(largest, 0.03))) >= _SMALLEST_FONT:
            fitting[kind] = usual
    common = min([_LARGEST_FONT, *fitting.values()])
    for x, size in loop:
        if x.action.kind in fitting and size >= common:
            chunk = timeline.chunks[x.action.stage]
            colour = of_chunk(ACTIONS[x.action.kind], chunk, num_chunks=timeline.num_chunks).text
            at, number = ((x.start_s + x.end_s) / 2 / scale, x.device - (_ROW - _BOX) / 2), str(x.action.microbatch)
            axes.text(*at, number, ha="center", va="center_baseline", fontsize=common, color=colour)


def _name_rows(axes: Axes, timeline: Timeline) -> None:
    """The devices, with their stages if any has several."""
    stages, several = timeline.stages_by_device, timeline.num_chunks > 1
    names = [f"device {i}" + (f"\n{stages_text(x)}" if several else "") for i, x in enumerate(stages)]
    middles = [device - (_ROW - _BOX) / 2 for device in range(len(names))]
    axes.set_yticks(middles, names, fontsize=7.5 if several else 9)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


_END, _PREDICTED_END = (0, ()), (0, (2, 2))
_ROW_INCHES, _CHUNKED_ROW_INCHES = 0.30, 0.36  # the latter has two lines of text


def pipeline_chart(subject: Subject) -> Figure:
    """The Gantt chart of one step; the measured one below the predicted one for a Run."""
    plan, timelines = plan_of(subject), timelines_of(subject)
    row_inches = _CHUNKED_ROW_INCHES if plan.has_chunks else _ROW_INCHES
    figure = blank_figure(1.35 + (row_inches * plan.num_devices + 0.45) * len(timelines))
    panels = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
    longest_s = max(x.step_s for x in timelines.values())
    unit, scale = seconds_axis(longest_s)
    for axes, (side, timeline) in zip(panels, timelines.items(), strict=True):
        draw_gantt(axes, timeline, longest_s=longest_s, scale=scale)
        axes.axvline(timeline.step_s / scale, color=INK.light, linewidth=0.9, linestyle=_END)
        virtual = side == MEASURED and isinstance(subject, Run) and subject.engine == "virtual"
        title = side_text(subject, side) + (": simulated devices" if virtual else "")
        axes.set_title(title[0].upper() + title[1:], loc="left")
        numbers = f"step {seconds_text(timeline.step_s)}, bubble {percent_text(timeline.bubble)}"
        axes.set_title(numbers, loc="right")
    if MEASURED in timelines:
        panels[-1].axvline(
            timelines[PREDICTED].step_s / scale, color=INK.light, linewidth=0.9, linestyle=_PREDICTED_END
        )
    panels[-1].set(xlabel=f"time in {unit}", xlim=(0, 1.005 * longest_s / scale))
    ends = [("end of the step", _END)] + [("predicted end", _PREDICTED_END)] * (MEASURED in timelines)
    lines = [Line2D([], [], color=INK.light, linewidth=0.9, linestyle=style, label=name) for name, style in ends]
    legend(figure, [*gantt_handles(list(timelines.values())), *lines])
    layout = f"{schedule_info(plan.schedule).title}, {pipeline_text(plan.num_stages, plan.num_devices)}"
    count = counted(plan.num_microbatches, "micro-batch")
    headline(figure, f"One step of {end_of_name(plan.model.name, 40)}: {layout}, {count}")
    return figure
