"""The recurrence that lays the actions of a step out in time: the only one, for one pipeline or for many at once.

An action starts when its device is free and what it needs of another device has arrived. With d the time that it keeps
its device and h the time that its output is on the link, where outputs queue,
    start[i] = max(end[previous action on the device], arrival[needed action])
    end[i] = start[i] + d[i]
    arrival[i] = max(end[i], arrival[previous output from this device to that device]) + h[i]
Entries are floats, or arrays with an entry for each candidate pipeline; the time is O(K M) for K stages and M
micro-batches either way. d is what the action takes (`action_s`) and what the engine takes after it (`occupied`).

A program can hold a window of consecutive stages only. Then the stages before the window do not exist, and those after
it are a pure delay through which any number of micro-batches may pass at once. Leaving out what an action waits for
never makes it later, so a window gives a lower bound of every pipeline that contains these stages.

    stages 0 to 1 of 3      0  F0 F1 F2 .. .. .. B0 B1 B2
                            1     F0 F1 F2 .. B0 B1 B2
                          delay      ~~~~~~~          (each micro-batch comes back after `delay` seconds)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from gplan.core import (
    Action,
    ActionKind,
    RecomputeMode,
    Schedule,
    Seconds,
    StageSeconds,
    StageTimes,
    is_recomputed,
)
from gplan.schedules.dependencies import INPUT_GRADIENT_KINDS, execution_order

NONE = -1


def gaps(times: StageTimes[Seconds]) -> StageSeconds[Seconds]:
    """The seconds that the engine takes of the device after each action, and before the update."""
    nothing = 0.0 * times.gap_s
    return StageSeconds(
        forward_s=times.forward_gap_s,
        backward_s=times.backward_gap_s,
        recompute_s=nothing,
        optimizer_s=times.before_update_s,
        activation_s=nothing,
        gradient_s=nothing,
        input_gradient_s=times.backward_gap_s,
        weight_gradient_s=times.gap_s,
    )


def occupied(times: StageTimes[Seconds]) -> StageSeconds[Seconds]:
    """The seconds for which each action keeps the device: what it takes and what the engine takes after it."""
    after, first_s, second_s = gaps(times), times.input_gradient_s, times.weight_gradient_s
    return StageSeconds(
        forward_s=times.forward_s + after.forward_s,
        backward_s=times.backward_s + after.backward_s,
        recompute_s=times.recompute_s,
        optimizer_s=times.optimizer_s + after.optimizer_s,
        activation_s=times.activation_s,
        gradient_s=times.gradient_s,
        input_gradient_s=None if first_s is None else first_s + after.backward_s,
        weight_gradient_s=None if second_s is None else second_s + times.gap_s,
        is_tied=times.is_tied,
    )


class ActionKey(NamedTuple):
    """What the duration of an action depends on."""

    stage: int
    kind: ActionKind
    recomputes: bool  # whether the backward of its micro-batch runs the forward again

    @classmethod
    def of(cls, action: Action, *, num_microbatches: int, recompute: RecomputeMode) -> ActionKey:
        """The key of an action of a step."""
        again = is_recomputed(action.microbatch, num_microbatches=num_microbatches, recompute=recompute)
        return cls(action.stage, action.kind, again)


def action_s(key: ActionKey, times: StageSeconds[Seconds]) -> Seconds:
    """Seconds of one action with the times of its stage.

    The first stage needs no gradient of its input: of a split backward, all is in the second half there. Elsewhere a
    recompute belongs to the first half. Raises ValueError for half a backward where the halves are not known.
    """
    kind, is_first = key.kind, key.stage == 0
    if kind is ActionKind.FORWARD:
        return times.forward_s
    if kind is ActionKind.OPTIMIZER:
        return times.optimizer_s
    if kind is ActionKind.INPUT_GRADIENT and is_first:
        return 0.0 * times.backward_s
    if kind is ActionKind.BACKWARD or is_first:
        return times.backward_s + times.recompute_s if key.recomputes else times.backward_s
    first_s, second_s = times.input_gradient_s, times.weight_gradient_s
    if first_s is None or second_s is None:
        raise ValueError(f"{key.stage}{kind.value} is half a backward, and how long the halves take is not known")
    if kind is ActionKind.WEIGHT_GRADIENT:
        return second_s
    return first_s + times.recompute_s if key.recomputes else first_s


class Entry(NamedTuple):
    """One action of a program; the numbers are indices, NONE for none."""

    device: int
    need: int  # the earlier entry whose output it waits for
    duration: int  # of `ActionProgram.durations`
    hop: int  # of `ActionProgram.hops`: how its output reaches the entry that waits for it
    link: int = NONE  # the direction between two devices in which the output is sent; NONE: it meets no other output


@dataclass(frozen=True, eq=False)
class ActionProgram:
    """The actions of consecutive stages in an order in which each comes after what it needs."""

    entries: tuple[Entry, ...]
    actions: tuple[Action, ...]
    durations: tuple[ActionKey, ...]  # actions with equal keys take equal time
    hops: tuple[ActionKey, ...]  # of the sending actions
    stages: tuple[tuple[int, ...], ...]  # of each device that holds any in the window

    @cached_property
    def first_stage(self) -> int:
        """The first stage of the window."""
        return min(map(min, self.stages))

    @cached_property
    def last_stage(self) -> int:
        """The last stage of the window."""
        return max(map(max, self.stages))

    @cached_property
    def individual(self) -> ActionProgram:
        """The same with a duration and a hop for every action by itself, in the order of `actions`."""
        entries = (x._replace(duration=i, hop=NONE if x.hop == NONE else i) for i, x in enumerate(self.entries))
        return replace(self, entries=tuple(entries))

    @cached_property
    def without_queues(self) -> ActionProgram:
        """The same with transfers that never wait for each other, as if what they wait were part of their own time."""
        return replace(self, entries=tuple(x._replace(link=NONE) for x in self.entries))

    @cached_property
    def previous_sent(self) -> tuple[int, ...]:
        """For each entry the one whose output was sent before its own over the same link."""
        last, found = dict[int, int](), list[int]()
        for i, entry in enumerate(self.entries):
            found.append(last.get(entry.link, NONE) if entry.link != NONE else NONE)
            last[entry.link] = i
        return tuple(found)

    @cached_property
    def previous(self) -> tuple[int, ...]:
        """For each entry the one before it on its device."""
        last, found = [NONE] * len(self.stages), list[int]()
        for i, entry in enumerate(self.entries):
            found.append(last[entry.device])
            last[entry.device] = i
        return tuple(found)

    @cached_property
    def last(self) -> tuple[int, ...]:
        """The last entry of each device."""
        last = {entry.device: i for i, entry in enumerate(self.entries)}
        return tuple(last[device] for device in range(len(self.stages)))

    @cached_property
    def last_backward(self) -> int:
        """The entry of the first stage's last backward, or of the last half that the stage before waits for."""
        first = self.first_stage
        return max(i for i, x in enumerate(self.actions) if x.stage == first and x.kind in INPUT_GRADIENT_KINDS)

    def durations_s(self, times: Sequence[StageSeconds[Seconds]]) -> list[Seconds]:
        """The durations with these times of the window's stages, each with the engine's time after it."""
        return [action_s(key, times[key.stage - self.first_stage]) for key in self.durations]

    def hops_s(self, times: Sequence[StageSeconds[Seconds]]) -> list[Seconds]:
        """The transfers with these times of the window's stages; the last stage's forward has no receiver: 0."""
        return [self._hop_s(key, times) for key in self.hops]

    def _hop_s(self, key: ActionKey, times: Sequence[StageSeconds[Seconds]]) -> Seconds:
        if key.kind is not ActionKind.FORWARD:
            return times[key.stage - 1 - self.first_stage].gradient_s
        own = times[key.stage - self.first_stage]
        return own.activation_s if key.stage < self.last_stage else 0.0 * own.activation_s


