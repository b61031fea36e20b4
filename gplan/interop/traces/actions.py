"""The actions that a rank recorded, and its whole training steps: for every action when the device computed for it.

Actions are found by the ranges that torch.distributed.pipelining writes around its actions; without those, by the
functions of torch or Megatron-core in the recorded stacks; without stacks, as in a plain trace of 1F1B, by the sends and
receives between runs of operations.

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
from itertools import pairwise, takewhile
from typing import NamedTuple

import numpy as np

from gplan.core import Action, ActionKind
from gplan.core.errors import FileError
from gplan.interop.traces.reading import (
    BETWEEN,
    Mark,
    OperationRole,
    RankTrace,
    Times,
    actions_of,
    function_kind,
    is_update,
    neighbour_of,
    one_stage_action,
    step_number,
)
from gplan.schedules.registry import make_schedule


class Ranged(NamedTuple):
    """One action and its time range."""

    action: Action
    stretch: Mark


def ranges_of(trace: RankTrace, *, place: int, num_ranks: int) -> tuple[Ranged, ...]:
    """The actions of a rank in order of time; `place` is its index among the ranks, the stage if the ranges name none.

    Raises FileError if the trace has no pipeline actions.
    """
    found = _of_the_runtime(trace)
    if not found:
        pairs = ((one_stage_action(mark.name, place), mark) for mark in trace.marks)
        found = [Ranged(action, mark) for action, mark in pairs if action is not None]
        _check_neighbours(trace, found, place=place, num_ranks=num_ranks)
        found = found or _of_functions(trace, place, num_ranks)
    is_communicating = bool(np.isin(trace.operations.role, BETWEEN).any())
    if not found and is_communicating:
        found = [x for step in _steps_of(trace) for x in _unmarked(trace, step, stage=place, num_stages=num_ranks)]
    if not found and is_communicating:
        raise FileError(
            f"{trace.name} names no actions, and the operations between its sends and receives are not in Schedule1F1B's "
            f"order on stage {place} of {num_ranks}; expected a trace of every rank with whole steps in it, or one "
            "with_stack=True"
        )
    if not found:
        raise FileError(
            f"{trace.name} has no actions of a pipeline: neither ranges such as 'PP:0F1' or 'Forward 1', nor sends and "
            "receives; expected a trace of a torch.distributed.pipelining schedule with whole steps in it"
        )
    return tuple(found)


def _check_neighbours(trace: RankTrace, found: Sequence[Ranged], *, place: int, num_ranks: int) -> None:
    """Raise FileError if the first rank's forwards receive or the last one's send: then a rank is missing."""
    forwards = [trace.operations.within(x.stretch) for x in found if x.action.kind is ActionKind.FORWARD]
    own = [trace.operations] if num_ranks == 1 else forwards
    wrong = {OperationRole.RECEIVES} if place == 0 else set()
    wrong |= {OperationRole.SENDS} if place == num_ranks - 1 else set()
    if any(np.isin(x.role, list(wrong)).any() for x in own):
        raise FileError(
            f"rank {place if trace.rank is None else trace.rank} sends to or receives from a rank whose trace "
            f"is missing ({trace.name} and {num_ranks - 1} more were given); expected a trace of every rank"
        )


def _of_the_runtime(trace: RankTrace) -> list[Ranged]:
    found = []
    for mark in trace.marks:
        actions = actions_of(mark.name)
        if len(actions) == 2:
            turning_us = trace.turning_us(mark)
            parts = mark._replace(end_us=turning_us), mark._replace(start_us=turning_us)
            found += [Ranged(action, part) for action, part in zip(actions, parts, strict=True)]
        else:
            found += [Ranged(action, mark) for action in actions]
    return found


def _of_functions(trace: RankTrace, place: int, num_ranks: int) -> list[Ranged]:
    """Actions by the functions that run them, step by step."""
    found = []
    for step in _steps_of(trace):
        own = [x for x in trace.marks if step.start_us <= x.start_us < step.end_us]
        marks = [(kind, x) for x in own if (kind := function_kind(x.name)) is not None]
        order = _order_of([kind for kind, _ in marks], place, num_ranks)
        found += [Ranged(action, mark) for action, (_, mark) in zip(order, marks, strict=True)]
    return found


def _order_of(kinds: Sequence[ActionKind], place: int, num_ranks: int) -> list[Action]:
    """The actions of a rank in a step by their kinds: interleaved 1F1B where it alone has these, in groups of K micro-batches
    as Megatron-core runs it; else the n-th forward and the n-th backward are micro-batch n of one stage."""
    counts = Counter[ActionKind]()
    single = [Action(place, kind, counts.update([kind]) or counts[kind] - 1) for kind in kinds]
    num_forwards = counts[ActionKind.FORWARD]
    for num_chunks in range(1, 1 + num_forwards // num_ranks):
        if num_forwards % (num_chunks * num_ranks):
            continue
        schedule = f"interleaved-1f1b:{num_chunks}"
        made = make_schedule(schedule, num_devices=num_ranks, num_microbatches=num_forwards // num_chunks).orders[place]
        if [x.kind for x in made] == kinds:
            return list(made)
    return single


def _steps_of(trace: RankTrace) -> list[Mark]:
    """The profiler's steps; without them, the ranges between optimizer updates, or the whole trace."""
    steps = [x for x in trace.marks if step_number(x.name) is not None]
    if steps:
        return steps
    thread = next((x.thread for x in trace.marks), 0)
    ends = [x.end_us for x in trace.marks if is_update(x.name)]
    end_us = float(trace.operations.end_us.max(initial=0.0))
    bounds = [float("-inf"), *ends, max([end_us, *(x.end_us for x in trace.marks)])]
    return [Mark("step", a, b, thread) for a, b in pairwise(bounds) if b > a]


