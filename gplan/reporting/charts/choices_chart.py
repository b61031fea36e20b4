"""Other choices: step time over micro-batches and devices, and peak memory against step time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, TypeAlias

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from gplan.core import Alternative, Plan
from gplan.core.units import bytes_axis, bytes_text, counted, percent_text, quantity_text, seconds_axis, seconds_text
from gplan.evaluate.explain import Explanation
from gplan.reporting.analysis import PlanAnalysis
from gplan.reporting.charts.canvas import HALF_INCHES, Handle, blank_figure, headline, legend, tooltip
from gplan.reporting.looks import CAPACITY, FAINT, INK
from gplan.reporting.subject import capacity_bytes
from gplan.reporting.text.plan import alternative_text

_LINES = (
    ("o", "#397af2"), ("s", "#b8510f"), ("^", "#2f8f7b"), ("D", "#7f6fa6"), ("v", "#c48a00"),
)  # fmt: skip
_SAME_BATCH = ("schedule", "recompute", "smaller microbatches", "same")
_LOOKS = {"this plan": ("*", INK.light, 12.0), "another plan": ("o", "#397af2", 6.0), "rival": ("s", "#b8510f", 6.0)}

PointKind: TypeAlias = Literal["this plan", "another plan", "rival"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A plan for the same batch: its step time and peak memory."""

    kind: PointKind
    label: str
    step_s: float
    peak_bytes: int


def choices_chart(plan: Plan, analysis: PlanAnalysis) -> Figure | None:
    """Seconds per sample over micro-batches, a line for each number of devices; None if there is only the plan."""
    choices = analysis.choices
    if len(choices) < 2:
        return None
    figure = blank_figure(3.5, width_inches=HALF_INCHES)
    axes = figure.subplots()
    unit, scale = seconds_axis(max(map(_sample_s, choices)))
    lines = [list(group) for _, group in groupby(choices, key=lambda x: x.num_devices)]
    for above, line, look in zip(reversed(range(len(lines))), lines, _LINES, strict=False):
        _draw_line(axes, plan, line, look, scale=scale, num_above=above)
    numbers = sorted({x.num_microbatches for x in choices})
    axes.set_xscale("log", base=2)
    axes.set_xticks(numbers, [str(x) for x in numbers])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set(xlabel="micro-batches M", ylabel=f"{unit} per sample")
    axes.grid(axis="y")
    handles = [
        Line2D([], [], marker=shape, color=colour, linewidth=1.4, label=f"K = {line[0].num_devices}")
        for line, (shape, colour) in zip(lines, _LINES, strict=False)
    ]
    ring = Line2D([], [], marker="o", linestyle="", markersize=11, markerfacecolor="none", color=INK.light)
    ring.set_label("this plan")
    legend(figure, [*handles, ring], most_in_a_row=3)
    headline(figure, "Time per sample over M and K")
    return figure


def frontier_chart(plan: Plan, analysis: PlanAnalysis) -> Figure | None:
    """Peak memory against step time, with a line through the Pareto front; None if there is only the plan."""
    points = points_of(plan, analysis.explanation)
    if len(points) < 2:
        return None
    figure = blank_figure(3.5, width_inches=HALF_INCHES)
    axes = figure.subplots()
    (unit, scale), most = bytes_axis(max(x.peak_bytes for x in points)), max(x.step_s for x in points)
    time_unit, time_scale = seconds_axis(most)
    best = list(pareto_front(points))
    at = [x.peak_bytes / scale for x in best], [x.step_s / time_scale for x in best]
    axes.plot(*at, color=FAINT.light, linewidth=1.1, drawstyle="steps-post", zorder=1)
    for point in sorted(points, key=lambda x: x.kind == "this plan"):
        shape, colour, size = _LOOKS[point.kind]
        at = [point.peak_bytes / scale], [point.step_s / time_scale]
        (mark,) = axes.plot(*at, marker=shape, color=colour, markersize=size, markeredgewidth=0, clip_on=False)
        tooltip(mark, point.label, f"step {seconds_text(point.step_s)}", f"peak memory {bytes_text(point.peak_bytes)}")
    kinds = {point.kind for point in points}
    handles: list[Handle] = [
        Line2D([], [], marker=shape, color=colour, markersize=min(size, 9), linestyle="", markeredgewidth=0, label=kind)
        for kind, (shape, colour, size) in _LOOKS.items()
        if kind in kinds
    ]
    handles.append(Line2D([], [], color=FAINT.light, linewidth=1.1, label="Pareto front"))
    capacity = capacity_bytes(plan)
    if capacity is not None and capacity <= 1.5 * max(x.peak_bytes for x in points):
        style = {"color": CAPACITY.colour, "linewidth": 1.2, "linestyle": (0, (5, 3))}
        handles.append(axes.axvline(capacity / scale, label="capacity", **style))  # type: ignore[arg-type]
    axes.set(xlabel=f"peak memory of a device, {unit}", ylabel=f"step, {time_unit}")
    axes.margins(0.08)
    axes.grid(axis="both")
    legend(figure, handles, most_in_a_row=4)
    headline(figure, "Memory against step time")
    return figure


