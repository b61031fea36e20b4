"""The timelines as Chrome trace JSON, for Perfetto and chrome://tracing: times in microseconds, sizes in bytes.

A process is a device of one side, predicted devices first. Its threads are compute, idle time by cause, and one
communication lane for each transfer that overlaps others, since viewers drop overlapping events of a track. The predicted
memory by category is a counter. Processes and threads count from 1, as viewers reserve 0 for the idle thread.

Source: Trace Event Format (the Chromium project): phases X, M and C.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TypeAlias

from gplan.core import Action, ActionKind, Plan, Timeline, Transfer
from gplan.reporting.looks import ACTIONS, COMMUNICATION, IDLE, MEMORY
from gplan.reporting.subject import Subject, plan_of, side_text, timelines_of
from gplan.schedules.registry import schedule_info
from gplan.simulation.bubble import idle_pieces
from gplan.simulation.memory_timeline import memory_timeline

Event: TypeAlias = dict[str, object]

_COMPUTE, _WAITING, _FIRST_LANE = 1, 2, 3
_NS_PER_S, _US_PER_NS = 1e9, 1e-3


def trace_json(subject: Subject) -> bytes:
    """The trace of a plan, or of a run beside its plan."""
    plan, events, first_pid = plan_of(subject), list[Event](), 1
    for side, timeline in timelines_of(subject).items():
        events += _events(side_text(subject, side), plan, timeline, first_pid=first_pid)
        first_pid += timeline.num_devices
    for pid, held in enumerate(memory_timeline(plan), start=1):
        for x in held:
            if x.end_s > x.start_s:
                sizes = {look.name: x.category_bytes(category) for category, look in MEMORY.items()}
                events.append(_event("C", "memory in bytes", (pid, _COMPUTE), args=sizes, ts=_us(_ns(x.start_s))))
    other = {"model": plan.model.name, "schedule": schedule_info(plan.schedule).title}
    trace = {"displayTimeUnit": "ms", "otherData": other, "traceEvents": events}
    return json.dumps(trace, separators=(",", ":")).encode()


def _events(name: str, plan: Plan, timeline: Timeline, *, first_pid: int) -> Iterator[Event]:
    """One timeline as a group of processes."""
    lanes = _lanes(timeline.transfers)
    for device in range(timeline.num_devices):
        pid, threads = first_pid + device, {_COMPUTE: "compute", _WAITING: "waiting"}
        used = {lane for transfer, lane in lanes.items() if transfer.source == device}
        threads |= {_FIRST_LANE + lane: f"{COMMUNICATION.name} {lane + 1}" for lane in sorted(used)}
        yield _event("M", "process_name", (pid, _COMPUTE), args={"name": f"{name}: device {device}"})
        for tid, thread in threads.items():
            yield _event("M", "thread_name", (pid, tid), args={"name": thread})

    def details(action: Action, kind: str) -> Event:
        microbatch = None if action.kind is ActionKind.OPTIMIZER else action.microbatch
        layers = plan.stages[action.stage].layers_text
        return {"stage": action.stage, "microbatch": microbatch, "kind": kind, "layers": layers}

    for span in timeline.spans:
        kind = ACTIONS[span.action.kind].name
        words = kind if span.action.kind is ActionKind.OPTIMIZER else str(span.action)
        place = first_pid + span.device, _COMPUTE
        yield _slice(words, "action", place, span.start_s, span.end_s, details(span.action, kind))
    for piece in idle_pieces(timeline):
        words, place = IDLE[piece.cause].name, (first_pid + piece.device, _WAITING)
        yield _slice(words, "idle", place, piece.start_s, piece.end_s, {})
    for x, lane in lanes.items():
        kind = "activations" if x.action.kind is ActionKind.FORWARD else "gradients"
        route = {"num_bytes": x.num_bytes, "to_device": x.target, "to_stage": x.action.receiver}
        args = {**details(x.action, f"{COMMUNICATION.name}: {kind}"), **route}
        place = first_pid + x.source, _FIRST_LANE + lane
        yield _slice(f"{x.action} to device {x.target}", COMMUNICATION.name, place, x.start_s, x.end_s, args)


def _slice(name: str, cat: str, place: tuple[int, int], start_s: float, end_s: float, args: Event) -> Event:
    start_ns, end_ns = _ns(start_s), _ns(end_s)
    return _event("X", name, place, args=args, cat=cat, ts=_us(start_ns), dur=_us(end_ns - start_ns))


def _event(phase: str, name: str, place: tuple[int, int], *, args: object, **further: object) -> Event:
    return {"ph": phase, "name": name, "pid": place[0], "tid": place[1], **further, "args": args}


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
