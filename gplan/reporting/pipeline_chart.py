"""The pipeline: what every device does over time, predicted above measured on one axis, waiting shaded by its cause."""

from __future__ import annotations

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from gplan.nouns import Run, Timeline
from gplan.reporting.canvas import blank_figure, headline, legend, shortened
from gplan.reporting.colours import FAINT, INK
from gplan.reporting.frames import MEASURED, PREDICTED, Subject, plan_of, side_text, timelines_of
from gplan.reporting.gantt import draw_gantt, gantt_handles
from gplan.reporting.layout import layout_text
from gplan.units import percent_text, seconds_axis, seconds_text

_END, _PROMISED_END = (0, ()), (0, (2, 2))
_ROW_INCHES, _CHUNKED_ROW_INCHES = 0.30, 0.36  # the latter has two lines of text


def pipeline_chart(subject: Subject) -> Figure:
    """The Gantt chart of one step; the measured one below the predicted one for a Run."""
    plan, timelines = plan_of(subject), timelines_of(subject)
    row_inches = _ROW_INCHES if plan.num_devices == plan.num_stages else _CHUNKED_ROW_INCHES
    figure = blank_figure(1.35 + (row_inches * plan.num_devices + 0.45) * len(timelines))
    panels = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
    longest_s = max(x.step_s for x in timelines.values())
    unit, scale = seconds_axis(longest_s)
    for axes, (side, timeline) in zip(panels, timelines.items(), strict=True):
        draw_gantt(axes, timeline, longest_s=longest_s, scale=scale)
        _dress(axes, timeline, title=_panel_title(subject, side), scale=scale)
    if MEASURED in timelines:
        panels[-1].axvline(timelines[PREDICTED].step_s / scale, color=INK.light, linewidth=0.9, linestyle=_PROMISED_END)
    panels[-1].set(xlabel=f"time in {unit}", xlim=(0, 1.005 * longest_s / scale))
    legend(figure, [*gantt_handles(list(timelines.values())), *_end_handles(measured=MEASURED in timelines)])
    headline(figure, f"One step of {shortened(plan.model.name, 40)}: {layout_text(plan)}")
    return figure


def _dress(axes: Axes, timeline: Timeline, *, title: str, scale: float) -> None:
    axes.axvline(timeline.step_s / scale, color=INK.light, linewidth=0.9, linestyle=_END)
    axes.set_title(title, loc="left")
    numbers = f"step {seconds_text(timeline.step_s)}, bubble {percent_text(timeline.bubble)}"
    axes.set_title(numbers, loc="right")


def _panel_title(subject: Subject, side: str) -> str:
    virtual = side == MEASURED and isinstance(subject, Run) and subject.engine == "virtual"
    title = side_text(subject, side) + (": devices exist on the clock only" if virtual else "")
    return title[0].upper() + title[1:]


def _end_handles(*, measured: bool) -> list[Artist]:
    ends = [("end of the step", INK, _END)] + [("predicted end", FAINT, _PROMISED_END)] * measured
    return [Line2D([], [], color=x.light, linewidth=0.9, linestyle=style, label=name) for name, x, style in ends]
