"""The traces of all ranks -> one measured step, with the median start and end of each action over the complete steps.

A traced step can be compared with its plan as a `Run`.

Traces of one host share its clock; each file names its start (`baseTimeNanoseconds`). If a file names none, the hosts
differ, or an action would start before its input was ready, the clocks are aligned by causality: no action starts
before its input is ready. This bounds the offset of two ranks from both sides, because work goes back and forth; the
middle is used, which assumes that the fastest transfer takes equally long in both directions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median

from msgspec import structs

from gplan.core import BACKWARD_KINDS, Action, ActionKind, Plan, Run, Span, Timeline
from gplan.core.errors import FileError
from gplan.core.units import counted, now_text, seconds_text
from gplan.evaluate.compare import order_difference
from gplan.interop.traces.actions import (
    RankSteps,
    StepKey,
    ranges_of,
    rank_steps,
    shared_keys,
)
from gplan.interop.traces.reading import RankTrace, Times, neighbour_of, read_trace
from gplan.schedules.dependencies import OrderError, check_orders, dependencies_of
from gplan.schedules.registry import every_schedule, make_schedule, schedule_info
from gplan.simulation.simulator import exposed_in, exposed_transfers, schedule_of, simulate

_ENOUGH_STEPS = 3  # from this number of complete steps on, the first is left out
_S_PER_US = 1e-6
_OPERATIONS = "the processor's operations, from the first to the last of each action"


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """One step, measured by the traces of all ranks of one pipeline."""

    timeline: Timeline  # of medians
    step_s: tuple[float, ...]  # of every complete step, from its first action to its last
    period_s: float | None  # median from one step's start to the next's; None: there is only one step
    num_warmup_steps: int  # of these steps, not in the medians
    schedule: str | None  # whose order the ranks followed; None: an unknown order
    basis: str  # what the times measure, in words
    clock: str  # how the ranks' clocks were aligned, in words
    notes: tuple[str, ...]

    @property
    def num_counted(self) -> int:
        """Steps that the medians are taken over."""
        return len(self.step_s) - self.num_warmup_steps


def read_traced(paths: Sequence[Path]) -> Traced:
    """One measured step from a trace of every rank; raises FileError if the traces are not of one pipeline."""
    traces = _in_order([read_trace(path) for path in paths])
    ranges = [ranges_of(trace, place=i, num_ranks=len(traces)) for i, trace in enumerate(traces)]
    ranks = [rank_steps(trace, own) for trace, own in zip(traces, ranges, strict=True)]
    _check_stages(traces, ranks)
    keys = shared_keys(ranks)
    try:
        orders = [[x for x in rank.actions if x.kind is not ActionKind.OPTIMIZER] for rank in ranks]
        num_microbatches = check_orders(orders).num_microbatches
    except OrderError as error:
        raise FileError(
            f"the traces are not those of one pipeline's training step: {error}; expected a trace of every rank"
        ) from error
    offsets_us, clock = common_clock(traces, ranks, keys)
    num_warmup_steps = 1 if len(keys) >= _ENOUGH_STEPS else 0
    begun_us = {key: _moment_us(ranks, key, offsets_us, which=0) for key in keys}
    spans = _median_spans(ranks, keys[num_warmup_steps:], offsets_us, begun_us)
    partial = sum(rank.num_partial for rank in ranks)
    notes = (
        [f"left out: {counted(partial, 'step')}, incomplete at the ends of the traces or unlike the others"]
        if partial
        else []
    )
    if not num_warmup_steps:
        notes.append(f"only {counted(len(keys), 'complete step')}, so the times may include warm-up; record 3 or more")
    step_s = [_S_PER_US * (_moment_us(ranks, key, offsets_us, which=1) - begun_us[key]) for key in keys]
    periods = [b - a for a, b in pairwise(begun_us[key] for key in keys[num_warmup_steps:])]
    return Traced(
        timeline=Timeline(
            num_devices=len(ranks),
            num_microbatches=num_microbatches,
            spans=tuple(spans),
            transfers=exposed_transfers(spans),
            origin="measured",
        ),
        step_s=tuple(step_s),
        period_s=_S_PER_US * median(periods) if periods else None,
        num_warmup_steps=num_warmup_steps,
        schedule=_schedule_of(ranks, num_microbatches),
        basis=_basis(traces),
        clock=clock,
        notes=tuple(notes),
    )


def _in_order(traces: Sequence[RankTrace]) -> list[RankTrace]:
    """The traces sorted by rank; files that name no rank stay in their order."""
    if any(trace.rank is None for trace in traces):
        return list(traces)
    known: dict[int, RankTrace] = {}
    for trace in traces:
        other = known.setdefault(trace.rank or 0, trace)
        if other is not trace:
            raise FileError(
                f"{other.name} and {trace.name} are both of rank {trace.rank}; expected one trace of every rank"
            )
    return [known[rank] for rank in sorted(known)]


def _check_stages(traces: Sequence[RankTrace], ranks: Sequence[RankSteps]) -> None:
    """Raise FileError unless every stage is in exactly one trace."""
    holder: dict[int, str] = {}
    for rank in ranks:
        for stage in rank.stages:
            other = holder.setdefault(stage, rank.name)
            if other != rank.name:
                raise FileError(
                    f"{other} and {rank.name} both have stage {stage}; expected the traces of one pipeline; of several "
                    "replicas give the traces of one"
                )
    beside = {x for trace in traces for mark in trace.marks if (x := neighbour_of(mark.name)) is not None}
    missing = sorted((set(range(max(holder))) | beside) - set(holder))
    if missing:
        raise FileError(
            f"the traces have stages {', '.join(map(str, sorted(holder)))}, and stage {missing[0]} is missing; expected a "
            f"trace of every rank of the pipeline, found {len(traces)}"
        )


def _moment_us(ranks: Sequence[RankSteps], key: StepKey, offsets_us: Sequence[float], *, which: int) -> float:
    """When a step's first action starts (`which` 0) or its last one ends (1)."""
    moments = [
        times[which] + offset
        for rank, offset in zip(ranks, offsets_us, strict=True)
        for times in rank.steps[key].values()
    ]
    return max(moments) if which else min(moments)


