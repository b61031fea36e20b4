"""The bubble, piece by piece: why each device waited. Works on timelines of every schedule, predicted or measured.

A device waits before an action, and after its last one until the micro-batch loop ends. Of each such wait
  communication    is what lies within the transfer of the awaited input
  warm-up, drain   are as much of the rest as the same order waits there with equal stages: warm-up up to the device's
                   last forward (or its first backward, where that is later), drain from then on
  imbalance        is what is left, as some stages take longer than others, always or in some steps
  engine           is what goes by after the input has arrived, or where none was awaited
Equal stages: every action takes its mean over the stages; transfers, with waits for the link, and the engine take what
they took. The first stage, whose inputs need no gradient, has its whole backward in the second half. So equal stages have
no imbalance.

These five are the idle time of the loop: its length times the devices, less all forwards, backwards and updates in it,
which the bubble counts as idle. After the loop
  optimizer        is what a device waits, before or after its own updates, until the last device's are done
and all six are the idle time of the step, from its first forward to its last update, of each device: `Timeline.idle_s`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import add

from gplan.core import ActionKind, Idle, IdleCause, Schedule, Span, Timeline
from gplan.simulation.kernel import ActionProgram, action_times, program_of

_HALVES = (ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)
_ROUNDING, _ALIKE = 1e-12, 1e-9  # of the loop: no piece at all; as long as with equal stages


def idle_pieces(timeline: Timeline) -> tuple[Idle, ...]:
    """Every idle piece of the step, by device, then by time; O(K M) for K stages and M micro-batches."""
    updates = [x for x in timeline.spans if x.action.kind is ActionKind.OPTIMIZER]
    found = list(_loop_pieces(_loop_of(timeline)))
    for update in updates:  # one of a device that is done while others still compute
        found = [part for piece in found for part in _without(piece, update)]
    found += _optimizer_pieces(timeline, updates)
    shortest_s = _ROUNDING * (timeline.loop_end_s - timeline.loop_start_s)
    return tuple(sorted((x for x in found if x.duration_s > shortest_s), key=lambda x: (x.device, x.start_s)))


def idle_by_cause(timeline: Timeline) -> dict[IdleCause, float]:
    """Seconds of idle device time for each cause, all devices together."""
    devices = idle_by_device(timeline)
    return {cause: sum(idle[cause] for idle in devices) for cause in IdleCause}


def idle_by_device(timeline: Timeline) -> tuple[dict[IdleCause, float], ...]:
    """Seconds of idle time for each cause, device by device."""
    idle = tuple(dict.fromkeys(IdleCause, 0.0) for _ in range(timeline.num_devices))
    for piece in idle_pieces(timeline):
        idle[piece.device][piece.cause] += piece.duration_s
    return idle


@dataclass(frozen=True, slots=True)
class _Loop:
    """The micro-batch loop in order of dependence, entry by entry of the program."""

    program: ActionProgram  # with a duration and a hop for every action by itself
    spans: tuple[Span, ...]
    inputs: tuple[tuple[float, float], ...]  # when each was sent and had arrived; of the device's own, the beginning
    num_devices: int


@dataclass(frozen=True, slots=True)
class _Wait:
    """A device's wait before an action, or at the end; from `sent_s` to `arrived_s` the input was in transfer."""

    start_s: float
    sent_s: float
    arrived_s: float
    end_s: float

    @property
    def rest_s(self) -> float:
        """The wait without transfer and engine."""
        return self.sent_s - self.start_s

    @property
    def engine_s(self) -> float:
        """From when the device was free and the input there."""
        return self.end_s - self.arrived_s


def _loop_of(timeline: Timeline) -> _Loop:
    spans: list[list[Span]] = [[] for _ in range(timeline.num_devices)]
    for span in timeline.loop_spans:
        spans[span.device].append(span)
    schedule = Schedule(
        name="of the timeline",
        num_stages=1 + max(x.action.stage for x in timeline.loop_spans),
        num_microbatches=timeline.num_microbatches,
        orders=tuple(tuple(x.action for x in own) for own in spans),
    )
    program, rows = program_of(schedule, "never").individual.without_queues, [iter(own) for own in spans]
    ordered = tuple(next(rows[entry.device]) for entry in program.entries)
    sent, inputs = {x.action: x for x in timeline.transfers}, list[tuple[float, float]]()
    for entry in program.entries:
        if entry.need < 0:
            inputs.append((-math.inf, -math.inf))
        elif transfer := sent.get(program.actions[entry.need]):
            inputs.append((transfer.start_s, transfer.end_s))
        else:
            inputs.append((ordered[entry.need].end_s,) * 2)
    return _Loop(program=program, spans=ordered, inputs=tuple(inputs), num_devices=timeline.num_devices)