def program_of(
    schedule: Schedule, recompute: RecomputeMode, *, first_stage: int = 0, last_stage: int | None = None
) -> ActionProgram:
    """The program of a schedule, or of its stages from `first_stage` to `last_stage`.

    Raises OrderError, a ValueError, where actions wait for each other forever.
    """
    last_stage = schedule.num_stages - 1 if last_stage is None else last_stage
    stages = [
        tuple(x for x in schedule.stages_of(device) if first_stage <= x <= last_stage)
        for device in range(schedule.num_devices)
    ]
    device_of = {stage: i for i, own in enumerate(filter(None, stages)) for stage in own}
    durations, hops = dict[ActionKey, int](), dict[ActionKey, int]()
    entries, actions, sent = list[Entry](), list[Action](), dict[tuple[int, bool, int], int]()
    for action in execution_order(schedule):
        stage, kind, m = action.stage, action.kind, action.microbatch
        if stage not in device_of:
            continue
        is_forward, is_backward = kind is ActionKind.FORWARD, kind in INPUT_GRADIENT_KINDS
        sender = NONE
        if is_forward and stage > first_stage:
            sender = sent[stage - 1, True, m]
        elif is_backward:
            sender = sent[stage, True, m] if stage == last_stage else sent[stage + 1, False, m]
        key = ActionKey.of(action, num_microbatches=schedule.num_microbatches, recompute=recompute)
        hop = hops.setdefault(key, len(hops)) if is_forward or (is_backward and stage > first_stage) else NONE
        if hop != NONE:
            sent[stage, is_forward, m] = len(entries)
        entries.append(Entry(device_of[stage], sender, durations.setdefault(key, len(durations)), hop))
        actions.append(action)
    # an output that another device needs goes over a link, one for each pair of sender and receiver
    receivers = {x.need: x.device for x in entries if x.need != NONE and entries[x.need].device != x.device}
    links: dict[tuple[int, int], int] = {}
    for i, receiver in sorted(receivers.items()):
        link = links.setdefault((entries[i].device, receiver), len(links))
        entries[i] = entries[i]._replace(link=link)
    if last_stage == schedule.num_stages - 1:  # else a need on the own device has the window's delay
        entries = [
            x._replace(need=x.need if x.need in receivers else NONE, hop=x.hop if i in receivers else NONE)
            for i, x in enumerate(entries)
        ]
    return ActionProgram(
        entries=tuple(entries),
        actions=tuple(actions),
        durations=tuple(durations),
        hops=tuple(hops),
        stages=tuple(filter(None, stages)),
    )


