"""The documented rules of the Trace Event Format, for the phases that gplan writes,
as one function that lists breaches.

Rules: the JSON Object Format with `traceEvents`; of every event a name, a phase, whole pid and tid; times in
microseconds as numbers from 0; X with a duration, properly nested on its thread; M of a known kind with the argument
that the kind demands; C with numbers alone; every pid and tid named by metadata.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

Event = dict[str, Any]

_METADATA = {
    "process_name": ("name", str), "process_labels": ("labels", str), "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str), "thread_sort_index": ("sort_index", int),
}  # fmt: skip


def breaches(content: bytes) -> list[str]:
    """What a trace does against the rules, each in words; none for a trace that is right."""
    trace = json.loads(content)
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        return ["no JSON object with a list of traceEvents"]
    found = [] if trace.get("displayTimeUnit", "ms") in ("ms", "ns") else ["displayTimeUnit is neither ms nor ns"]
    events = trace["traceEvents"]
    shapes = [said for event in events for said in _shape(event)]
    return found + shapes if shapes else [*found, *_nesting(events), *_declared(events)]


def _shape(event: Event) -> Iterator[str]:
    """Breaches that one event commits by itself."""
    phase, name = event.get("ph"), event.get("name")
    if not isinstance(name, str) or not name:
        yield f"an event has no name: {event}"
    if type(event.get("pid")) is not int or type(event.get("tid")) is not int:
        yield f"{name}: pid and tid must be whole numbers"
    if "args" in event and not isinstance(event["args"], dict):
        yield f"{name}: args is no object"
    if phase == "M":
        key, kind = _METADATA.get(str(name), ("", object))
        if type(event.get("args", {}).get(key)) is not kind:
            yield f"{name}: metadata without {key or 'a known name'}"
        return
    if phase not in ("X", "C"):
        yield f"{name}: phase {phase!r}"
    if not _is_number(event.get("ts")) or event["ts"] < 0:
        yield f"{name}: ts must be a number of microseconds"
    if phase == "X" and (not _is_number(event.get("dur")) or event["dur"] < 0):
        yield f"{name}: a complete event needs a dur"
    if phase == "C" and not (event.get("args") and all(map(_is_number, event["args"].values()))):
        yield f"{name}: a counter has a series that is no number"


def _nesting(events: list[Event]) -> Iterator[str]:
    """Slices of a thread that overlap without one lying in the other."""
    for (pid, tid), slices in _slices(events).items():
        open_ends: list[int] = []
        for start, end in sorted(slices, key=lambda x: (x[0], -x[1])):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            if open_ends and end > open_ends[-1]:
                yield f"slices overlap at {start} ns on thread {tid} of process {pid}"
            open_ends.append(end)


def _declared(events: list[Event]) -> Iterator[str]:
    named: dict[str, set[Any]] = {"process_name": set(), "thread_name": set()}
    for event in events:
        if event["name"] in named:
            key = event["pid"] if event["name"] == "process_name" else (event["pid"], event["tid"])
            if key in named[event["name"]]:
                yield f"{event['name']} of {key} is given twice"
            named[event["name"]].add(key)
    for pid, tid in {(x["pid"], x["tid"]) for x in events}:
        if pid not in named["process_name"] or (pid, tid) not in named["thread_name"]:
            yield f"thread {tid} of process {pid} has no name"


def _slices(events: list[Event]) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Start and end of the slices of each thread, in whole nanoseconds."""
    found = defaultdict(list)
    for x in events:
        if x["ph"] == "X":
            start = round(1e3 * x["ts"])
            found[x["pid"], x["tid"]].append((start, start + round(1e3 * x["dur"])))
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