def points_of(plan: Plan, explanation: Explanation | None) -> tuple[Point, ...]:
    """The plan, its rivals, and the plans of its search and explanation for the same batch."""
    own = Point(kind="this plan", label="this plan", step_s=plan.prediction.step_s, peak_bytes=plan.peak_bytes)
    found = [own, *(_alternative(x, "another plan") for x in plan.frontier if _has_batch(x, plan))]
    found += [_alternative(x, "rival") for x in plan.rivals if _has_batch(x, plan)]
    for option in explanation.options if explanation else ():
        outcome = option.outcome
        if explanation and outcome and option.kind in _SAME_BATCH:
            found.append(
                Point(kind="another plan", label=option.label, step_s=outcome.step_s, peak_bytes=outcome.peak_bytes)
            )
    seen: dict[tuple[float, int], Point] = {}
    for point in found:
        seen.setdefault((point.step_s, point.peak_bytes), point)
    return tuple(seen.values())


def pareto_front(points: Sequence[Point]) -> Iterator[Point]:
    """The Pareto front: points that no other beats in both memory and step time, by ascending memory."""
    least_s = float("inf")
    for point in sorted(points, key=lambda x: (x.peak_bytes, x.step_s)):
        if point.step_s < least_s:
            least_s = point.step_s
            yield point


def _has_batch(x: Alternative, plan: Plan) -> bool:
    return x.num_replicas * x.num_microbatches * x.microbatch_size == plan.batch_size


def _alternative(x: Alternative, kind: PointKind) -> Point:
    return Point(kind=kind, label=x.label or alternative_text(x), step_s=x.step_s, peak_bytes=x.peak_bytes)


def _sample_s(plan: Plan) -> float:
    """Seconds of the step per sample."""
    return plan.prediction.step_s / plan.batch_size


def _draw_line(
    axes: Axes, plan: Plan, line: Sequence[Plan], look: tuple[str, str], *, scale: float, num_above: int
) -> None:
    """A line, thicker for each of the lines that are drawn above it, so that equal ones are all seen."""
    shape, colour = look
    numbers, seconds = [x.num_microbatches for x in line], [_sample_s(x) / scale for x in line]
    axes.plot(numbers, seconds, color=colour, linewidth=1.4 + 0.8 * num_above)
    for x, number, sample in zip(line, numbers, seconds, strict=True):
        at = [number], [sample]
        if (x.num_devices, number) == (plan.num_devices, plan.num_microbatches):
            axes.plot(*at, marker="o", color=INK.light, markersize=12, markerfacecolor="none")
        (mark,) = axes.plot(*at, marker=shape, color=colour, markersize=6 + 0.8 * num_above)
        which = f"{counted(x.num_devices, 'device')}, {counted(number, 'micro-batch')}"
        step_s = x.prediction.step_s
        rate = quantity_text(x.batch_size / step_s, "samples_per_s")
        tooltip(mark, which, f"step {seconds_text(step_s)}, {rate}", f"bubble {percent_text(x.prediction.bubble)}")
