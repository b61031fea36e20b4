"""The actions that a rank recorded, each with its time range.

They are found by the ranges that torch.distributed.pipelining writes around its actions; without those, by the functions of
torch or Megatron-core in the recorded stacks; without stacks, as in a plain trace of 1F1B, by the sends and receives
between runs of operations.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from gplan.core import Action, ActionKind
from gplan.core.errors import FileError
from gplan.interop.traces.busy_times import TracedDevice, within
from gplan.interop.traces.profiler_marks import (
    BETWEEN,
    Mark,
    OperationRole,
    actions_of,
    function_kind,
    is_update,
    neighbour_of,
    one_stage_action,
    step_number,
)
from gplan.interop.traces.reading import RankTrace
from gplan.schedules.registry import make_schedule


def unmarked_actions(trace: RankTrace, *, stage: int, num_stages: int) -> list[tuple[Action, Mark]]:
    """The actions of a trace of Schedule1F1B, which writes no ranges, in order of time; steps of another order have none.

        recv [F0 F0] send recv [B0 B0] send,recv [F1 F1] send ...

    A run of operations without a send or receive in between is an action or book-keeping. Backwards are the runs of the
    autograd engine; as many of the longest other runs before the last of them are the forwards (clipping and updates follow
    it). The result must be in the order of 1F1B.
    """
    return [x for step in steps_of(trace) for x in _actions_of(trace, step, stage=stage, num_stages=num_stages)]


def steps_of(trace: RankTrace) -> list[Mark]:
    """The profiler's steps; without them, the ranges between optimizer updates, or the whole trace."""
    steps = [x for x in trace.marks if step_number(x.name) is not None]
    if steps:
        return steps
    thread = next((x.thread for x in trace.marks), 0)
    ends = [x.end_us for x in trace.marks if is_update(x.name)]
    end_us = float(trace.operations.end_us.max(initial=0.0))
    bounds = [float("-inf"), *ends, max([end_us, *(x.end_us for x in trace.marks)])]
    return [Mark("step", a, b, thread) for a, b in pairwise(bounds) if b > a]


def _actions_of(trace: RankTrace, step: Mark, *, stage: int, num_stages: int) -> list[tuple[Action, Mark]]:
    runs = list(_runs(trace, step))
    backwards = [mark for is_backward, mark in runs if is_backward]
    if not backwards:
        return []
    before = [mark for is_backward, mark in runs if not is_backward and mark.start_us < backwards[-1].start_us]
    others = sorted(before, key=lambda x: x.start_us - x.end_us)
    forwards = sorted(others[: len(backwards)], key=lambda x: x.start_us)
    if len(forwards) < len(backwards):
        return []
    found = [(Action(stage, ActionKind.FORWARD, i), mark) for i, mark in enumerate(forwards)]
    found += [(Action(stage, ActionKind.BACKWARD, i), mark) for i, mark in enumerate(backwards)]
    found.sort(key=lambda x: x[1].start_us)
    expected = make_schedule("1f1b", num_devices=num_stages, num_microbatches=len(backwards)).orders[stage]
    return found if tuple(action for action, _ in found) == expected else []


def _runs(trace: RankTrace, step: Mark) -> Iterator[tuple[bool, Mark]]:
    """The runs of operations, each with whether it is a backward; without optimizer updates and batch splitting."""
    operations = trace.operations
    first, end = np.searchsorted(operations.start_us, [step.start_us, step.end_us])
    columns = (operations.start_us, operations.end_us, operations.role)
    rows = zip(*(column[first:end].tolist() for column in columns), strict=True)
    updates = [x for x in trace.marks if is_update(x.name) and step.start_us <= x.start_us < step.end_us]
    own = [x for x in rows if not _is_inside(x[0], updates)]
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


def _is_inside(moment_us: float, marks: Sequence[Mark]) -> bool:
    return any(x.start_us <= moment_us < x.end_us for x in marks)


class Ranged(NamedTuple):
    """One action and its time range."""

    action: Action
    stretch: Mark


