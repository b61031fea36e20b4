"""A step measured from traces, as text: its bubble, the times of each stage, why each device waits, and the method."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from gplan.core import ActionKind, IdleCause, Timeline
from gplan.core.units import counted, percent_text, seconds_text
from gplan.interop.traces.measured_run import Traced, ideal_timeline
from gplan.reporting.text.fitted_table import Column, FittedTable, Line, columns, note_lines
from gplan.reporting.text.plan import MICROBATCH, STEP
from gplan.schedules.registry import schedule_info
from gplan.simulation.bubble import idle_by_device


def traced_view(traced: Traced, *, schedule: str | None = None) -> RenderableType:
    """The step of median times; with a schedule also how long the same stages would take with it."""
    timeline = traced.timeline
    return Group(
        Text(_title(traced), style="bold"),
        Text(_step_text(traced)),
        Text(""),
        _stages_table(traced),
        _devices_table(timeline),
        *(Text(_ideal_text(traced, x)) for x in dict.fromkeys((None, schedule))),
        *note_lines((f"the times are those of {traced.basis}", f"clocks: {traced.clock}", *traced.notes)),
    )


def _title(traced: Traced) -> str:
    timeline = traced.timeline
    num_stages = timeline.num_stages
    order = f"in the order of {schedule_info(traced.schedule).title}" if traced.schedule else "in a custom order"
    sizes = (num_stages, "stage"), (timeline.num_devices, "device"), (timeline.num_microbatches, "micro-batch")
    stages, devices, microbatches = (counted(*x) for x in sizes)
    return f"traced step: {stages} on {devices}, {microbatches}, {order}"


def _step_text(traced: Traced) -> str:
    timeline = traced.timeline
    period = f", {seconds_text(traced.period_s)} from one start to the next" if traced.period_s is not None else ""
    steps = f"medians of {counted(traced.num_counted, 'step')}"
    steps += f", the first {traced.num_warmup_steps} left out" if traced.num_warmup_steps else ""
    return f"step {seconds_text(timeline.step_s)}{period}; bubble {percent_text(timeline.bubble)}; {steps}"


def _stages_table(traced: Traced) -> FittedTable:
    timeline = traced.timeline
    used = [kind for kind in ActionKind if any(x.action.kind is kind for x in timeline.spans)]
    pairs = sorted((stage, device) for device, stages in enumerate(timeline.stages_by_device) for stage in stages)
    return FittedTable(
        title="each stage: medians over the micro-batches and steps",
        columns=(
            *columns("stage", "device"),
            *(Column(key=x.words, group=STEP if x is ActionKind.OPTIMIZER else MICROBATCH) for x in used),
        ),
        lines=tuple(
            Line(cells=(str(stage), str(device), *(_median_text(timeline, stage, kind) for kind in used)))
            for stage, device in pairs
        ),
    )


def _median_text(timeline: Timeline, stage: int, kind: ActionKind) -> str:
    found = timeline.median_s(kind, stage=stage)
    return "" if found is None else seconds_text(found)


def _devices_table(timeline: Timeline) -> FittedTable:
    idle = idle_by_device(timeline)
    causes = [cause for cause in IdleCause if any(x[cause] for x in idle)]
    return FittedTable(
        title="each device: compute, and idle time by cause",
        columns=columns("device", "compute", *causes, group=STEP),
        lines=tuple(
            Line(cells=(str(i), seconds_text(timeline.busy_s(i)), *(seconds_text(waits[cause]) for cause in causes)))
            for i, waits in enumerate(idle)
        ),
    )


def _ideal_text(traced: Traced, schedule: str | None) -> str:
    ideal = ideal_timeline(traced, schedule)
    order = "this order" if schedule is None else schedule_info(schedule).title
    taken = f"{seconds_text(ideal.step_s)}, bubble {percent_text(ideal.bubble)}"
    return f"if every action took its stage's median and transfers were free, {order} would take {taken}"