def _loop_pieces(loop: _Loop) -> Iterator[Idle]:
    """What each device waits for within the loop."""
    found = _waits(loop)
    equal = _equal_waits(loop, found)
    last_forward, first_backward = dict[int, int](), dict[int, int]()
    for place, (action, entry) in enumerate(zip(loop.program.actions, loop.program.entries, strict=True)):
        if action.kind is ActionKind.FORWARD:
            last_forward[entry.device] = place
        else:
            first_backward.setdefault(entry.device, place)
    loop_s = max(x.end_s for x in loop.spans) - min(x.start_s for x in loop.spans)
    for place, wait in found.items():
        device = loop.program.entries[place].device if place >= 0 else -1 - place
        fills = 0 <= place <= max(last_forward.get(device, -1), first_backward.get(device, -1))
        equal_s = equal[place].rest_s if place in equal else 0.0
        own_s = math.inf if wait.rest_s <= equal_s + _ALIKE * loop_s else equal_s
        turn_s = min(wait.sent_s, wait.start_s + own_s)  # from then on the wait is longer than with equal stages
        times_s = (wait.start_s, turn_s, wait.sent_s, wait.arrived_s, wait.end_s)
        causes = (
            IdleCause.WARM_UP if fills else IdleCause.DRAIN,
            IdleCause.IMBALANCE,
            IdleCause.COMMUNICATION,
            IdleCause.ENGINE,
        )
        for cause, (start_s, end_s) in zip(causes, pairwise(times_s), strict=True):
            yield Idle(device=device, cause=cause, start_s=start_s, end_s=end_s)


def _waits(loop: _Loop) -> dict[int, _Wait]:
    """The waits before actions, by their places, and by -1 - device the one after a device's last action."""
    free, waits = [min(x.start_s for x in loop.spans)] * loop.num_devices, {}
    for place, span in enumerate(loop.spans):
        start_s, end_s = free[span.device], span.start_s
        free[span.device] = span.end_s
        if end_s > start_s:
            sent_s, arrived_s = (min(max(moment, start_s), end_s) for moment in loop.inputs[place])
            waits[place] = _Wait(start_s, sent_s, arrived_s, end_s)
    return waits | _last_waits(free)


def _last_waits(free: Sequence[float]) -> dict[int, _Wait]:
    end_s = max(free)
    return {-1 - device: _Wait(free_s, end_s, end_s, end_s) for device, free_s in enumerate(free) if end_s > free_s}


def _equal_waits(loop: _Loop, found: Mapping[int, _Wait]) -> dict[int, _Wait]:
    """What `_waits` gives for the same order with equal stages, each action as early as device and input allow."""
    program, lasting_s = loop.program, _equal_s(loop)
    engine_s = [found[i].engine_s if i in found else 0.0 for i in range(len(lasting_s))]
    pairs = zip(program.entries, loop.inputs, strict=True)
    transfers_s = {x.need: arrived_s - sent_s for x, (sent_s, arrived_s) in pairs if x.need >= 0}
    hops_s = [transfers_s.get(i, 0.0) for i in range(len(lasting_s))]
    rows = action_times(program, list(map(add, engine_s, lasting_s)), hops_s, zero=0.0)
    free, ends, waits = [0.0] * loop.num_devices, list[float](), {}
    for i, (entry, (arrived_s, end_s, _)) in enumerate(zip(program.entries, rows, strict=True)):
        free_s = free[entry.device]
        sent_s = max(free_s, ends[entry.need]) if entry.need >= 0 else free_s
        if arrived_s + engine_s[i] > free_s:
            waits[i] = _Wait(free_s, sent_s, arrived_s, arrived_s + engine_s[i])
        free[entry.device] = end_s
        ends.append(end_s)
    return waits | _last_waits(free)


def _equal_s(loop: _Loop) -> list[float]:
    """How long each action takes with equal stages: the mean of its kind and micro-batch over the stages.

    The first stage's halves, divided otherwise, are no part of it; its second half takes what both take elsewhere.
    """
    like: dict[tuple[ActionKind, int], list[float]] = {}
    firsts: dict[int, float] = {}
    for action, span in zip(loop.program.actions, loop.spans, strict=True):
        if action.stage > 0 or action.kind not in _HALVES:
            like.setdefault((action.kind, action.microbatch), []).append(span.duration_s)
        elif action.kind is ActionKind.INPUT_GRADIENT:
            firsts[action.microbatch] = span.duration_s
    mean = {key: math.fsum(durations) / len(durations) for key, durations in like.items()}
    equal = []
    for action, span in zip(loop.program.actions, loop.spans, strict=True):
        if action.stage > 0 or action.kind not in _HALVES:
            equal.append(mean[action.kind, action.microbatch])
        elif action.kind is ActionKind.INPUT_GRADIENT or (action.kind, action.microbatch) not in mean:
            equal.append(span.duration_s)
        else:
            whole_s = sum(mean[half, action.microbatch] for half in _HALVES)
            equal.append(max(0.0, whole_s - firsts[action.microbatch]))
    return equal


def _without(piece: Idle, update: Span) -> tuple[Idle, ...]:
    """What is left of a piece before and after an update; both can be empty."""
    if piece.device != update.device or not piece.start_s < update.end_s or not update.start_s < piece.end_s:
        return (piece,)
    return replace(piece, end_s=max(piece.start_s, update.start_s)), replace(
        piece, start_s=min(piece.end_s, update.end_s)
    )


def _optimizer_pieces(timeline: Timeline, updates: Sequence[Span]) -> Iterator[Idle]:
    """What each device waits between the end of the loop and that of the step, around its own updates."""
    loop_end_s, step_s = timeline.loop_end_s, timeline.step_s
    for device in range(timeline.num_devices):
        free_s = loop_end_s
        for start_s, end_s in (*((x.start_s, x.end_s) for x in updates if x.device == device), (step_s, step_s)):
            yield Idle(device=device, cause=IdleCause.OPTIMIZER, start_s=free_s, end_s=max(free_s, start_s))
            free_s = max(free_s, end_s)
