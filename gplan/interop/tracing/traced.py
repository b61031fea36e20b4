"""Several ranks' traces -> one measured step: for each action the medians of its start and end over the whole steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import msgspec

from gplan.errors import FileError
from gplan.exposed import exposed_transfers
from gplan.interop.tracing.clocks import Clock, common_clock
from gplan.interop.tracing.occupied import Device
from gplan.interop.tracing.ranges import least_leads_us, missing_stages, ranges_of
from gplan.interop.tracing.reading import RankTrace, read_trace
from gplan.interop.tracing.steps import RankSteps, StepKey, rank_steps, shared_keys
from gplan.nouns import ActionKind, Span, Timeline
from gplan.schedules import SCHEDULES, OrderError, check_orders, make_schedule

_ENOUGH_STEPS = 3  # whole ones, from which on the first is left out
_S_PER_US = 1e-6
_OPERATIONS = (
    "the processor's operations, from the first to the last of each action, and the stage's own code before them"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """What the traces of one pipeline's ranks measured."""

    timeline: Timeline  # of medians
    step_s: tuple[float, ...]  # of every whole step, from its first action to its last
    period_s: float | None  # from one step's start to the next's, a median; None: by one step alone
    num_warmup_steps: int  # of them, not in the medians
    schedule: str | None  # whose order the ranks followed; None: none that is known
    basis: str  # what the times are of, in words
    clock: str  # how the ranks' clocks were made one, in words
    notes: tuple[str, ...]

    @property
    def stages_of_devices(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each device, rising."""
        held: list[set[int]] = [set() for _ in range(self.timeline.num_devices)]
        for span in self.timeline.spans:
            held[span.device].add(span.action.stage)
        return tuple(tuple(sorted(x)) for x in held)

    @property
    def num_counted(self) -> int:
        """Steps that the medians are taken over."""
        return len(self.step_s) - self.num_warmup_steps


def read_traced(paths: Sequence[Path]) -> Traced:
    """One measured step from a trace of every rank; raises FileError where the traces are not those of one pipeline."""
    traces = _in_order([read_trace(path) for path in paths])
    devices = [Device(trace) for trace in traces]
    ranges = [ranges_of(device, place=i, num_ranks=len(traces)) for i, device in enumerate(devices)]
    leads_us = least_leads_us(devices, ranges)
    ranks = [rank_steps(device, own, leads_us=leads_us) for device, own in zip(devices, ranges, strict=True)]
    _check_stages(traces, ranks)
    keys = shared_keys(ranks)
    num_microbatches = _check_actions(ranks)
    clock = common_clock(traces, ranks, keys)
    return _traced(ranks, keys, clock, num_microbatches=num_microbatches, basis=_basis(devices))


def traced_json(traced: Traced) -> str:
    """All of it as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(traced), indent=1).decode() + "\n"


def _in_order(traces: Sequence[RankTrace]) -> list[RankTrace]:
    """By rank; files that name none stay in their order."""
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
    """Every stage once, and none left out."""
    holder: dict[int, str] = {}
    for rank in ranks:
        for stage in rank.stages:
            other = holder.setdefault(stage, rank.name)
            if other != rank.name:
                raise FileError(
                    f"{other} and {rank.name} both have stage {stage}; expected the traces of one pipeline: of replicas "
                    "give those of one"
                )
    beside = set().union(*(missing_stages(trace, set(holder)) for trace in traces))
    missing = sorted((set(range(max(holder))) | beside) - set(holder))
    if missing:
        raise FileError(
            f"the traces have stages {', '.join(map(str, sorted(holder)))}, and stage {missing[0]} is missing; expected a "
            f"trace of every rank of the pipeline, found {len(traces)}"
        )


def _check_actions(ranks: Sequence[RankSteps]) -> int:
    """How many micro-batches a step has; raises FileError for steps that are no training step."""
    orders = [[x for x in rank.actions if x.kind is not ActionKind.OPTIMIZER] for rank in ranks]
    try:
        return check_orders(orders)[1]
    except OrderError as error:
        raise FileError(
            f"the traces are not those of one pipeline's training step: {error}; expected a trace of every rank"
        ) from error


def _traced(
    ranks: Sequence[RankSteps], keys: Sequence[StepKey], clock: Clock, *, num_microbatches: int, basis: str
) -> Traced:
    num_warmup_steps = 1 if len(keys) >= _ENOUGH_STEPS else 0
    begun_us = {key: _moment_us(ranks, key, clock, which=0) for key in keys}
    spans = _median_spans(ranks, keys[num_warmup_steps:], clock, begun_us)
    partial = sum(rank.num_partial for rank in ranks)
    notes = (
        [f"{partial} steps that are not whole, at the ends of the traces, or not like the others were left out"]
        if partial
        else []
    )
    if not num_warmup_steps:
        notes.append(f"only {len(keys)} whole steps, so first-time costs may be in the times; record 3 or more")
    step_s = [_S_PER_US * (_moment_us(ranks, key, clock, which=1) - begun_us[key]) for key in keys]
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
        basis=basis,
        clock=clock.said,
        notes=tuple(notes),
    )


def _moment_us(ranks: Sequence[RankSteps], key: StepKey, clock: Clock, *, which: int) -> float:
    """When a step's first action starts (`which` 0) or its last one ends (1)."""
    moments = [
        times[which] + offset
        for rank, offset in zip(ranks, clock.offsets_us, strict=True)
        for times in rank.steps[key].values()
    ]
    return max(moments) if which else min(moments)


def _median_spans(
    ranks: Sequence[RankSteps], keys: Sequence[StepKey], clock: Clock, begun_us: dict[StepKey, float]
) -> list[Span]:
    """By device, then by start."""
    spans = []
    for device, (rank, offset) in enumerate(zip(ranks, clock.offsets_us, strict=True)):
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
    for name, rule in SCHEDULES.items():
        if rule.num_chunks not in (None, num_chunks):
            continue
        full = name if rule.num_chunks is not None else f"{name}:{num_chunks}"
        made = make_schedule(full, num_devices=len(ranks), num_microbatches=num_microbatches)
        turned = tuple((*x[:num_microbatches], *x[: num_microbatches - 1 : -1]) for x in made.orders)
        if made.orders == orders or (name == "gpipe" and turned == orders):
            return full
    return None


def _basis(devices: Sequence[Device]) -> str:
    if all(x.has_kernels for x in devices):
        return "the GPU's kernels, from the first to the last of each action"
    if any(x.has_kernels for x in devices):
        return f"the GPU's kernels where a trace has them, elsewhere {_OPERATIONS}"
    return _OPERATIONS
