"""The words and figures of the page, as rows of text: headline, comparison, stages, how it was measured, the plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import pandas as pd

from gplan.compare import (
    BUBBLE,
    PEAK_MEMORY,
    STEP_TIME,
    THROUGHPUT,
    Comparison,
    Row,
    compare,
    prediction_error,
    samples_per_s,
)
from gplan.nouns import Device, GradientCheck, Link, Plan, Run
from gplan.reporting.canvas import layers_text
from gplan.reporting.frames import Subject, capacity_bytes, plan_of, stages_frame
from gplan.units import UnitKind, bytes_text, counted, error_text, percent_text, quantity_text, seconds_text

Fact = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """One of the figures at the top of the page."""

    name: str
    predicted: str
    measured: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLine:
    """One stage in the table of stages."""

    stage: int
    first_layer: str
    last_layer: str
    indices: str  # of its layers
    figures: tuple[tuple[str, ...], ...]  # per name in STAGE_COLUMNS: computed, and for a run measured and error


STAGE_COLUMNS: dict[str, UnitKind] = {
    "forward": "seconds",
    "backward": "seconds",
    "optimizer": "seconds",
    "idle": "seconds",
    "peak memory": "bytes",
}


def headlines(subject: Subject) -> tuple[Headline, ...]:
    """Step time, throughput, bubble and the largest peak memory of a stage."""
    if isinstance(subject, Run):
        return tuple(_headlines_of_run(compare(subject)))
    step_s, bubble = subject.prediction.step_s, subject.prediction.bubble
    largest = max(stage.memory.peak_bytes for stage in subject.stages)
    rate = quantity_text(samples_per_s(subject, step_s), "samples_per_s")
    return (
        Headline(name=STEP_TIME, predicted=seconds_text(step_s)),
        Headline(name=THROUGHPUT, predicted=rate),
        Headline(name=BUBBLE, predicted=percent_text(bubble)),
        Headline(name="largest peak memory", predicted=bytes_text(largest)),
    )


def step_rows(run: Run) -> list[tuple[str, str, str, str]]:
    """Quantity, predicted, measured and error of what is compared of the whole step."""
    return [
        (x.quantity, quantity_text(x.predicted, x.unit), quantity_text(x.measured, x.unit), error_text(x.error, x.unit))
        for x in compare(run).rows
        if x.stage is None
    ]


def stage_lines(subject: Subject) -> list[StageLine]:
    """One line per stage; recompute is part of the backward, idle is of the stage's device in one step."""
    frame = stages_frame(subject)
    sides = [_stage_numbers(frame[frame["side"] == side]) for side in frame["side"].unique()]
    return [
        StageLine(
            stage=stage.index,
            first_layer=stage.layer_names[0],
            last_layer=stage.layer_names[-1],
            indices=layers_text(stage.first_layer, stage.end_layer),
            figures=tuple(
                _figures([side[stage.index][column] for side in sides], unit)
                for column, unit in enumerate(STAGE_COLUMNS.values())
            ),
        )
        for stage in plan_of(subject).stages
    ]


def run_facts(run: Run) -> list[Fact]:
    """How the figures of a run were measured."""
    return [
        ("engine", _engine_words(run.engine)),
        ("steps", f"{len(run.step_s)}, {run.num_warmup_steps} for warm-up; medians of {run.steps_text}"),
        ("figures", "medians over the steps that count"),
        ("median step by the wall clock", seconds_text(median(run.step_s[run.num_warmup_steps :]))),
        ("loss, first to last step", f"{run.losses[0]:.4g} to {run.losses[-1]:.4g}"),
        ("gradients against the plain model", _check_words(run.check)),
        ("date", run.created),
        ("versions", ", ".join(f"{name} {version}" for name, version in run.versions) or "–"),
    ]


def plan_facts(plan: Plan) -> list[Fact]:
    """What was planned, for which machine, and how good the plan is known to be."""
    capacity = capacity_bytes(plan)
    settings = ", ".join(f"{name}={value}" for name, value in plan.model.settings)
    return [
        ("model", f"{plan.model.name} ({settings})" if settings else plan.model.name),
        ("schedule", plan.schedule),
        ("micro-batches", f"{plan.num_microbatches} of {counted(plan.microbatch_size, 'sample')}"),
        ("recompute", plan.recompute),
        ("objective", plan.minimize),
        ("solver", f"{plan.proof.solver}, {seconds_text(plan.proof.solve_s)}"),
        ("objective reached", seconds_text(plan.proof.objective_s)),
        ("lower bound", seconds_text(plan.proof.lower_bound_s)),
        ("gap", _gap_words(plan)),
        ("bubble of equal stages", percent_text(plan.prediction.ideal_bubble)),
        ("capacity of each device", bytes_text(capacity) if capacity is not None else "not known"),
        ("device", _device_words(plan.device)),
        ("link", _link_words(plan.link)),
    ]


def _headlines_of_run(comparison: Comparison) -> Iterator[Headline]:
    for quantity in (STEP_TIME, THROUGHPUT, BUBBLE):
        yield _headline(quantity, comparison.row(quantity))
    peaks = [row for row in comparison.rows if row.quantity == PEAK_MEMORY]
    largest = max(peaks, key=lambda row: row.measured)
    yield _headline(f"peak memory, stage {largest.stage}", largest)


def _headline(name: str, row: Row) -> Headline:
    predicted, measured = (quantity_text(value, row.unit) for value in (row.predicted, row.measured))
    return Headline(name=name, predicted=predicted, measured=measured, error=error_text(row.error, row.unit))


def _stage_numbers(side: pd.DataFrame) -> list[tuple[float, ...]]:
    """Per stage the numbers of STAGE_COLUMNS."""
    backward_s = side["backward_s"] + side["recompute_s"]
    columns = (side["forward_s"], backward_s, side["optimizer_s"], side["idle_s"], side["peak_bytes"])
    return list(zip(*columns, strict=True))


def _figures(values: Sequence[float], unit: UnitKind) -> tuple[str, ...]:
    texts = tuple(quantity_text(value, unit) for value in values)
    if len(values) == 1:
        return texts
    predicted, measured = values
    return (*texts, error_text(prediction_error(predicted, measured, unit), unit))


def _engine_words(engine: str) -> str:
    if engine == "virtual":
        return "virtual: one process computed every action; the devices and links exist on the clock only"
    return f"{engine}: one process per device"


def _check_words(check: GradientCheck | None) -> str:
    if check is None:
        return "not checked"
    verdict = "equal" if check.passed else "DIFFERENT"
    return f"{verdict}: largest relative error {check.max_relative_error:.1e}, tolerance {check.tolerance:.1e}"


def _gap_words(plan: Plan) -> str:
    return "0: proved optimal" if plan.proof.is_proven else percent_text(plan.proof.gap)


def _device_words(device: Device) -> str:
    threads = f", {counted(device.num_threads, 'thread')}" if device.kind == "cpu" else ""
    return f"{device.name} ({device.kind}{threads})"


def _link_words(link: Link) -> str:
    return f"{seconds_text(link.latency_s)} and {bytes_text(link.bytes_per_s)} per second"


def notes_of(subject: Subject) -> tuple[str, ...]:
    """What the reader must know of the plan and, where there is one, of its run."""
    return (*subject.plan.notes, *subject.notes) if isinstance(subject, Run) else subject.notes
