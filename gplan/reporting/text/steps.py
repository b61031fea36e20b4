"""A step as text, of a simulated schedule or measured from traces: its bubble, and why its devices wait; and several
schedules side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from gplan.core import ActionKind, IdleCause, StageCost, Timeline
from gplan.core.units import bytes_text, counted, percent_text, seconds_text
from gplan.interop.traces.measured_run import Traced
from gplan.reporting.text.fitted_table import FittedTable, Line, limited, note_lines
from gplan.reporting.text.plan import MICROBATCH, STEP, equal_stages_text
from gplan.schedules.registry import schedule_info
from gplan.simulation.bubble import idle_by_device
from gplan.simulation.schedule_trial import Trial

TimeText = Callable[[float], str]

_ALL = 0.9995  # shares from here on are written as 100.0 %


def plain_text(number: float) -> str:
    """A time without a unit, or a count that may be a fraction.

    >>> plain_text(34.0), plain_text(1 / 3), plain_text(12345.6)
    ('34', '0.333', '12346')
    """
    return f"{number:.0f}" if number >= 1000 else f"{number:.4g}" if number >= 1 else f"{number:.3g}"


def trial_view(trial: Trial, *, time_text: TimeText = plain_text) -> RenderableType:
    """The step and its bubble, one row per device, a sentence about the largest part of the idle time."""
    law = f"{trial.law.formula} = " if trial.law else ""
    equal = law + equal_stages_text(trial.equal_bubble, trial.law, trial.timeline)
    chunks = f" with {trial.num_stages} stages" if trial.num_stages > trial.num_devices else ""
    recompute = "" if trial.recompute == "never" else f", recompute {trial.recompute}"
    title = f"{trial.schedule}: {counted(trial.num_devices, 'device')}{chunks}, "
    title += f"{counted(trial.num_microbatches, 'micro-batch')}{recompute}"
    step = f"step {time_text(trial.step_s)}, bubble {percent_text(trial.bubble)}; equal stages, free transfers: {equal}"
    return Group(
        Text(title, style="bold"),
        Text(_costs_text(trial.costs, time_text)),
        Text(step),
        Text(""),
        _devices_table(trial, time_text),
        Text(_in_flight(trial), style="dim"),
        Text(_verdict(trial)),
    )


def trials_view(
    trials: Sequence[Trial], *, left_out: Sequence[str], time_text: TimeText = plain_text
) -> RenderableType:
    """One row per schedule, the shortest step first; below, which schedules are left out, and why."""
    first = trials[0]
    causes = [cause for cause in IdleCause if any(trial.idle_s(cause) for trial in trials)]
    waits = [x.value for x in causes]
    flat = [x for x in trials if x.num_stages == x.num_devices]
    table = FittedTable(
        title=f"{counted(first.num_devices, 'device')}, {counted(first.num_microbatches, 'micro-batch')}, recompute "
        f"{first.recompute}, sorted by step time",
        lines=tuple(
            Line(
                cells={
                    "schedule": x.schedule,
                    "step": time_text(x.step_s),
                    "longer": percent_text(x.step_s / first.step_s - 1, signed=True) if x.step_s > first.step_s else "",
                    "bubble": percent_text(x.bubble),
                    "equal stages": percent_text(x.equal_bubble),
                    **{cause.value: time_text(x.idle_s(cause)) for cause in causes},
                    "in flight": plain_text(x.most_in_flight),
                }
            )
            for x in trials
        ),
        groups={"idle per step": waits},
        spare=("longer", *reversed(waits), "equal stages"),
    )
    return Group(
        table,
        *(Text(f"with one stage per device, {_costs_text(x.costs, time_text)}", style="dim") for x in flat[:1]),
        Text(
            "idle time is of all devices together; equal stages: the bubble with equal stages and free transfers",
            style="dim",
        ),
        Text(_in_flight(max(trials, key=lambda x: x.num_stages)), style="dim"),
        *(Text(f"left out: {x}", style="dim") for x in left_out),
    )


def _in_flight(trial: Trial) -> str:
    share = "; one of n stages of a device counts 1/n" if trial.num_stages > trial.num_devices else ""
    return f"in flight: the largest number of micro-batches between their forward and their backward{share}"


def _costs_text(costs: Sequence[StageCost], time_text: TimeText) -> str:
    """What the stages take: one figure where it is the same for all, else the least and the most."""
    transfers = [x for cost in costs[:-1] for x in (cost.activation_s, cost.gradient_s)]
    passes = {"forward": [x.forward_s for x in costs], "backward": [x.backward_s for x in costs], "transfer": transfers}
    once = {"gradient sync": [x.all_reduce_s for x in costs], "optimizer": [x.optimizer_s for x in costs]}
    parts = []
    for basis, figures in (("per stage and micro-batch", passes), ("per stage and step", once)):
        ranges = {
            name: dict.fromkeys(time_text(x) for x in (min(values), max(values)))
            for name, values in figures.items()
            if any(values)
        }
        if ranges:
            parts.append(f"{basis}: " + ", ".join(f"{name} {' to '.join(ends)}" for name, ends in ranges.items()))
    return "; ".join(parts)


def _devices_table(trial: Trial, time_text: TimeText) -> FittedTable:
    causes = [cause for cause in IdleCause if trial.idle_s(cause)]
    has_chunks = trial.num_stages > trial.num_devices
    table = FittedTable(
        title="each device: compute, and idle time by cause" if causes else "no device waits",
        lines=tuple(
            Line(
                cells={
                    "device": str(x.device),
                    **({"stages": " ".join(map(str, x.stages))} if has_chunks else {}),
                    "compute": time_text(x.busy_s),
                    **{cause.value: time_text(x.idle_s[cause]) for cause in causes},
                    "in flight": plain_text(x.most_in_flight),
                    **({"peak memory": bytes_text(x.peak_bytes)} if x.peak_bytes is not None else {}),
                }
            )
            for x in trial.devices
        ),
        left=("stages",),
        groups={STEP: ["compute", *(x.value for x in causes)]},
        spare=("stages", "compute"),
    )
    return limited(table, num_last=1, remedy="--json has them")


def _verdict(trial: Trial) -> str:
    """One sentence about the largest part of the idle time."""
    busiest = max(trial.devices, key=lambda x: x.busy_s)
    reasons = {
        (
            IdleCause.WARM_UP,
            IdleCause.DRAIN,
        ): "is for filling and draining the pipeline; more micro-batches reduce its share",
        (IdleCause.IMBALANCE,): f"is for slower stages; device {busiest.device} computes longest",
        (IdleCause.COMMUNICATION,): "is for exposed transfers",
        (IdleCause.ENGINE,): "is overhead of the engine between actions; fewer and longer actions reduce its share",
        (IdleCause.OPTIMIZER,): "is for the gradient sync and the optimizer of other devices",
    }
    waits = {causes: trial.idle_s(*causes) for causes in reasons}
    largest = max(waits, key=lambda causes: waits[causes])
    if not waits[largest]:
        return "No device waits."
    share = waits[largest] / sum(waits.values())
    return f"{'All' if share > _ALL else percent_text(share) + ' of'} idle time {reasons[largest]}."


def traced_view(traced: Traced) -> RenderableType:
    """The step of median times."""
    timeline = traced.timeline
    order = f"in the order of {schedule_info(traced.schedule).title}" if traced.schedule else "in a custom order"
    sizes = (timeline.num_stages, "stage"), (timeline.num_devices, "device"), (timeline.num_microbatches, "micro-batch")
    stages, devices, microbatches = (counted(*x) for x in sizes)
    period = f", {seconds_text(traced.period_s)} from one start to the next" if traced.period_s is not None else ""
    steps = f"medians of {counted(traced.num_counted, 'step')}"
    steps += f", the first {traced.num_warmup_steps} left out" if traced.num_warmup_steps else ""
    return Group(
        Text(f"traced step: {stages} on {devices}, {microbatches}, {order}", style="bold"),
        Text(f"step {seconds_text(timeline.step_s)}{period}; bubble {percent_text(timeline.bubble)}; {steps}"),
        Text(""),
        *_traced_tables(timeline),
        *note_lines((f"the times are those of {traced.basis}", f"clocks: {traced.clock}", *traced.notes)),
    )


def _traced_tables(timeline: Timeline) -> Iterator[FittedTable]:
    """Of each stage the median of each kind of action, of each device what it computes and why it waits."""
    used = [kind for kind in ActionKind if any(x.action.kind is kind for x in timeline.spans)]
    pairs = sorted((stage, device) for device, stages in enumerate(timeline.stages_by_device) for stage in stages)
    yield FittedTable(
        title="each stage: medians over the micro-batches and steps",
        lines=tuple(
            Line(
                cells={
                    "stage": str(stage),
                    "device": str(device),
                    **{
                        kind.words: "" if (x := timeline.median_s(kind, stage=stage)) is None else seconds_text(x)
                        for kind in used
                    },
                }
            )
            for stage, device in pairs
        ),
        groups={
            MICROBATCH: [x.words for x in used if x is not ActionKind.OPTIMIZER],
            STEP: [ActionKind.OPTIMIZER.words],
        },
    )
    idle = idle_by_device(timeline)
    causes = [cause for cause in IdleCause if any(x[cause] for x in idle)]
    yield FittedTable(
        title="each device: compute, and idle time by cause",
        lines=tuple(
            Line(
                cells={
                    "device": str(i),
                    "compute": seconds_text(timeline.busy_s(i)),
                    **{cause.value: seconds_text(waits[cause]) for cause in causes},
                }
            )
            for i, waits in enumerate(idle)
        ),
        groups={STEP: ["compute", *(x.value for x in causes)]},
    )