def _unmarked(trace: RankTrace, step: Mark, *, stage: int, num_stages: int) -> list[Ranged]:
    """The actions of a step of Schedule1F1B, which writes no ranges, in order of time; none for a step of another order.

        recv [F0 F0] send recv [B0 B0] send,recv [F1 F1] send ...

    A run of operations without a send or receive in between is an action or book-keeping. Backwards are the runs of the
    autograd engine; as many of the longest other runs before the last of them are the forwards (clipping and updates follow
    it). The result must be in the order of 1F1B.
    """
    runs = list(_runs(trace, step))
    backwards = [mark for is_backward, mark in runs if is_backward]
    others = [
        mark for is_backward, mark in runs if not is_backward and backwards and mark.start_us < backwards[-1].start_us
    ]
    if not backwards or len(others) < len(backwards):
        return []
    longest = sorted(others, key=lambda x: x.start_us - x.end_us)[: len(backwards)]
    forwards = sorted(longest, key=lambda x: x.start_us)
    found = [Ranged(Action(stage, ActionKind.FORWARD, i), mark) for i, mark in enumerate(forwards)]
    found += [Ranged(Action(stage, ActionKind.BACKWARD, i), mark) for i, mark in enumerate(backwards)]
    found.sort(key=lambda x: x.stretch.start_us)
    expected = make_schedule("1f1b", num_devices=num_stages, num_microbatches=len(backwards)).orders[stage]
    return found if tuple(x.action for x in found) == expected else []


def _runs(trace: RankTrace, step: Mark) -> Iterator[tuple[bool, Mark]]:
    """The runs of operations, each with whether it is a backward; without optimizer updates and batch splitting."""
    operations = trace.operations
    first, end = np.searchsorted(operations.start_us, [step.start_us, step.end_us])
    columns = (operations.start_us, operations.end_us, operations.role)
    rows = zip(*(column[first:end].tolist() for column in columns), strict=True)
    updates = [x for x in trace.marks if is_update(x.name) and step.start_us <= x.start_us < step.end_us]
    own = [x for x in rows if not any(update.start_us <= x[0] < update.end_us for update in updates)]
    splits = [i for i, (_, _, role) in enumerate(own) if role == OperationRole.SPLITS]
    run: list[tuple[float, float, int]] = []
    for row in own[splits[-1] + 1 if splits else 0 :]:
        if run and (row[2] in BETWEEN or (row[2] == OperationRole.GOES_BACK) != (run[0][2] == OperationRole.GOES_BACK)):
            yield _run(run, step.thread)
            run = []
        if row[2] not in BETWEEN:
            run.append(row)
    if run:
        yield _run(run, step.thread)


