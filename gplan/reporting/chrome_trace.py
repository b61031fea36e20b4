"""The timelines as Chrome trace JSON, for Perfetto and chrome://tracing: times in microseconds, sizes in bytes.

A process is a device of one side, predicted devices first. Its threads are compute, idle time by cause, and one
communication lane for each transfer that overlaps others, since viewers drop overlapping events of a track. Arrows lead
from the sending action through its transfer to the receiving one. The predicted memory by category, and for a run the
measured peak, are counters. Processes and threads count from 1, as viewers reserve 0 for the idle thread.

Source: Trace Event Format (the Chromium project): phases X, M, C and s, t, f; an arrow attaches to the slice that
encloses its end.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from gplan.core import Action, ActionKind, Idle, Plan, Run, Span, Timeline, Transfer
from gplan.reporting.looks import ACTIONS, COMMUNICATION, IDLE, MEASURED_PEAK, MEMORY
from gplan.reporting.subject import MEASURED, PREDICTED, Subject, plan_of, side_text, timelines_of
from gplan.schedules.dependencies import INPUT_GRADIENT_KINDS
from gplan.schedules.registry import schedule_info
from gplan.simulation.bubble import idle_pieces
from gplan.simulation.memory_timeline import Holding, memory_timeline

Event: TypeAlias = dict[str, object]

_COMPUTE, _WAITING, _FIRST_LANE = 1, 2, 3
_NS_PER_S, _US_PER_NS = 1e9, 1e-3


def trace_json(subject: Subject) -> bytes:
    """The trace of a plan, or of a run beside its plan."""
    plan, events = plan_of(subject), list[Event]()
    first_pid, first_flow, first_pids = 1, 0, dict[str, int]()
    for name, timeline in timelines_of(subject).items():
        side = _Side(
            name=side_text(subject, name),
            plan=plan,
            timeline=timeline,
            first_pid=first_pid,
            first_flow=first_flow,
            spans={span.action: span for span in timeline.spans},
        )
        events += side.events()
        first_pids[name] = first_pid
        first_pid, first_flow = first_pid + timeline.num_devices, first_flow + len(timeline.transfers)
    events += _holding_events(memory_timeline(plan), first_pid=first_pids[PREDICTED])
    if isinstance(subject, Run):
        events += _peak_events(subject, first_pid=first_pids[MEASURED])
    other = {"model": plan.model.name, "schedule": schedule_info(plan.schedule).title}
    trace = {"displayTimeUnit": "ms", "otherData": other, "traceEvents": events}
    return json.dumps(trace, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """One timeline as a group of processes."""

    name: str
    plan: Plan
    timeline: Timeline
    first_pid: int
    first_flow: int
    spans: Mapping[Action, Span]

    def events(self) -> Iterator[Event]:
        lanes = _lanes(self.timeline.transfers)
        for device in range(self.timeline.num_devices):
            used = {lane for transfer, lane in lanes.items() if transfer.source == device}
            yield from self._names(device, used)
        for span in self.timeline.spans:
            yield self._action(span)
        yield from self._idle()
        for flow, (transfer, lane) in enumerate(lanes.items(), start=self.first_flow):
            yield self._transfer(transfer, _FIRST_LANE + lane)
            yield from self._arrow(transfer, _FIRST_LANE + lane, flow)

    def _names(self, device: int, lanes: set[int]) -> Iterator[Event]:
        pid, stages = self.first_pid + device, self.plan.stages_of(device)
        threads = {_COMPUTE: "compute", _WAITING: "waiting"}
        threads |= {_FIRST_LANE + lane: f"{COMMUNICATION.name} {lane + 1}" for lane in sorted(lanes)}
        yield _metadata("process_name", pid, _COMPUTE, name=f"{self.name}: device {device}")
        yield _metadata(
            "process_labels", pid, _COMPUTE, labels="; ".join(f"stage {x.index}: {x.layers_text}" for x in stages)
        )
        yield _metadata("process_sort_index", pid, _COMPUTE, sort_index=pid)
        for tid, thread in threads.items():
            yield _metadata("thread_name", pid, tid, name=thread)
            yield _metadata("thread_sort_index", pid, tid, sort_index=tid)

    def _action(self, span: Span) -> Event:
        action, kind = span.action, ACTIONS[span.action.kind].name
        name = kind if action.kind is ActionKind.OPTIMIZER else str(action)
        return _slice(name, "action", self._place(span), (span.start_s, span.end_s), self._details(action, kind))

    def _idle(self) -> Iterator[Event]:
        orders: list[list[Span]] = [[] for _ in range(self.timeline.num_devices)]
        for span in sorted(self.timeline.spans, key=lambda x: x.start_s):
            orders[span.device].append(span)
        for piece in idle_pieces(self.timeline):
            pid, look = self.first_pid + piece.device, IDLE[piece.cause]
            times = piece.start_s, piece.end_s
            yield _slice(look.name, "idle", (pid, _WAITING), times, self._waiting(piece, orders[piece.device]))

    def _waiting(self, piece: Idle, order: Sequence[Span]) -> Event:
        """The action that comes next, or after the last action all stages of the device."""
        kind = IDLE[piece.cause].name
        place = bisect_left(order, piece.end_s - 1 / _NS_PER_S, key=lambda x: x.start_s)
        if place < len(order):
            following = order[place].action
            return {**self._details(following, kind), "before": str(following)}
        stages = self.plan.stages_of(piece.device)
        held = {"stage": [x.index for x in stages], "layers": "; ".join(x.layers_text for x in stages)}
        return {**held, "microbatch": None, "kind": kind}

    def _transfer(self, transfer: Transfer, tid: int) -> Event:
        kind = "activations" if transfer.action.kind is ActionKind.FORWARD else "gradients"
        route = {"num_bytes": transfer.num_bytes, "to_device": transfer.target, "to_stage": transfer.action.receiver}
        details = {**self._details(transfer.action, f"{COMMUNICATION.name}: {kind}"), **route}
        place = self.first_pid + transfer.source, tid
        name = f"{transfer.action} to device {transfer.target}"
        return _slice(name, COMMUNICATION.name, place, (transfer.start_s, transfer.end_s), details)

    def _arrow(self, transfer: Transfer, tid: int, flow: int) -> Iterator[Event]:
        """From the last moment of the sending action to the first of the receiving one."""
        sender, receiver = self.spans[transfer.action], self._awaiting(transfer.action)
        arrow: Event = {"name": "transfer", "cat": COMMUNICATION.name, "id": flow}
        details = {"args": self._details(transfer.action, "transfer")}
        last_ns = max(_ns(sender.start_s), _ns(sender.end_s) - 1)
        yield {**arrow, "ph": "s", **_at(self._place(sender), last_ns), **details}
        if _ns(transfer.end_s) > _ns(transfer.start_s):
            on_the_way = self.first_pid + transfer.source, tid
            yield {**arrow, "ph": "t", **_at(on_the_way, _ns(transfer.start_s)), **details}
        yield {**arrow, "ph": "f", "bp": "e", **_at(self._place(receiver), _ns(receiver.start_s)), **details}

    def _awaiting(self, action: Action) -> Span:
        """The action of the neighbouring stage that uses this action's output."""
        kinds = (ActionKind.FORWARD,) if action.kind is ActionKind.FORWARD else INPUT_GRADIENT_KINDS
        wanted = (Action(action.receiver, kind, action.microbatch) for kind in kinds)
        return next(self.spans[x] for x in wanted if x in self.spans)

    def _details(self, action: Action, kind: str) -> Event:
        microbatch = None if action.kind is ActionKind.OPTIMIZER else action.microbatch
        layers = self.plan.stages[action.stage].layers_text
        return {"stage": action.stage, "microbatch": microbatch, "kind": kind, "layers": layers}

    def _place(self, span: Span) -> tuple[int, int]:
        return self.first_pid + span.device, _COMPUTE


