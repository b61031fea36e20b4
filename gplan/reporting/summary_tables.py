"""The figures of the page as rows of text: headlines, comparison, stages, devices, the measurement, the plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import pandas as pd

from gplan.core import Device, GradientCheck, Link, Plan, Run
from gplan.core.units import UnitKind, bytes_text, counted, error_text, percent_text, quantity_text, seconds_text
from gplan.evaluate.compare import (
    BUBBLE,
    STEP_TIME,
    THROUGHPUT,
    compare,
    prediction_error,
    samples_per_s,
    stale_prediction_notes,
)
from gplan.reporting.charts.canvas import layers_text, stage_text, stages_text
from gplan.reporting.subject import (
    BACKWARDS,
    Subject,
    capacity_bytes,
    devices_frame,
    measured_peaks,
    plan_of,
    stages_frame,
)
from gplan.reporting.text.plan import sharding_text
from gplan.reporting.text.run import host_speed_lines, quantity_name
from gplan.schedules.registry import schedule_info

Fact = tuple[str, str]

_NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """One of the figures at the top of the page."""

    name: str
    predicted: str
    measured: str | None = None
    error: str | None = None


Figures = tuple[tuple[str, ...], ...]
"""For each column of a table: the predicted value, and for a run the measured one and the error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLine:
    """One stage in the table of stages."""

    name: str
    first_layer: str
    last_layer: str
    indices: str  # of its layers
    figures: Figures  # per name in STAGE_COLUMNS


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLine:
    """One device in the table of devices."""

    name: str
    stages: str
    figures: Figures  # per name in DEVICE_COLUMNS


STAGE_COLUMNS: dict[str, tuple[str, UnitKind]] = {
    "forward per micro-batch": ("forward_s", "seconds"),
    "backward per micro-batch": ("whole_backward_s", "seconds"),
}
DEVICE_COLUMNS: dict[str, tuple[str, UnitKind]] = {
    "compute per step": ("busy_s", "seconds"),
    "idle per step": ("idle_s", "seconds"),
    "optimizer per step": ("optimizer_s", "seconds"),
    "peak memory": ("peak_bytes", "bytes"),
}
"""The heads of the tables' columns, and the columns of the data frames that they show."""


def headlines(subject: Subject) -> tuple[Headline, ...]:
    """Step time, throughput, bubble and the largest peak memory of a stage."""
    if isinstance(subject, Run):
        return tuple(_headlines_of_run(subject))
    step_s, bubble = subject.prediction.step_s, subject.prediction.bubble
    rate = quantity_text(samples_per_s(subject, step_s), "samples_per_s")
    return (
        Headline(name=STEP_TIME, predicted=seconds_text(step_s)),
        Headline(name=THROUGHPUT, predicted=rate),
        Headline(name=BUBBLE, predicted=percent_text(bubble)),
        Headline(name="largest peak memory", predicted=bytes_text(subject.peak_bytes)),
    )


def step_rows(run: Run) -> list[tuple[str, ...]]:
    """Quantity, predicted, measured and errors of the whole step, without rows that are 0 on both sides.

    The last error is at equal host speed, where that is known.
    """
    has_speed = run.slowdown is not None
    return [
        (
            quantity_name(x.quantity),
            quantity_text(x.predicted, x.unit),
            quantity_text(x.measured, x.unit),
            error_text(x.error, x.unit),
            *(["" if x.equal_speed_error is None else error_text(x.equal_speed_error, x.unit)] if has_speed else []),
        )
        for x in compare(run).rows
        if x.device is None and (x.predicted or x.measured)
    ]


def stage_lines(subject: Subject) -> list[StageLine]:
    """One line per stage; the backward includes its halves and its recompute."""
    plan, frame = plan_of(subject), stages_frame(subject)
    whole_s = frame[[*BACKWARDS, "recompute_s"]].sum(axis="columns")
    return [
        StageLine(
            name=stage_text(plan, stage.index),
            first_layer=stage.layer_names[0],
            last_layer=stage.layer_names[-1],
            indices=layers_text(stage.first_layer, stage.end_layer),
            figures=figures,
        )
        for stage, figures in zip(
            plan.stages, _lines(frame.assign(whole_backward_s=whole_s), STAGE_COLUMNS), strict=True
        )
    ]


def device_lines(subject: Subject) -> list[DeviceLine]:
    """One line per device: compute and idle time within the micro-batch loop, optimizer, and peak memory."""
    plan = plan_of(subject)
    return [
        DeviceLine(
            name=f"device {device}", stages=stages_text([x.index for x in plan.stages_of(device)]), figures=figures
        )
        for device, figures in enumerate(_lines(devices_frame(subject), DEVICE_COLUMNS))
    ]