def _median_spans(
    ranks: Sequence[RankSteps], keys: Sequence[StepKey], offsets_us: Sequence[float], begun_us: dict[StepKey, float]
) -> list[Span]:
    """By device, then by start."""
    spans = []
    for device, (rank, offset) in enumerate(zip(ranks, offsets_us, strict=True)):
        for action in rank.steps[keys[0]]:
            times = [(rank.steps[key].get(action), offset - begun_us[key]) for key in keys]
            own = [(x[0] + shift, x[1] + shift) for x, shift in times if x is not None]
            start_s, end_s = (_S_PER_US * max(0.0, median(column)) for column in zip(*own, strict=True))
            spans.append(Span(device=device, action=action, start_s=start_s, end_s=max(start_s, end_s)))
    return sorted(spans, key=lambda x: (x.device, x.start_s, x.end_s))


def _schedule_of(ranks: Sequence[RankSteps], num_microbatches: int) -> str | None:
    """The schedule whose order every rank followed; ScheduleGPipe's backwards may begin with the first micro-batch."""
    orders = tuple(tuple(x for x in rank.actions if x.kind is not ActionKind.OPTIMIZER) for rank in ranks)
    num_chunks = len(ranks[0].stages)
    for name in every_schedule(num_chunks):
        if schedule_info(name).num_chunks != num_chunks:
            continue
        made = make_schedule(name, num_devices=len(ranks), num_microbatches=num_microbatches)
        turned = tuple((*x[:num_microbatches], *x[: num_microbatches - 1 : -1]) for x in made.orders)
        if made.orders == orders or (name == "gpipe" and turned == orders):
            return name
    return None


