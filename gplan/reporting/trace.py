"""The timelines as Chrome trace JSON, for Perfetto and chrome://tracing: times in microseconds.

A process is a device of one side, predicted devices first. Its threads are compute, waiting by cause, and as many
communication lanes as transfers overlap, since viewers drop events that overlap on one track. Arrows lead from each
transfer to the action that needed it. What a device should hold, by category, is a counter of its predicted process.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

from gplan.bubble import idle_pieces
from gplan.memory_timeline import Holding, memory_timeline
from gplan.nouns import Action, ActionKind, Span, Timeline, Transfer
from gplan.reporting.colours import ACTIONS, COMMUNICATION, IDLE, MEMORY
from gplan.reporting.frames import Subject, plan_of, side_text, timelines_of
from gplan.schedules import FIRST_HALVES, named

Event: TypeAlias = dict[str, object]

_COMPUTE, _WAITING, _FIRST_LANE = 0, 1, 2
_NS_PER_S, _US_PER_NS = 1e9, 1e-3


def trace_json(subject: Subject) -> bytes:
    """The trace of a plan, or of a run beside its plan."""
    events: list[Event] = []
    first_pid = first_flow = 0
    for side, timeline in timelines_of(subject).items():
        events += _side_events(timeline, name=side_text(subject, side), first_pid=first_pid, first_flow=first_flow)
        first_pid, first_flow = first_pid + timeline.num_devices, first_flow + len(timeline.transfers)
    events += _memory_events(memory_timeline(plan_of(subject)))
    other = {"model": plan_of(subject).model.name, "schedule": named(plan_of(subject).schedule).title}
    trace = {"displayTimeUnit": "ms", "otherData": other, "traceEvents": events}
    return json.dumps(trace, separators=(",", ":")).encode()


def _side_events(timeline: Timeline, *, name: str, first_pid: int, first_flow: int) -> Iterator[Event]:
    lanes = _lanes(timeline.transfers)
    for device in range(timeline.num_devices):
        used = {lane for transfer, lane in lanes.items() if transfer.source == device}
        yield from _names(first_pid + device, process=f"{name}: device {device}", lanes=used)
    for span in timeline.spans:
        yield _action_event(span, first_pid=first_pid)
    for piece in idle_pieces(timeline):
        pid = first_pid + piece.device
        yield _slice(IDLE[piece.cause].name, pid=pid, tid=_WAITING, start_s=piece.start_s, end_s=piece.end_s)
    spans = {span.action: span for span in timeline.spans}
    for flow, (transfer, lane) in enumerate(lanes.items(), start=first_flow):
        pid, tid, receiver = first_pid + transfer.source, _FIRST_LANE + lane, _awaiting(transfer.action, spans)
        name = f"{transfer.action} to device {transfer.target}"
        yield _slice(
            name, pid=pid, tid=tid, start_s=transfer.start_s, end_s=transfer.end_s, num_bytes=transfer.num_bytes
        )
        yield from _arrow(transfer, receiver, first_pid=first_pid, tid=tid, flow=flow)


def _names(pid: int, *, process: str, lanes: set[int]) -> Iterator[Event]:
    threads = {_COMPUTE: "compute", _WAITING: "waiting"}
    threads |= {_FIRST_LANE + lane: f"{COMMUNICATION.name} {lane + 1}" for lane in sorted(lanes)}
    yield _metadata("process_name", pid, 0, name=process)
    yield _metadata("process_sort_index", pid, 0, sort_index=pid)
    for tid, thread in threads.items():
        yield _metadata("thread_name", pid, tid, name=thread)
        yield _metadata("thread_sort_index", pid, tid, sort_index=tid)


def _metadata(kind: str, pid: int, tid: int, **arguments: object) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": arguments}


def _action_event(span: Span, *, first_pid: int) -> Event:
    action = span.action
    details: Event = {"stage": action.stage, "action": ACTIONS[action.kind].name}
    if action.kind is not ActionKind.OPTIMIZER:
        details["microbatch"] = action.microbatch
    name = ACTIONS[action.kind].name if action.kind is ActionKind.OPTIMIZER else str(action)
    pid = first_pid + span.device
    return _slice(name, pid=pid, tid=_COMPUTE, start_s=span.start_s, end_s=span.end_s, **details)


def _memory_events(by_device: Iterable[Iterable[Holding]]) -> Iterator[Event]:
    """What the predicted devices, which are the first processes, hold from each moment on at which that changes."""
    for pid, held in enumerate(by_device):
        before: Event = {}
        for x in held:
            now: Event = {look.name: x.category_bytes(category) for category, look in MEMORY.items()}
            if x.end_s > x.start_s and now != before:
                start = {"pid": pid, "tid": 0, "ts": _us(_ns(x.start_s))}
                yield {"ph": "C", "name": "memory in bytes", **start, "args": now}
                before = now


def _arrow(transfer: Transfer, receiver: Span, *, first_pid: int, tid: int, flow: int) -> Iterator[Event]:
    """From the transfer, on its sender's lane, to the action that awaited it."""
    arrow: Event = {"name": "transfer", "cat": COMMUNICATION.name, "id": flow}
    source = {"pid": first_pid + transfer.source, "tid": tid, "ts": _us(_ns(transfer.start_s))}
    target = {"pid": first_pid + receiver.device, "tid": _COMPUTE, "ts": _us(_ns(receiver.start_s))}
    yield {**arrow, "ph": "s", **source}
    yield {**arrow, "ph": "f", "bp": "e", **target}


def _slice(name: str, *, pid: int, tid: int, start_s: float, end_s: float, **details: object) -> Event:
    start_ns, end_ns = _ns(start_s), _ns(end_s)
    span = {"ts": _us(start_ns), "dur": _us(end_ns - start_ns)}
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, **span, "args": details}


def _awaiting(action: Action, spans: Mapping[Action, Span]) -> Span:
    """The action of the neighbouring stage that needs this one's output."""
    kinds, step = ((ActionKind.FORWARD,), 1) if action.kind is ActionKind.FORWARD else (FIRST_HALVES, -1)
    wanted = (Action(action.stage + step, kind, action.microbatch) for kind in kinds)
    return next(spans[x] for x in wanted if x in spans)


def _lanes(transfers: tuple[Transfer, ...]) -> dict[Transfer, int]:
    """For each transfer the first lane of its sender that is free by then."""
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