def run_facts(run: Run) -> list[Fact]:
    """How the figures of a run were measured."""
    return [
        ("engine", _engine_words(run.engine)),
        ("steps", run.steps_text),
        (
            "times",
            "means over those of these steps with a typical length" if run.versions else "medians over these steps",
        ),
        *(("speed of the host", text) for text in host_speed_lines(run)),
        *([("other work on the host", run.host_load.text)] if run.host_load is not None else []),
        ("median step by the wall clock", seconds_text(median(run.step_s[run.num_warmup_steps :]))),
        *([("loss, first to last step", f"{run.losses[0]:.4g} to {run.losses[-1]:.4g}")] if run.losses else []),
        ("gradients compared with the plain model", _check_words(run.check)),
        ("date", run.created),
        ("profiled on", _device_words(run.plan.device)),
        ("link, as profiled", _link_words(run.plan.link)),
        ("versions", ", ".join(f"{name} {version}" for name, version in run.versions) or "–"),
    ]


def plan_facts(plan: Plan) -> list[Fact]:
    """What was planned, for which machine, and the plan's bound and gap."""
    capacity = capacity_bytes(plan)
    settings = ", ".join(f"{name}={value}" for name, value in plan.model.settings)
    return [
        ("model", f"{plan.model.name} ({settings})" if settings else plan.model.name),
        ("schedule", schedule_info(plan.schedule).title),
        ("micro-batches", f"{plan.num_microbatches} of {counted(plan.microbatch_size, 'sample')}"),
        ("recompute", plan.recompute),
        ("replicas", sharding_text(plan) or str(plan.num_replicas)),
        ("objective", plan.minimize),
        ("solver", f"{plan.proof.solver}, {seconds_text(plan.proof.solve_s)}"),
        ("value of the objective", seconds_text(plan.proof.objective_s)),
        ("lower bound", seconds_text(plan.proof.lower_bound_s)),
        ("gap", _gap_words(plan)),
        ("bubble with equal stages and free transfers", percent_text(plan.prediction.ideal_bubble)),
        ("memory of each device", bytes_text(capacity) if capacity is not None else "unknown"),
        ("device", _device_words(plan.device)),
        ("link", _link_words(plan.link)),
    ]


def _headlines_of_run(run: Run) -> Iterator[Headline]:
    comparison = compare(run)
    for quantity in (STEP_TIME, THROUGHPUT, BUBBLE):
        row = comparison.row(quantity)
        yield _headline(quantity, row.predicted, row.measured, row.unit)
    if not measured_peaks(run):
        return
    device = max(range(run.plan.num_devices), key=lambda i: run.peak_bytes[i])
    predicted, measured = run.plan.device_peak_bytes[device], run.peak_bytes[device]
    yield _headline(f"peak memory, device {device}", predicted, measured, "bytes")


def _headline(name: str, predicted: float, measured: float, unit: UnitKind) -> Headline:
    promise, found, error = _figures([predicted, measured], unit)
    return Headline(name=name, predicted=promise, measured=found, error=error)


def _lines(frame: pd.DataFrame, columns: Mapping[str, tuple[str, UnitKind]]) -> list[tuple[tuple[str, ...], ...]]:
    """For each stage or device of a frame, and each column: the predicted value, the measured one, the error."""
    sides = [frame[frame["side"] == side] for side in frame["side"].unique()]
    return [
        tuple(_figures([side[column].iloc[i] for side in sides], unit) for column, unit in columns.values())
        for i in range(len(sides[0]))
    ]


def _figures(values: Sequence[float], unit: UnitKind) -> tuple[str, ...]:
    texts = tuple(quantity_text(value, unit) for value in values)
    if len(values) == 1:
        return texts
    predicted, measured = values
    if unit == "bytes" and not measured:  # no device holds nothing
        return texts[0], _NOT_MEASURED, error_text(None, unit)
    return (*texts, error_text(prediction_error(predicted, measured, unit), unit))


def _engine_words(engine: str) -> str:
    if engine == "virtual":
        return "virtual: one process computed every action; the devices and links are simulated"
    return f"{engine}: one process per device"


def _check_words(check: GradientCheck | None) -> str:
    if check is None:
        return "not checked"
    verdict = "equal" if check.passed else "DIFFERENT"
    return f"{verdict}: largest relative error {check.max_relative_error:.1e}, tolerance {check.tolerance:.1e}"


def _gap_words(plan: Plan) -> str:
    gap = "0: proven optimal" if plan.proof.is_proven else percent_text(plan.proof.gap)
    return f"{gap}, as it was made" if stale_prediction_notes(plan) else gap


def _device_words(device: Device) -> str:
    threads = f", {counted(device.num_threads, 'thread')}" if device.kind == "cpu" else ""
    return f"{device.name} ({device.kind}{threads})"


def _link_words(link: Link) -> str:
    return f"{seconds_text(link.latency_s)} and {bytes_text(link.bytes_per_s)} per second"


def notes_of(subject: Subject) -> tuple[str, ...]:
    """The notes of the plan and, for a run, of the run."""
    if isinstance(subject, Run):
        return *subject.plan.notes, *subject.notes
    return *subject.notes, *stale_prediction_notes(subject)
