"""Combines what the processes measured into one Run with a measured Timeline.

A timeline has means over all steps that count. Unlike medians, means add up: the gap between two mean times is the mean
gap. No step is left out for its length (docs/cost-model.md, Host speed).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from itertools import chain
from statistics import fmean

import msgspec

from gplan.core import (
    Action,
    ActionKind,
    HostLoad,
    Plan,
    Run,
    Span,
    Timeline,
)
from gplan.core.host_load import interruption_text, largest_load
from gplan.core.schedule import Piece
from gplan.core.units import now_text
from gplan.runtime.recorder import ActionTiming
from gplan.runtime.run.run_options import RunOptions, StepRecord
from gplan.runtime.validation import notes_on_cores, notes_on_machine
from gplan.simulation.simulator import exposed_in, schedule_of, timeline_of
from gplan_profiler.host.host_info import gpu_state, software_versions
from gplan_profiler.timing.clock import is_undisturbed
from gplan_profiler.torch_compat import torch_notes

_PAGE_FAULT_S = 2e-6  # at least; measured 1 to 11 microseconds for a page that is given anew
_MOST_FAULTS_SHARE = 0.003  # of a step's time


def torch_run(
    plan: Plan,
    ranks: Sequence[Sequence[StepRecord]],
    *,
    peak_bytes: Sequence[int],
    reserved_bytes: Sequence[int] = (),
    options: RunOptions,
    loads: Sequence[HostLoad] = (),
    num_hosts: int = 1,
    num_cores: int | None = None,
) -> Run:
    """Return the run of one process per device; `ranks[r][i]` is step i on rank r.

    The timeline is that of the first replica; a device's peak is the largest of its replicas, and so is what its
    allocator reserved, 0 if unknown. Notes on the machine are made only for a run on one host, of whose cores the ranks had
    `num_cores` together (None: as many as they need).
    """
    steps = list(zip(*ranks, strict=True))
    largest = [max(reserved_bytes[device :: plan.num_devices], default=0) for device in range(plan.num_devices)]
    on_cores, on_machine = (notes_on_cores(plan, num_cores), notes_on_machine(plan)) if num_hosts == 1 else ((), ())
    run = _run(
        plan,
        ranks,
        engine="torch",
        step_s=[max(x.end_s for x in step) - min(x.start_s for x in step) for step in steps],
        mean_timeline=lambda chosen: _measured_timeline(plan, [steps[i][: plan.num_devices] for i in chosen]),
        peak_bytes=[max(peak_bytes[device :: plan.num_devices]) for device in range(plan.num_devices)],
        notes=(*on_cores, *on_machine),
        options=options,
        loads=() if on_cores else loads,  # with too few cores the ranks wait for each other
    )
    return replace(run, reserved_bytes=tuple(largest)) if any(largest) else run


def on_one_clock(ranks: Sequence[Sequence[StepRecord]], clocks: Sequence[str]) -> list[list[StepRecord]]:
    """The steps of every rank by the clock of rank 0.

    The clocks of other hosts begin elsewhere and drift. All ranks leave a barrier when a step begins, so a rank with another
    clock began each step when rank 0 did, up to the time of a message.
    """

    def shifted(step: StepRecord, first: StepRecord) -> StepRecord:
        later_s = first.start_s - step.start_s
        actions = tuple(replace(x, start_s=x.start_s + later_s, end_s=x.end_s + later_s) for x in step.actions)
        return replace(step, actions=actions, start_s=first.start_s, end_s=step.end_s + later_s)

    return [
        list(own) if clock == clocks[0] else [shifted(x, first) for x, first in zip(own, ranks[0], strict=True)]
        for own, clock in zip(ranks, clocks, strict=True)
    ]


def virtual_run(
    plan: Plan,
    steps: Sequence[StepRecord],
    *,
    peak_bytes: Sequence[int],
    options: RunOptions,
    loads: Sequence[HostLoad] = (),
) -> Run:
    """Return the run of the virtual engine: measured durations, laid out on the plan's devices and links.

    Transfers and the engine's cost are as planned.
    """
    per_step = [_durations(step.actions, num_replicas=plan.num_replicas) for step in steps]

    # A device updates all of its stages at once, which counts for the first of them.
    updates = {Action(stage.index, ActionKind.OPTIMIZER, 0): 0.0 for stage in plan.stages}

    def mean_timeline(chosen: Sequence[int]) -> Timeline:
        durations = {x: fmean(per_step[i][x] for i in chosen) for x in per_step[0]}
        duration_s = {**updates, **durations}.__getitem__
        laid = timeline_of(schedule_of(plan), plan.stage_costs, duration_s=duration_s, origin="measured")
        return replace(laid, spans=tuple(span for span in laid.spans if span.action in durations))

    return _run(
        plan,
        [steps],
        engine="virtual",
        step_s=[mean_timeline([i]).step_s for i in range(len(steps))],
        mean_timeline=mean_timeline,
        peak_bytes=peak_bytes,
        notes=notes_on_machine(plan),
        options=options,
        loads=loads,
    )


def _run(
    plan: Plan,
    ranks: Sequence[Sequence[StepRecord]],
    *,
    engine: str,
    step_s: Sequence[float],
    mean_timeline: Callable[[Sequence[int]], Timeline],
    peak_bytes: Sequence[int],
    notes: tuple[str, ...],
    options: RunOptions,
    loads: Sequence[HostLoad],
) -> Run:
    """`ranks` and `loads` are by process; `mean_timeline` averages over steps of the first replica."""
    load = largest_load(loads)
    timed = range(options.num_warmup_steps, len(step_s))
    first_replica = ranks[: plan.num_devices]
    growing = {i for i in timed if any(_is_growing(own[i]) for own in first_replica)}
    settled = _enough([i for i in timed if i not in growing], timed)
    clean = []
    for i in settled:
        own_work = [x for own in ranks for x in own[i].actions if _is_own_work(plan, x, num_ranks=len(ranks))]
        if is_undisturbed(sum(x.end_s - x.start_s for x in own_work), sum(x.busy_s for x in own_work)):
            clean.append(i)
    chosen, num_disturbed = _enough(clean, settled), len(settled) - len(clean)
    return Run(
        plan=plan,
        engine=engine,
        losses=tuple(x.loss for x in ranks[0]),
        step_s=tuple(step_s),
        num_warmup_steps=options.num_warmup_steps,
        num_counted=len(chosen),
        num_disturbed=num_disturbed,
        num_growing=len(timed) - len(settled),
        timeline=mean_timeline(chosen),
        step_timelines=tuple(mean_timeline([i]) for i in chosen) if options.keeps_steps else (),
        peak_bytes=tuple(peak_bytes),
        check=None,
        created=now_text(),
        versions=(*software_versions(), *(gpu_state() if plan.device.kind == "cuda" else ())),
        notes=(
            *_notes_on_steps(
                settled, chosen=chosen, num_disturbed=num_disturbed, growing=growing, options=options, load=load
            ),
            *notes,
            *torch_notes(),
        ),
        host_load=load,
    )


def _notes_on_steps(
    settled: Sequence[int],
    *,
    chosen: Sequence[int],
    num_disturbed: int,
    growing: Set[int],
    options: RunOptions,
    load: HostLoad | None,
) -> tuple[str, ...]:
    """Note a missing warm-up, and steps that count although they were disturbed or the memory still grew in them."""
    found: list[str] = []
    num_counted, num_growing = len(chosen), len(growing & set(chosen))
    if not options.num_warmup_steps:
        found.append("too few steps for a warm-up: first-time costs and the reading of memory are in the times")
    if num_growing:
        found.append(
            f"{num_growing} of {num_counted} steps that count ran while the memory of a process still grew, as fewer than three "
            "other steps remained; such steps take longer, mostly in the optimizer; run again with more --steps"
        )
    if num_disturbed > len(settled) - num_counted:
        idle = " on an idle host, or" if load is not None and load.is_evidence else ""
        found.append(
            f"steps that count although they were {interruption_text(load)}: {num_disturbed} of {num_counted}, as too few were "
            f"clean; times and errors are those of such steps; run again{idle} with more --steps"
        )
    return tuple(found)


def _enough(steps: Sequence[int], of: Sequence[int]) -> Sequence[int]:
    """Return the steps, or all of `of` if they are fewer than three."""
    return steps if len(steps) >= 3 else of


def _is_growing(step: StepRecord) -> bool:
    """Whether the system gave the process so many pages in the step that it took a part of it worth mentioning.

    Tables of large models leave gaps in the allocator's memory: it grows in some of the first ten steps.
    """
    return step.num_page_faults * _PAGE_FAULT_S > _MOST_FAULTS_SHARE * (step.end_s - step.start_s)


def _is_own_work(plan: Plan, timing: ActionTiming, *, num_ranks: int) -> bool:
    """Whether an action waits for no other replica: updates include sums over replicas, sharded passes gather weights."""
    if plan.num_replicas == 1 or num_ranks == 1:
        return True
    return plan.sharding != "weights" and timing.action.kind is not ActionKind.OPTIMIZER


def _measured_timeline(plan: Plan, steps: Sequence[Sequence[StepRecord]]) -> Timeline:
    """Return mean start and end of every action, and of every receiver's wait for a transfer.

    Waits are determined in each step: an input that is late in some steps only is not late in the mean step.
    """
    seen = list[list[Span]]()  # of each step its actions by device and start, from the first device's start on
    for step in steps:
        begun_s = min(x.start_s for x in step)
        own = [
            Span(device=i, action=x.action, start_s=max(0.0, x.start_s - begun_s), end_s=max(0.0, x.end_s - begun_s))
            for i, record in enumerate(step)
            for x in record.actions
        ]
        seen.append(sorted(own, key=lambda span: (span.device, span.start_s)))
    spans = sorted(_means(seen), key=lambda span: (span.device, span.start_s))
    return Timeline(
        num_devices=plan.num_devices,
        num_microbatches=plan.num_microbatches,
        spans=tuple(spans),
        transfers=tuple(_means([exposed_in(plan, own) for own in seen])),
        origin="measured",
    )


def _means(steps: Sequence[Sequence[Piece]]) -> list[Piece]:
    """Return each span or transfer with its mean start and end."""
    same: dict[Action, list[Piece]] = {}
    for piece in chain.from_iterable(steps):
        same.setdefault(piece.action, []).append(piece)
    return [
        msgspec.structs.replace(x[0], start_s=fmean(y.start_s for y in x), end_s=fmean(y.end_s for y in x))
        for x in same.values()
    ]


def _durations(actions: Sequence[ActionTiming], *, num_replicas: int) -> dict[Action, float]:
    """Return the seconds of each action, the mean over the replicas' passes; an update may consist of several parts."""
    durations: dict[Action, float] = {}
    for x in actions:
        num_times = 1 if x.action.kind is ActionKind.OPTIMIZER else num_replicas
        durations[x.action] = durations.get(x.action, 0.0) + (x.end_s - x.start_s) / num_times
    return durations