def _holding_events(by_device: Iterable[Iterable[Holding]], *, first_pid: int) -> Iterator[Event]:
    """The predicted memory of each device at every moment when it changes."""
    for pid, held in enumerate(by_device, start=first_pid):
        before: Event = {}
        for x in held:
            now: Event = {look.name: x.category_bytes(category) for category, look in MEMORY.items()}
            if x.end_s > x.start_s and now != before:
                yield _counter("memory in bytes", pid, x.start_s, now)
                before = now


def _peak_events(run: Run, *, first_pid: int) -> Iterator[Event]:
    """The measured peak of each device as a constant over the step; none where it was not measured."""
    for pid, peak_bytes in enumerate(run.peak_bytes, start=first_pid):
        for moment_s in (0.0, run.timeline.step_s) if peak_bytes else ():
            yield _counter(f"{MEASURED_PEAK.name} in bytes", pid, moment_s, {MEASURED_PEAK.name: peak_bytes})


def _counter(name: str, pid: int, moment_s: float, series: Event) -> Event:
    return {"ph": "C", "name": name, **_at((pid, _COMPUTE), _ns(moment_s)), "args": series}


def _metadata(kind: str, pid: int, tid: int, **arguments: object) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": arguments}


def _slice(name: str, cat: str, place: tuple[int, int], times: tuple[float, float], details: Event) -> Event:
    start_ns, end_ns = map(_ns, times)
    return {"ph": "X", "name": name, "cat": cat, **_at(place, start_ns), "dur": _us(end_ns - start_ns), "args": details}


def _at(place: tuple[int, int], moment_ns: int) -> Event:
    return {"pid": place[0], "tid": place[1], "ts": _us(moment_ns)}


def _lanes(transfers: tuple[Transfer, ...]) -> dict[Transfer, int]:
    """For each transfer the first lane of its sender that is free when it starts."""
    free_s: dict[int, list[float]] = {}
    lanes = {}
    for transfer in sorted(transfers, key=lambda x: (x.source, x.start_s, x.end_s)):
        ends = free_s.setdefault(transfer.source, [])
        lane = next((i for i, end_s in enumerate(ends) if end_s <= transfer.start_s), len(ends))
        ends[lane : lane + 1] = [transfer.end_s]
        lanes[transfer] = lane
    return lanes


def _ns(seconds: float) -> int:
    return round(seconds * _NS_PER_S)  # whole nanoseconds, so that neighbours on a track never overlap


def _us(nanoseconds: int) -> float:
    return round(nanoseconds * _US_PER_NS, 3)
