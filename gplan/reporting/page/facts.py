"""The figures at the top of the page, and the facts about the measurement and the plan at its end."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from gplan.core import Plan, Run
from gplan.core.units import bytes_text, counted, error_text, percent_text, quantity_text, seconds_text
from gplan.evaluate.compare import (
    BUBBLE,
    PEAK_MEMORY,
    STEP_TIME,
    THROUGHPUT,
    ComparisonRow,
    compare,
    samples_per_s,
    stale_prediction_notes,
)
from gplan.reporting.subject import Subject, capacity_bytes, capacity_name, measured_peaks
from gplan.reporting.text.machine import device_text, link_text
from gplan.reporting.text.plan import sharding_text
from gplan.reporting.text.run import check_text, equal_speed_lines
from gplan.schedules.registry import schedule_info

Fact = tuple[str, str]

_ENGINES = {"virtual": "virtual: one process computed every action; the devices and links are simulated"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """One of the figures at the top of the page."""

    name: str
    predicted: str
    measured: str | None = None
    error: str | None = None


def headlines(subject: Subject) -> tuple[Headline, ...]:
    """Step time, throughput, bubble and the largest peak memory of a device."""
    if isinstance(subject, Run):
        comparison = compare(subject)
        found = [_headline(x, comparison.row(x)) for x in (STEP_TIME, THROUGHPUT, BUBBLE)]
        if measured_peaks(subject):
            peak = max((x for x in comparison.rows if x.quantity == PEAK_MEMORY), key=lambda x: x.measured)
            found.append(_headline(f"peak memory, device {peak.device}", peak))
        return tuple(found)
    step_s, bubble = subject.prediction.step_s, subject.prediction.bubble
    rate = quantity_text(samples_per_s(subject, step_s), "samples_per_s")
    return (
        Headline(name=STEP_TIME, predicted=seconds_text(step_s)),
        Headline(name=THROUGHPUT, predicted=rate),
        Headline(name=BUBBLE, predicted=percent_text(bubble)),
        Headline(name="largest peak memory", predicted=bytes_text(subject.peak_bytes)),
    )


def run_facts(run: Run) -> list[Fact]:
    """How the figures of a run were measured."""
    return [
        ("engine", _ENGINES.get(run.engine, f"{run.engine}: one process per device")),
        ("steps", run.steps_text),
        ("times", "means over these steps" if run.versions else "medians over these steps"),
        *(("speed of the host", text) for text in equal_speed_lines(run)),
        *([("other work on the host", run.host_load.text)] if run.host_load is not None else []),
        ("median of all steps after the warm-up", seconds_text(median(run.step_s[run.num_warmup_steps :]))),
        *([("loss, first to last step", f"{run.losses[0]:.4g} to {run.losses[-1]:.4g}")] if run.losses else []),
        ("gradients compared with the plain model", check_text(run.check) if run.check else "not checked"),
        ("date", run.created),
        ("profiled on", device_text(run.plan.device)),
        ("link, as profiled", link_text(run.plan.link)),
        ("versions", ", ".join(f"{name} {version}" for name, version in run.versions) or "–"),
    ]


def plan_facts(plan: Plan) -> list[Fact]:
    """What was planned, for which machine, and the plan's bound and gap."""
    capacity = capacity_bytes(plan)
    settings = ", ".join(f"{name}={value}" for name, value in plan.model.settings)
    gap = "0: proven optimal" if plan.proof.is_proven else percent_text(plan.proof.gap)
    gap += ", as it was made" if stale_prediction_notes(plan) else ""
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
        ("gap", gap),
        ("bubble with equal stages and free transfers", percent_text(plan.prediction.ideal_bubble)),
        (capacity_name(plan), bytes_text(capacity) if capacity is not None else "unknown"),
        ("device", device_text(plan.device)),
        ("link", link_text(plan.link)),
    ]


def _headline(name: str, row: ComparisonRow) -> Headline:
    predicted, measured = (quantity_text(x, row.unit) for x in (row.predicted, row.measured))
    error = error_text(row.error, row.unit)
    return Headline(name=name, predicted=predicted, measured=measured, error=error)


def notes_of(subject: Subject) -> tuple[str, ...]:
    """The notes of the plan and, for a run, of the run."""
    if isinstance(subject, Run):
        return subject.all_notes
    return *subject.notes, *stale_prediction_notes(subject)
