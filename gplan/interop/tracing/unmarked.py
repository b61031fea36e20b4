"""Schedule1F1B writes no ranges: its actions found from what lies between sends and receives.

    recv [F0 F0] send recv [B0 B0] send,recv [F1 F1] send ...

In each step a run of operations without a send or receive in between, all of a backward or none of one, is an action or
a bit of book-keeping; the backwards are the runs of the autograd engine, and as many of the longest other runs are the
forwards. The order that comes out must be that of 1F1B, else nothing is said to be found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from gplan.interop.tracing.kinds import BETWEEN, Mark, OperationRole, is_update, step_number
from gplan.interop.tracing.reading import RankTrace
from gplan.nouns import Action, ActionKind
from gplan.schedules import make_schedule


def unmarked_actions(trace: RankTrace, *, stage: int, num_stages: int) -> list[tuple[Action, Mark]]:
    """The actions of every step that is one of 1F1B on that stage, in order of time."""
    return [x for step in steps_of(trace) for x in _actions_of(trace, step, stage=stage, num_stages=num_stages)]


def steps_of(trace: RankTrace) -> list[Mark]:
    """The profiler's steps; where there are none, what lies between the optimizer's updates, or all of the trace."""
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
    others = sorted((mark for is_backward, mark in runs if not is_backward), key=lambda x: x.start_us - x.end_us)
    forwards = sorted(others[: len(backwards)], key=lambda x: x.start_us)
    if not backwards or len(forwards) < len(backwards):
        return []
    found = [(Action(stage, ActionKind.FORWARD, i), mark) for i, mark in enumerate(forwards)]
    found += [(Action(stage, ActionKind.BACKWARD, i), mark) for i, mark in enumerate(backwards)]
    found.sort(key=lambda x: x[1].start_us)
    expected = make_schedule("1f1b", num_devices=num_stages, num_microbatches=len(backwards)).orders[stage]
    return found if tuple(action for action, _ in found) == expected else []


def _runs(trace: RankTrace, step: Mark) -> Iterator[tuple[bool, Mark]]:
    """Whether it is a backward's, and from when to when, of each run of operations;
    updates and what splits are none."""
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
