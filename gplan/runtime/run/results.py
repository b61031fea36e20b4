"""What the processes saw, put together: one Run with a measured Timeline.

A timeline holds means over the steps of middle length, which leave out a quarter at either end: of what slowed some
steps they know nothing, and unlike medians they add up: what lies between two means is a mean, where between the
medians of two moments lies also what steps differ by, which is more than most gaps.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain
from statistics import fmean
from typing import TypeVar

import msgspec

from gplan.core import Action, ActionKind, GradientCheck, Plan, Run, Span, Timeline, Transfer
from gplan.core.units import counted
from gplan.evaluate.compare import stale_prediction_notes
from gplan.runtime.recorder import ActionTiming
from gplan.runtime.run.options import RunOptions, StepRecord
from gplan.runtime.validation import notes_on_machine
from gplan.simulation.exposed_communication import exposed_in
from gplan.simulation.simulator import schedule_of, timeline_of
from profiler.host.host_info import software_versions
from profiler.timing.clock import is_undisturbed

Piece = TypeVar("Piece", Span, Transfer)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measurements:
    """What one engine's processes saw, before it is a Run."""

    losses: Sequence[float]
    step_s: Sequence[float]
    counted: Sequence[int]  # the steps of which the timeline is made
    num_disturbed: int
    timeline: Timeline
    step_timelines: Sequence[Timeline] = ()


def torch_run(
    plan: Plan,
    ranks: Sequence[Sequence[StepRecord]],
    *,
    peak_bytes: Sequence[int],
    check: GradientCheck | None,
    options: RunOptions,
) -> Run:
    """The run of one process per device; `ranks[r][i]` is what rank r saw of step i.

    The timeline is that of the first replica; a device's peak is the largest of its replicas'.
    """
    steps = list(zip(*ranks, strict=True))
    num_devices = plan.num_devices
    chosen, num_disturbed = _counted([[x for seen in step for x in seen.noted] for step in steps], options)
    step_s = [max(x.end_s for x in step) - min(x.start_s for x in step) for step in steps]
    of_replica = [step[:num_devices] for step in steps]
    seen = _Measurements(
        losses=[step[0].loss for step in steps],
        step_s=step_s,
        counted=chosen,
        num_disturbed=num_disturbed,
        timeline=_measured_timeline(plan, [of_replica[i] for i in _of_middle_length(chosen, step_s)]),
        step_timelines=[_measured_timeline(plan, [of_replica[i]]) for i in chosen] if options.keeps_steps else (),
    )
    notes = _notes_on_cores(plan)
    peaks = [max(peak_bytes[device::num_devices]) for device in range(num_devices)]
    return _run(plan, seen, engine="torch", peak_bytes=peaks, check=check, notes=notes, options=options)


def virtual_run(
    plan: Plan,
    steps: Sequence[StepRecord],
    *,
    peak_bytes: Sequence[int],
    check: GradientCheck | None,
    options: RunOptions,
) -> Run:
    """The run of the virtual engine: measured durations, laid out on the plan's devices and link."""
    chosen, num_disturbed = _counted([step.noted for step in steps], options)
    per_step = [_durations(step.noted) for step in steps]
    laid_out = [_virtual_timeline(plan, times) for times in per_step]
    step_s = [timeline.step_s for timeline in laid_out]
    typical = [per_step[i] for i in _of_middle_length(chosen, step_s)]
    means = {action: fmean(times[action] for times in typical) for action in per_step[0]}
    seen = _Measurements(
        losses=[step.loss for step in steps],
        step_s=step_s,
        counted=chosen,
        num_disturbed=num_disturbed,
        timeline=_virtual_timeline(plan, means),
        step_timelines=[laid_out[i] for i in chosen] if options.keeps_steps else (),
    )
    return _run(plan, seen, engine="virtual", peak_bytes=peak_bytes, check=check, notes=(), options=options)


def _run(
    plan: Plan,
    seen: _Measurements,
    *,
    engine: str,
    peak_bytes: Sequence[int],
    check: GradientCheck | None,
    notes: tuple[str, ...],
    options: RunOptions,
) -> Run:
    return Run(
        plan=plan,
        engine=engine,
        losses=tuple(seen.losses),
        step_s=tuple(seen.step_s),
        num_warmup_steps=options.num_warmup_steps,
        num_counted=len(seen.counted),
        num_disturbed=seen.num_disturbed,
        timeline=seen.timeline,
        step_timelines=tuple(seen.step_timelines),
        peak_bytes=tuple(peak_bytes),
        check=check,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=software_versions(),
        notes=(*_notes_on_steps(seen, options), *notes, *notes_on_machine(plan), *stale_prediction_notes(plan)),
    )