def _run(rows: Sequence[tuple[float, float, int]], thread: int) -> tuple[bool, Mark]:
    end_us = max(end for _, end, _ in rows)
    return rows[0][2] == OperationRole.GOES_BACK, Mark("run", rows[0][0], end_us, thread)


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


def rank_steps(trace: RankTrace, ranges: Sequence[Ranged]) -> RankSteps:
    """The whole steps of a rank; raises FileError where there is none."""
    pieces, numbers = _pieces(trace, ranges), Counter[int]()
    contents = [frozenset(x.action for x in piece) for _, piece in pieces]
    training = Counter(filter(_is_training, contents))
    whole = max(training, key=lambda x: (training[x], len(x)), default=frozenset[Action]())
    if not whole:
        raise FileError(
            f"{trace.name} has no whole step: {len(ranges)} actions, and no forward and backward of all its "
            "micro-batches among them; expected a trace of training with at least one step from its start to its end"
        )
    steps, starts_us = {}, [piece[0].stretch.start_us for _, piece in pieces]
    for (number, piece), content, next_us in zip(pieces, contents, [*starts_us[1:], math.inf], strict=True):
        key = number, numbers[number]
        numbers[number] += 1
        if content == whole:
            steps[key] = _times(trace, piece) | _update(trace, piece, next_us)
    return RankSteps(name=trace.name, steps=steps, num_partial=len(pieces) - len(steps))


def shared_keys(ranks: Sequence[RankSteps]) -> list[StepKey]:
    """The steps that every rank has whole, in order; raises FileError where there is none."""
    shared = sorted(set.intersection(*(set(rank.steps) for rank in ranks)))
    if not shared:
        numbers = [", ".join(str(number) for number in dict.fromkeys(number for number, _ in x.steps)) for x in ranks]
        said = ", ".join(f"{x.name} has steps {text}" for x, text in zip(ranks, numbers, strict=True))
        raise FileError(f"no step is whole in all traces: {said}; expected the same steps recorded on every rank")
    return shared


def _is_training(actions: frozenset[Action]) -> bool:
    """Whether each of its stages has forwards and backwards."""
    kinds: dict[int, set[ActionKind]] = {}
    for action in actions:
        kinds.setdefault(action.stage, set()).add(action.kind)
    ends = {ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT}
    return bool(kinds) and all(ActionKind.FORWARD in found and found & ends for found in kinds.values())


def _pieces(trace: RankTrace, ranges: Sequence[Ranged]) -> list[tuple[int, list[Ranged]]]:
    """The actions cut into steps, each with the profiler's number or 0."""
    marks = [(x.start_us, number) for x in trace.marks if (number := step_number(x.name)) is not None]
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


def _times(trace: RankTrace, piece: Sequence[Ranged]) -> dict[Action, Times]:
    """When the device computed for each action, one after the other: what two of them share counts for the first.

    An action without anything to compute takes no time, right before the next one.
    """
    found = [trace.times(x.stretch) for x in piece]
    next_us = max((x[1] for x in found if x is not None), default=piece[-1].stretch.end_us)
    for i in reversed(range(len(found))):
        begun = found[i] or (next_us, next_us)
        found[i], next_us = begun, begun[0]
    free_us, done = float("-inf"), dict[Action, Times]()
    for x, times in zip(piece, (x for x in found if x is not None), strict=True):
        done[x.action] = max(times[0], free_us), max(times[1], free_us)
        free_us = done[x.action][1]
    return done


def _update(trace: RankTrace, piece: Sequence[Ranged], next_us: float) -> dict[Action, Times]:
    """The optimizer's updates between a step and the next one, as one action of the rank's first stage: those of the weights
    and that of the gradients; none where there are none."""
    bounds_us = max(x.stretch.end_us for x in piece), next_us
    first, last = (bisect_left(trace.marks, moment_us, key=lambda x: x.start_us) for moment_us in bounds_us)
    own = (x for x in trace.marks[first:last] if neighbour_of(x.name) is None)
    marks = list(takewhile(lambda x: is_update(x.name), own))
    found = [trace.times(mark) if trace.has_kernels else (mark.start_us, mark.end_us) for mark in marks]
    times = [x for x in found if x is not None]
    if not times:
        return {}
    action = Action(min(x.action.stage for x in piece), ActionKind.OPTIMIZER, 0)
    return {action: (min(start for start, _ in times), max(end for _, end in times))}