def _basis(traces: Sequence[RankTrace]) -> str:
    if all(x.has_kernels for x in traces):
        return "the GPU's kernels, from the first to the last of each action"
    if any(x.has_kernels for x in traces):
        return f"the GPU's kernels where a trace has them, elsewhere {_OPERATIONS}"
    return _OPERATIONS


# One clock for all ranks

_TOLERANCE_US = 20.0  # an action may seem to start this much too early before the host's clock is rejected
_US_PER_NS = 1e-3


def common_clock(
    traces: Sequence[RankTrace], ranks: Sequence[RankSteps], keys: Sequence[StepKey]
) -> tuple[Sequence[float], str]:
    """The offsets, to add to each rank's microseconds, that put all ranks on the clock of the first, and how they were found."""
    bases = [trace.base_ns for trace in traces]
    hosts = sorted({trace.host or "?" for trace in traces})
    if len(traces) == 1:
        return (0.0,), "one rank, one clock"
    known = [0.0 if base is None else _US_PER_NS * (base - (bases[0] or 0)) for base in bases]
    early_us = max((-x for x in _slack_us(ranks, keys, known).values()), default=0.0)
    if None in bases:
        why = "a trace does not name the start of its clock"
    elif len(hosts) > 1:
        why = f"the ranks ran on {len(hosts)} hosts ({', '.join(hosts)})"
    elif early_us > _TOLERANCE_US:
        why = f"by the host's clock an action would start {early_us:.0f} us before its input is ready"
    else:
        return known, "the clock of the host that all ranks ran on"
    description = f"{why}, so the clocks were aligned by causality: no action starts before its input is ready"
    return _by_causes(ranks, keys), description


def _by_causes(ranks: Sequence[RankSteps], keys: Sequence[StepKey]) -> tuple[float, ...]:
    """Offsets in the middle of what causality allows, rank after rank from the first."""
    slack, known = _slack_us(ranks, keys, [0.0] * len(ranks)), {0: 0.0}
    while len(known) < len(ranks):
        there, here = next((b, a) for pair in slack for a, b in (pair, pair[::-1]) if a in known and b not in known)
        least, most = -slack.get((here, there), math.inf), slack.get((there, here), math.inf)
        bounds = [x for x in (least, most) if math.isfinite(x)]
        known[there] = known[here] + sum(bounds) / len(bounds)
    return tuple(known[i] for i in range(len(ranks)))


def _slack_us(
    ranks: Sequence[RankSteps], keys: Sequence[StepKey], offsets_us: Sequence[float]
) -> dict[tuple[int, int], float]:
    """By sender and receiver: the shortest time from the end of an action to the start of the one that depends on it.

    Below 0 the dependent action seems to start too early.
    """
    device = {action: i for i, rank in enumerate(ranks) for action in rank.actions}
    done = [action for action in device if action.kind is not ActionKind.OPTIMIZER]
    slack: dict[tuple[int, int], float] = {}
    for action, need in dependencies_of(done, 1 + max(x.stage for x in done)).items():
        pair = device[need], device[action]
        if pair[0] == pair[1]:
            continue
        for key in keys:
            left = _time(ranks, offsets_us, pair[1], key, action)[0] - _time(ranks, offsets_us, pair[0], key, need)[1]
            slack[pair] = min(left, slack.get(pair, math.inf))
    return slack


def _time(ranks: Sequence[RankSteps], offsets_us: Sequence[float], rank: int, key: StepKey, action: Action) -> Times:
    steps: Mapping[Action, Times] = ranks[rank].steps[key]
    return steps[action][0] + offsets_us[rank], steps[action][1] + offsets_us[rank]


# The run of a plan

_MOST_FACTOR = 4.0  # a stage's time may differ from the plan's by this factor before a note doubts the plan