def _notes_on_steps(seen: _Measurements, options: RunOptions) -> tuple[str, ...]:
    """Without a warm-up, or where disturbed steps count, the measured times are doubtful."""
    found: list[str] = []
    if not options.num_warmup_steps:
        found.append("too few steps for a warm-up: first-time costs and the reading of memory are in the times")
    if seen.num_disturbed > len(seen.step_s) - options.num_warmup_steps - len(seen.counted):
        found.append(
            f"other work used the processor in {seen.num_disturbed} of {counted(len(seen.counted), 'step')}, which count all "
            "the same, as too few were clean: times and errors are those of a busy host; run again when it is idle, or with "
            "more --steps"
        )
    return tuple(found)


def _notes_on_cores(plan: Plan) -> tuple[str, ...]:
    """A host with fewer cores than devices cannot show what the devices would do."""
    num_threads, num_cores = plan.device.num_threads, os.cpu_count() or 1  # a rank is pinned to its own
    num_devices = plan.num_devices * plan.num_replicas
    if num_devices * num_threads <= num_cores:
        return ()
    shared = f"{num_devices} processes of {num_threads} threads shared {num_cores} cores"
    return (f"{shared}, so the times are not those of as many devices; --engine virtual times the stages apart",)


def _counted(steps: Sequence[Sequence[ActionTiming]], options: RunOptions) -> tuple[list[int], int]:
    """Which steps count, and how many were disturbed; all count if fewer than three are clean."""
    timed = range(options.num_warmup_steps, len(steps))
    clean = [i for i in timed if _is_clean(steps[i])]
    return clean if len(clean) >= 3 else list(timed), len(timed) - len(clean)


def _of_middle_length(chosen: Sequence[int], step_s: Sequence[float]) -> list[int]:
    """The chosen steps without the shortest quarter and the longest; of three the middle one."""
    rising, num_short = sorted(chosen, key=step_s.__getitem__), (len(chosen) + 1) // 4
    return rising[num_short : len(rising) - num_short]


def _is_clean(noted: Sequence[ActionTiming]) -> bool:
    return is_undisturbed(sum(x.end_s - x.start_s for x in noted), sum(x.busy_s for x in noted))


def _measured_timeline(plan: Plan, steps: Sequence[Sequence[StepRecord]]) -> Timeline:
    """The means over steps: when every action began and ended, and from when to when its receiver waited for a transfer.

    Transfers are seen in every step by itself: an input that comes too late in some steps alone has come in the mean one.
    """
    seen = [_spans_of(step) for step in steps]
    spans = sorted(_means(seen), key=lambda span: (span.device, span.start_s))
    return Timeline(
        num_devices=plan.num_devices,
        num_microbatches=plan.num_microbatches,
        spans=tuple(spans),
        transfers=tuple(_means([exposed_in(plan, own) for own in seen])),
        origin="measured",
    )


def _spans_of(step: Sequence[StepRecord]) -> list[Span]:
    """What the devices noted of one step, by device and start, since the first of them began it."""
    begun_s = min(seen.start_s for seen in step)
    spans = [
        Span(device=device, action=x.action, start_s=max(0.0, x.start_s - begun_s), end_s=max(0.0, x.end_s - begun_s))
        for device, seen in enumerate(step)
        for x in seen.noted
    ]
    return sorted(spans, key=lambda span: (span.device, span.start_s))


def _means(steps: Sequence[Sequence[Piece]]) -> list[Piece]:
    """Each piece of the steps from the mean of its starts to that of its ends."""
    same: dict[Action, list[Piece]] = {}
    for piece in chain.from_iterable(steps):
        same.setdefault(piece.action, []).append(piece)
    return [
        msgspec.structs.replace(x[0], start_s=fmean(y.start_s for y in x), end_s=fmean(y.end_s for y in x))
        for x in same.values()
    ]


def _durations(noted: Sequence[ActionTiming]) -> dict[Action, float]:
    """Seconds of each action; an update may be noted in pieces, with those of other devices in between."""
    durations: dict[Action, float] = {}
    for x in noted:
        durations[x.action] = durations.get(x.action, 0.0) + x.end_s - x.start_s
    return durations


def _virtual_timeline(plan: Plan, durations: dict[Action, float]) -> Timeline:
    """Each device updates all of its stages at once, which counts for the first of them.

    Transfers, and what the engine takes between processes, are as planned.
    """
    costs = [stage.cost for stage in plan.stages]
    updates = {Action(stage.index, ActionKind.OPTIMIZER, 0): 0.0 for stage in plan.stages}
    laid = timeline_of(schedule_of(plan), costs, duration_s={**updates, **durations}.__getitem__, origin="measured")
    return replace(laid, spans=tuple(span for span in laid.spans if span.action in durations))
