"""The pipeline: what every device does over time, predicted above measured on one axis, waiting shaded by its cause.

device 0 | 0 1 2 . . . 0 0 1 1 2 2 O      boxes carry the micro-batch where it fits
device 1 | . 0 1 2 0 0 1 1 2 2 . . O      a yellow strip below a row: its output on the way
"""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from gplan.nouns import ActionKind, Run, Timeline
from gplan.reporting.canvas import WIDTH_INCHES, blank_figure, boxes, headline, legend, shortened, swatch
from gplan.reporting.colours import ACTIONS, COMMUNICATION, FAINT, IDLE, INK, Look
from gplan.reporting.frames import (
    MEASURED,
    PREDICTED,
    Subject,
    idle_frame,
    plan_of,
    side_text,
    spans_frame,
    timelines_of,
    transfers_frame,
)
from gplan.units import counted, percent_text, seconds_axis, seconds_text

_ROW, _BOX, _STRIP = 0.88, 0.72, 0.12  # heights, of 1 per device
_AXIS_POINTS = 72 * (WIDTH_INCHES - 1.0)  # what labels leave of the width
_DIGIT_POINTS = 0.66  # width of a digit at a font size of 1
_SMALLEST_FONT, _LARGEST_FONT = 5.5, 8.5
_END, _PROMISED_END = (0, ()), (0, (2, 2))


def pipeline_chart(subject: Subject) -> Figure:
    """The Gantt chart of one step; the measured one below the predicted one for a Run."""
    plan, timelines = plan_of(subject), timelines_of(subject)
    rows_inches = 0.30 * plan.num_stages + 0.45
    figure = blank_figure(1.35 + rows_inches * len(timelines))
    panels = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
    unit, scale = seconds_axis(max(x.step_s for x in timelines.values()))
    frames = {name: make(subject) for name, make in _FRAMES.items()}
    for axes, (side, timeline) in zip(panels, timelines.items(), strict=True):
        _draw_side(axes, {name: frame[frame["side"] == side] for name, frame in frames.items()}, scale=scale)
        _dress(axes, timeline, title=_panel_title(subject, side), scale=scale)
    if MEASURED in timelines:
        panels[-1].axvline(timelines[PREDICTED].step_s / scale, color=INK.light, linewidth=0.9, linestyle=_PROMISED_END)
    panels[-1].set(xlabel=f"time in {unit}", xlim=(0, 1.005 * max(x.step_s for x in timelines.values()) / scale))
    legend(figure, list(_legend_handles(frames, measured=MEASURED in timelines)))
    name = shortened(plan.model.name, 40)
    what = f"{plan.schedule}, {counted(plan.num_stages, 'stage')}, {counted(plan.num_microbatches, 'micro-batch')}"
    headline(figure, f"One step of {name}: {what}")
    return figure


_FRAMES = {"spans": spans_frame, "transfers": transfers_frame, "idle": idle_frame}


def _draw_side(axes: Axes, frames: dict[str, pd.DataFrame], *, scale: float) -> None:
    spans, transfers, idle = (frames[x] for x in ("spans", "transfers", "idle"))
    for cause, look in IDLE.items():
        _draw_boxes(axes, idle[idle["cause"] == cause.value], look, scale=scale, height=_BOX)
    points_per_s = _AXIS_POINTS / float(spans["end_s"].max())
    seam = min(0.7, 0.15 * points_per_s * float((spans["end_s"] - spans["start_s"]).median()))
    for kind, look in ACTIONS.items():
        _draw_boxes(axes, spans[spans["kind"] == kind.value], look, scale=scale, height=_BOX, gap_points=seam)
    sent = transfers.rename(columns={"source": "device"})
    _draw_boxes(axes, sent, COMMUNICATION, scale=scale, height=_STRIP, top=_ROW / 2 - _STRIP)
    _draw_numbers(axes, spans, scale=scale, points_per_s=points_per_s)


def _draw_boxes(
    axes: Axes, rows: pd.DataFrame, look: Look, *, scale: float, height: float, gap_points: float = 0.0,
    top: float = -_ROW / 2,
) -> None:  # fmt: skip
    """Boxes from start to end in the row of their device; `top` is from the middle of the row, down."""
    left, right = rows["start_s"] / scale, rows["end_s"] / scale
    bottom = rows["device"] + top
    boxes(
        axes, look, left=left.to_numpy(), right=right.to_numpy(), bottom=bottom.to_numpy(), height=height,
        gap_points=gap_points,
    )  # fmt: skip


def _draw_numbers(axes: Axes, spans: pd.DataFrame, *, scale: float, points_per_s: float) -> None:
    """The micro-batch in the boxes, for the kinds of action whose boxes are wide enough, all in one size."""
    loop = spans[spans["kind"] != ActionKind.OPTIMIZER.value]
    room = points_per_s * (loop["end_s"] - loop["start_s"]) - 1.5
    largest = room / (_DIGIT_POINTS * loop["microbatch"].astype(str).str.len())
    usual = largest.groupby(loop["kind"]).quantile(0.03)
    fitting = usual[usual >= _SMALLEST_FONT]
    size = min(_LARGEST_FONT, float(fitting.min())) if len(fitting) else _LARGEST_FONT
    shown = loop[loop["kind"].isin(fitting.index) & (largest >= size)]
    middles = ((shown["start_s"] + shown["end_s"]) / 2 / scale).to_numpy()
    for middle, device, kind, microbatch in zip(
        middles, shown["device"], shown["kind"], shown["microbatch"], strict=True
    ):
        y, colour = device - (_ROW - _BOX) / 2, ACTIONS[ActionKind(kind)].text
        axes.text(middle, y, str(microbatch), ha="center", va="center_baseline", fontsize=size, color=colour)


def _dress(axes: Axes, timeline: Timeline, *, title: str, scale: float) -> None:
    axes.axvline(timeline.step_s / scale, color=INK.light, linewidth=0.9, linestyle=_END)
    axes.set_title(title, loc="left")
    numbers = f"step {seconds_text(timeline.step_s)}, bubble {percent_text(timeline.bubble)}"
    axes.set_title(numbers, loc="right")
    axes.set_yticks(range(timeline.num_devices), [f"device {i}" for i in range(timeline.num_devices)])
    axes.set_ylim(timeline.num_devices - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def _panel_title(subject: Subject, side: str) -> str:
    virtual = side == MEASURED and isinstance(subject, Run) and subject.engine == "virtual"
    title = side_text(subject, side) + (": devices exist on the clock only" if virtual else "")
    return title[0].upper() + title[1:]


def _legend_handles(frames: dict[str, pd.DataFrame], *, measured: bool) -> Iterator[Artist]:
    kinds, causes, transfers = set(frames["spans"]["kind"]), set(frames["idle"]["cause"]), frames["transfers"]
    yield from (swatch(look) for kind, look in ACTIONS.items() if kind.value in kinds)
    if (transfers["end_s"] > transfers["start_s"]).any():
        yield swatch(COMMUNICATION)
    yield from (swatch(look) for cause, look in IDLE.items() if cause.value in causes)
    yield Line2D([], [], color=INK.light, linewidth=0.9, linestyle=_END, label="end of the step")
    if measured:
        yield Line2D([], [], color=FAINT.light, linewidth=0.9, linestyle=_PROMISED_END, label="predicted end")
