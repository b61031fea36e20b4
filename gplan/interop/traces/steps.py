"""The whole training steps of each rank's trace: for every action of a step when the device computed for it.

A step ends where the profiler's next one begins, where the rank's first forward comes again, or any other action does.
Whole is what most of them do; the others, at the ends of a trace or with an exchange of shapes, are left out. Steps of
several ranks are the same one where the profiler gave them the same number, else counted from the first.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gplan.core import Action, ActionKind
from gplan.core.errors import FileError
from gplan.interop.traces.action_ranges import Ranged
from gplan.interop.traces.busy_times import Times, TracedDevice
from gplan.interop.traces.profiler_marks import Mark, is_update, neighbour_of, step_number

StepKey = tuple[int, int]
"""The profiler's number of a step, and which of the steps in it; without the profiler's numbers 0 and a count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSteps:
    """What one rank did: by step and action its times, in microseconds of the rank's clock."""

    name: str
    steps: Mapping[StepKey, Mapping[Action, Times]]
    num_partial: int

    @property
    def actions(self) -> tuple[Action, ...]:
        """The actions of every step, in the order of the first one."""
        return tuple(next(iter(self.steps.values())))

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages of the rank, rising."""
        return tuple(sorted({action.stage for action in self.actions}))


def rank_steps(device: TracedDevice, ranges: Sequence[Ranged], *, leads_us: Mapping[ActionKind, float]) -> RankSteps:
    """The whole steps of a rank; raises FileError where there is none.

    Actions begin by `leads_us` before their first operation, but not before their range.
    """
    pieces, numbers = _pieces(device, ranges), Counter[int]()
    contents = [frozenset(x.action for x in piece) for _, piece in pieces]
    training = Counter(filter(_is_training, contents))
    whole = max(training, key=lambda x: (training[x], len(x)), default=frozenset[Action]())
    if not whole:
        raise FileError(
            f"{device.trace.name} has no whole step: {len(ranges)} actions, and no forward and backward of all its "
            "micro-batches among them; expected a trace of training with at least one step from its start to its end"
        )
    steps, starts_us = {}, [piece[0].stretch.start_us for _, piece in pieces]
    for (number, piece), content, next_us in zip(pieces, contents, [*starts_us[1:], math.inf], strict=True):
        key = number, numbers[number]
        numbers[number] += 1
        if content == whole:
            steps[key] = _times(device, piece, leads_us) | _update(device, piece, next_us)
    return RankSteps(name=device.trace.name, steps=steps, num_partial=len(pieces) - len(steps))


def shared_keys(ranks: Sequence[RankSteps]) -> list[StepKey]:
    """The steps that every rank has whole, in order; raises FileError where there is none."""
    shared = sorted(set.intersection(*(set(rank.steps) for rank in ranks)))
    if not shared:
        said = ", ".join(f"{x.name} has {_numbers_text(x)}" for x in ranks)
        raise FileError(f"no step is whole in all traces: {said}; expected the same steps recorded on every rank")
    return shared


def _numbers_text(rank: RankSteps) -> str:
    return "steps " + ", ".join(str(number) for number in dict.fromkeys(number for number, _ in rank.steps))


def _is_training(actions: frozenset[Action]) -> bool:
    """Whether each of its stages has forwards and backwards."""
    kinds: dict[int, set[ActionKind]] = {}
    for action in actions:
        kinds.setdefault(action.stage, set()).add(action.kind)
    ends = {ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT}
    return bool(kinds) and all(ActionKind.FORWARD in found and found & ends for found in kinds.values())


def _pieces(device: TracedDevice, ranges: Sequence[Ranged]) -> list[tuple[int, list[Ranged]]]:
    """The actions cut into steps, each with the profiler's number or 0."""
    marks = [(x.start_us, number) for x in device.trace.marks if (number := step_number(x.name)) is not None]
    starts = [start_us for start_us, _ in marks]
    stage = min((x.action.stage for x in ranges), default=0)
    first = None if marks else Action(stage, ActionKind.FORWARD, 0)
    pieces: list[tuple[int, list[Ranged]]] = []
    done: set[Action] = set()
    for x in ranges:
        place = bisect_right(starts, x.stretch.start_us)
        number = marks[place - 1][1] if place else 0
        if not pieces or pieces[-1][0] != number or x.action in done or x.action == first:
            pieces.append((number, []))
            done = set()
        pieces[-1][1].append(x)
        done.add(x.action)
    return pieces


def _times(device: TracedDevice, piece: Sequence[Ranged], leads_us: Mapping[ActionKind, float]) -> dict[Action, Times]:
    """When the device computed for each action, one after the other: what two of them share counts for the first.

    An action without anything to compute takes no time, right before the next one.
    """
    found = [_led(device.times(x.stretch), x, leads_us) for x in piece]
    next_us = max((x[1] for x in found if x is not None), default=piece[-1].stretch.end_us)
    for i in reversed(range(len(found))):
        times = found[i] or (next_us, next_us)
        found[i], next_us = times, times[0]
    free_us, done = float("-inf"), dict[Action, Times]()
    for x, times in zip(piece, (x for x in found if x is not None), strict=True):
        done[x.action] = max(times[0], free_us), max(times[1], free_us)
        free_us = done[x.action][1]
    return done


def _led(times: Times | None, ranged: Ranged, leads_us: Mapping[ActionKind, float]) -> Times | None:
    """Times that begin as much earlier as the stage's own code takes."""
    if times is None:
        return None
    return max(ranged.stretch.start_us, times[0] - leads_us.get(ranged.action.kind, 0.0)), times[1]


def _update(device: TracedDevice, piece: Sequence[Ranged], next_us: float) -> dict[Action, Times]:
    """The optimizer's updates between a step and the next one, as one action of the rank's first stage;
    none where there are none."""
    end_us = max(x.stretch.end_us for x in piece)
    marks = _between(device.trace.marks, end_us, next_us)
    found = [device.times(mark) if device.has_kernels else (mark.start_us, mark.end_us) for mark in marks]
    times = [x for x in found if x is not None]
    if not times:
        return {}
    action = Action(min(x.action.stage for x in piece), ActionKind.OPTIMIZER, 0)
    return {action: (min(start for start, _ in times), max(end for _, end in times))}


def _between(marks: Sequence[Mark], end_us: float, next_us: float) -> Iterator[Mark]:
    """The updates after a step's end, up to the next action or step: those of the weights and that of the gradients."""
    first, last = (bisect_left(marks, moment_us, key=lambda x: x.start_us) for moment_us in (end_us, next_us))
    for mark in marks[first:last]:
        if neighbour_of(mark.name) is not None:
            continue
        if not is_update(mark.name):
            return
        yield mark