def traced_run(traced: Traced, plan: Plan) -> Run:
    """The traced step as a run of `plan`, without losses and with peak memory 0; raises FileError if another plan was
    run."""
    _check_plan(traced, plan)
    spans = sorted(
        (structs.replace(x, device=plan.devices[x.action.stage]) for x in traced.timeline.spans),
        key=lambda x: (x.device, x.start_s, x.end_s),
    )
    timeline = replace(traced.timeline, spans=tuple(spans), transfers=exposed_in(plan, spans))
    return Run(
        plan=plan,
        engine="torch",
        losses=(),
        step_s=traced.step_s,
        num_warmup_steps=traced.num_warmup_steps,
        num_disturbed=0,
        num_counted=traced.num_counted,
        timeline=timeline,
        peak_bytes=(0,) * plan.num_devices,
        check=None,
        created=now_text(),
        versions=(),
        notes=tuple(_notes(traced, timeline, plan)),
    )


def _check_plan(traced: Traced, plan: Plan) -> None:
    """Raise FileError unless the traced devices have the plan's stages, micro-batches and actions."""
    measured = traced.timeline
    own = [tuple(x.index for x in plan.stages_of(device)) for device in range(plan.num_devices)]
    places = [sorted(x) for x in (measured.stages_by_device, own)]
    ran = {x.action for x in measured.loop_spans}
    planned = {x for order in schedule_of(plan).orders for x in order}
    if places[0] != places[1]:
        found, expected = (f"{len(x)} devices ({' and '.join('/'.join(map(str, y)) for y in x)})" for x in places)
        found, expected = f"{measured.num_stages} stages on {found}", f"{plan.num_stages} stages on {expected}"
    elif measured.num_microbatches != plan.num_microbatches:
        found, expected = f"{measured.num_microbatches} micro-batches a step", str(plan.num_microbatches)
    elif ran != planned:  # backwards are split in one of them and whole in the other
        strange = min(ran ^ planned)
        parts = [Action(strange.stage, kind, strange.microbatch) for kind in BACKWARD_KINDS]
        found, expected = (" ".join(str(x) for x in parts if x in actions) for actions in (ran, planned))
        found = f"a backward {found}"
    else:
        return
    raise FileError(f"the traces have {found}; the plan has {expected}; give the plan that was run, or none")


def _notes(traced: Traced, timeline: Timeline, plan: Plan) -> Iterator[str]:
    yield f"imported from torch.profiler traces of {plan.num_devices} ranks: the times are those of {traced.basis}; {traced.clock}"
    yield "traces contain neither losses nor memory; the peak memory of this run is 0 because it was not measured"
    yield from traced.notes
    yield from _doubts(timeline, plan)
    if not any(x.action.kind is ActionKind.OPTIMIZER for x in timeline.spans):
        yield "the traces have no optimizer, so the step ends with the last backward"
    other = order_difference(plan, timeline)
    if other is not None:
        spans = (x for x in timeline.loop_spans if x.device == other.device)
        backwards = [x.action.microbatch for x in spans if x.action.kind is ActionKind.BACKWARD]
        is_gpipe = plan.schedule == "gpipe" and backwards == sorted(backwards)
        turned = " (ScheduleGPipe's backwards begin with the first micro-batch, the plan's with the last)"
        yield (
            f"the order differs from {schedule_info(plan.schedule).title}: device {other.device} ran {other.ran} as action "
            f"{other.index}, where the plan has {other.planned}{turned if is_gpipe else ''}"
        )


def _doubts(timeline: Timeline, plan: Plan) -> Iterator[str]:
    """A note if a stage's time is so far from the plan's that the traces may be of another model or machine."""
    ran, planned = (
        [x.total_s(ActionKind.FORWARD, *BACKWARD_KINDS, stage=stage) for stage in range(plan.num_stages)]
        for x in (timeline, simulate(plan))
    )
    factors = [max(a / b, b / a) if a and b else 1.0 for a, b in zip(ran, planned, strict=True)]
    stage = max(range(plan.num_stages), key=factors.__getitem__)
    if factors[stage] > _MOST_FACTOR:
        yield (
            f"stage {stage} computed for {seconds_text(ran[stage])} of a step, the plan has {seconds_text(planned[stage])}: "
            "it may be the plan of another model, of another micro-batch size or for another machine"
        )