def ranges_of(device: TracedDevice, *, place: int, num_ranks: int) -> tuple[Ranged, ...]:
    """The actions of a rank in order of time; `place` is its index among the ranks, the stage if the ranges name none.

    Raises FileError if the trace has no pipeline actions.
    """
    trace = device.trace
    found = _of_the_runtime(device)
    if not found:
        found = _of_one_stage(trace, place)
        _check_neighbours(device, found, place=place, num_ranks=num_ranks)
        found = found or _of_functions(trace, place, num_ranks)
    if not found and _is_communicating(trace):
        found = [Ranged(*x) for x in unmarked_actions(trace, stage=place, num_stages=num_ranks)]
    if not found:
        raise FileError(f"{trace.name} {_reason(trace, place, num_ranks)}")
    return tuple(found)


def least_leads_us(devices: Sequence[TracedDevice], ranges: Sequence[Sequence[Ranged]]) -> dict[ActionKind, float]:
    """For each kind of action the shortest time on any rank from the start of a range to its first operation.

    That is the time of the stage's own code, as some actions wait for no input, such as the forwards of the first stage.
    On a GPU only kernels count, so there is none.
    """
    leads: dict[ActionKind, float] = {}
    for device, own in zip(devices, ranges, strict=True):
        for x in own if not device.has_kernels else ():
            times = device.times(x.stretch)
            if times is not None and len(actions_of(x.stretch.name)) < 2:
                leads[x.action.kind] = min(leads.get(x.action.kind, math.inf), times[0] - x.stretch.start_us)
    return leads


def missing_stages(trace: RankTrace, known: set[int]) -> set[int]:
    """Stages that a rank sends to or receives from and that are in no trace."""
    return {x for x in (neighbour_of(mark.name) for mark in trace.marks) if x is not None} - known


def _reason(trace: RankTrace, place: int, num_ranks: int) -> str:
    """Why no actions were found, and what to record instead."""
    if _is_communicating(trace):
        return (
            "names no actions, and the operations between its sends and receives are not in Schedule1F1B's order on stage "
            f"{place} of {num_ranks}; expected a trace of every rank with whole steps in it, or one with_stack=True"
        )
    return (
        "has no actions of a pipeline: neither ranges such as 'PP:0F1' or 'Forward 1', nor sends and receives; expected a "
        "trace of a torch.distributed.pipelining schedule with whole steps in it"
    )


def _is_communicating(trace: RankTrace) -> bool:
    return bool(np.isin(trace.operations.role, BETWEEN).any())


def _check_neighbours(device: TracedDevice, found: Sequence[Ranged], *, place: int, num_ranks: int) -> None:
    """Raise FileError if the first rank's forwards receive or the last one's send: then a rank is missing."""
    forwards = [within(device.trace.operations, x.stretch) for x in found if x.action.kind is ActionKind.FORWARD]
    own = [device.trace.operations] if num_ranks == 1 else forwards
    wrong = {OperationRole.RECEIVES} if place == 0 else set()
    wrong |= {OperationRole.SENDS} if place == num_ranks - 1 else set()
    if any(np.isin(x.role, list(wrong)).any() for x in own):
        raise FileError(
            f"rank {place if device.trace.rank is None else device.trace.rank} sends to or receives from a rank whose trace "
            f"is missing ({device.trace.name} and {num_ranks - 1} more were given); expected a trace of every rank"
        )


def _of_the_runtime(device: TracedDevice) -> list[Ranged]:
    found = []
    for mark in device.trace.marks:
        actions = actions_of(mark.name)
        if len(actions) == 2:
            turning_us = device.turning_us(mark)
            parts = mark._replace(end_us=turning_us), mark._replace(start_us=turning_us)
            found += [Ranged(action, part) for action, part in zip(actions, parts, strict=True)]
        else:
            found += [Ranged(action, mark) for action in actions]
    return found


def _of_one_stage(trace: RankTrace, stage: int) -> list[Ranged]:
    pairs = ((one_stage_action(mark.name, stage), mark) for mark in trace.marks)
    return [Ranged(action, mark) for action, mark in pairs if action is not None]


def _of_functions(trace: RankTrace, place: int, num_ranks: int) -> list[Ranged]:
    """Actions by the functions that run them, step by step."""
    found = []
    for step in steps_of(trace):
        marks = [(kind, x) for x in _within(trace.marks, step) if (kind := function_kind(x.name)) is not None]
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


def _within(marks: Sequence[Mark], step: Mark) -> list[Mark]:
    return [x for x in marks if step.start_us <= x.start_us < step.end_us]
