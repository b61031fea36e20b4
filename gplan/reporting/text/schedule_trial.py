"""A simulated schedule as text: its step and bubble, why its devices wait, and several schedules side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from gplan.core import IdleCause, StageCost
from gplan.core.units import bytes_text, counted, percent_text
from gplan.reporting.text.fitted_table import Column, FittedTable, Line, limited
from gplan.reporting.text.plan import STEP, equal_stages_text
from gplan.simulation.schedule_trial import DeviceTrial, Trial

TimeText = Callable[[float], str]

_ALL = 0.9995  # shares from here on are written as 100.0 %
IDLE_PER_STEP = "idle per step"
_FILLING = (IdleCause.WARM_UP, IdleCause.DRAIN)


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
    step = f"step {time_text(trial.step_s)}, bubble {percent_text(trial.bubble)}; equal stages, free transfers: {equal}"
    return Group(
        Text(_title(trial), style="bold"),
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
    first, causes = trials[0], _causes(trials)
    waits = [x.value for x in causes]
    flat = [x for x in trials if x.num_stages == x.num_devices]
    table = FittedTable(
        title=f"{counted(first.num_devices, 'device')}, {counted(first.num_microbatches, 'micro-batch')}, recompute "
        f"{first.recompute}, sorted by step time",
        columns=(
            Column(key="schedule", is_left=True, is_flexible=True),
            *(
                Column(key=x, group=IDLE_PER_STEP if x in waits else "")
                for x in ("step", "longer", "bubble", "equal stages", *waits, "in flight")
            ),
        ),
        lines=tuple(Line(cells=tuple(_trial_cells(x, first.step_s, causes, time_text))) for x in trials),
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


def _title(trial: Trial) -> str:
    chunks = f" with {trial.num_stages} stages" if trial.num_stages > trial.num_devices else ""
    recompute = "" if trial.recompute == "never" else f", recompute {trial.recompute}"
    return (
        f"{trial.schedule}: {counted(trial.num_devices, 'device')}{chunks}, "
        f"{counted(trial.num_microbatches, 'micro-batch')}{recompute}"
    )


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


def _causes(trials: Sequence[Trial]) -> list[IdleCause]:
    """The causes for which any device of any trial waits."""
    return [cause for cause in IdleCause if any(trial.idle_s(cause) for trial in trials)]


def _devices_table(trial: Trial, time_text: TimeText) -> FittedTable:
    causes = _causes([trial])
    has_chunks, has_memory = trial.num_stages > trial.num_devices, trial.devices[0].peak_bytes is not None
    times = ["compute", *(x.value for x in causes)]
    names = [*times, "in flight", *(["peak memory"] if has_memory else [])]
    columns = [Column(key="device", is_flexible=True), *([Column(key="stages", is_left=True)] if has_chunks else [])]
    table = FittedTable(
        title="each device: compute, and idle time by cause" if causes else "no device waits",
        columns=(*columns, *(Column(key=x, group=STEP if x in times else "") for x in names)),
        lines=tuple(Line(cells=tuple(_device_cells(x, causes, has_chunks, time_text))) for x in trial.devices),
        spare=("stages", "compute"),
    )
    return limited(table, num_last=1, remedy="--json has them")


def _device_cells(device: DeviceTrial, causes: Sequence[IdleCause], has_chunks: bool, text: TimeText) -> Iterator[str]:
    yield str(device.device)
    if has_chunks:
        yield " ".join(map(str, device.stages))
    yield text(device.busy_s)
    yield from (text(device.idle_s[cause]) for cause in causes)
    yield plain_text(device.most_in_flight)
    if device.peak_bytes is not None:
        yield bytes_text(device.peak_bytes)


def _trial_cells(trial: Trial, least_s: float, causes: Sequence[IdleCause], time_text: TimeText) -> Iterator[str]:
    yield trial.schedule
    yield time_text(trial.step_s)
    yield percent_text(trial.step_s / least_s - 1, signed=True) if trial.step_s > least_s else ""
    yield percent_text(trial.bubble)
    yield percent_text(trial.equal_bubble)
    yield from (time_text(trial.idle_s(cause)) for cause in causes)
    yield plain_text(trial.most_in_flight)


def _verdict(trial: Trial) -> str:
    """One sentence about the largest part of the idle time."""
    waits = {
        "filling": trial.idle_s(*_FILLING),
        "imbalance": trial.idle_s(IdleCause.IMBALANCE),
        "communication": trial.idle_s(IdleCause.COMMUNICATION),
        "engine": trial.idle_s(IdleCause.ENGINE),
        "optimizer": trial.idle_s(IdleCause.OPTIMIZER),
    }
    total_s, largest = sum(waits.values()), max(waits, key=lambda cause: waits[cause])
    if not waits[largest]:
        return "No device waits."
    busiest = max(trial.devices, key=lambda x: x.busy_s)
    reasons = {
        "filling": "is for filling and draining the pipeline; more micro-batches reduce its share",
        "imbalance": f"is for slower stages; device {busiest.device} computes longest",
        "communication": "is for exposed transfers",
        "engine": "is overhead of the engine between actions; fewer and longer actions reduce its share",
        "optimizer": "is for the gradient sync and the optimizer of other devices",
    }
    share = waits[largest] / total_s
    return f"{'All' if share > _ALL else percent_text(share) + ' of'} idle time {reasons[largest]}."