@lru_cache(maxsize=32)
def whole_program(schedule: Schedule, recompute: RecomputeMode) -> ActionProgram:
    """The program of all stages; raises OrderError as `program_of`."""
    return program_of(schedule, recompute)


def action_times(
    program: ActionProgram, durations_s: Sequence[Seconds], hops_s: Sequence[Seconds], *, zero: Seconds
) -> Iterator[tuple[Seconds, Seconds, Seconds]]:
    """When each action starts, when its device is free again, and when its output arrives, in the order of
    `program.actions`; what is not sent arrives when the device is free.

    `durations_s` and `hops_s` go by `Entry.duration` and `Entry.hop`. `zero` is 0.0, or an array of zeros for arrays.
    """
    latest = max if isinstance(zero, float) else np.maximum
    free, arrivals, last_arrivals = [zero] * len(program.stages), dict[int, Seconds](), dict[int, Seconds]()
    for i, (device, need, duration, hop, link) in enumerate(program.entries):
        start = free[device]
        if need >= 0:
            start = latest(start, arrivals.pop(need))
        arrival = end = free[device] = start + durations_s[duration]
        if hop >= 0:
            if link >= 0:
                arrival = latest(arrival, last_arrivals.get(link, zero))
            arrivals[i] = last_arrivals[link] = arrival = arrival + hops_s[hop]
        yield start, end, arrival


TiedDevices: TypeAlias = tuple[Any, ...] | None
"""Of each device whether any of its stages has a tied weight, as a bool or an array of candidates; None: none can have."""


def tied_devices(stages: Sequence[Sequence[int]], times: Sequence[StageSeconds[Seconds]]) -> TiedDevices:
    """By the stages of each device, as indices of `times`."""
    tied = [[x for stage in own if (x := times[stage].is_tied) is not None] for own in stages]
    return tuple(sum(own) > 0 for own in tied) if any(tied) else None


def when_updates_begin(tied: TiedDevices, free: Sequence[Seconds]) -> list[Seconds]:
    """When each device can begin its updates, given when it has done all its actions.

    Devices with tied weights wait for each other, as each needs the sum of the gradients.
    """
    if tied is None:
        return list(free)
    ready = np.maximum.reduce([np.where(x, free_s, -np.inf) for x, free_s in zip(tied, free, strict=True)])
    begin: list[Any] = [np.where(x, ready, free_s) for x, free_s in zip(tied, free, strict=True)]
    return [float(x) for x in begin] if isinstance(free[0], float) else begin


class PathEntry(NamedTuple):
    """What a path through a step takes of an entry."""

    entry: int
    runs: bool  # its duration
    sends: bool  # the transfer of its output


def critical_entries(
    program: ActionProgram, times: Sequence[tuple[float, float, float]], last: int
) -> Iterator[PathEntry]:
    """The chain of entries that entry `last` waits for, from the last to the first, in the times of `action_times`."""
    entry, sends = last, False
    while entry != NONE:
        before = program.previous_sent[entry]
        if sends and before != NONE and times[before][2] > times[entry][1]:  # its output waited for another one's
            yield PathEntry(entry, runs=False, sends=True)
            entry = before
            continue
        yield PathEntry(entry, runs=True, sends=sends)
        previous, need = program.previous[entry], program.entries[entry].need
        free_s = times[previous][1] if previous != NONE else 0.0
        sends = need != NONE and times[need][2] > free_s
        entry = need if sends else previous
