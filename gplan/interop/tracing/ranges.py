"""The actions that a rank recorded, each with the stretch of its process in which it ran.

They come from what torch.distributed.pipelining writes around its actions; where that is nothing, from the stage's own
functions in the recorded stacks; and where there are none, as in a plain trace of Schedule1F1B, from the sends and
receives between runs of operations (`unmarked.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gplan.errors import FileError
from gplan.interop.tracing.kinds import (
    BETWEEN,
    Mark,
    OperationRole,
    actions_of,
    chunk_kind,
    neighbour_of,
    one_stage_action,
)
from gplan.interop.tracing.occupied import Device, within
from gplan.interop.tracing.reading import RankTrace
from gplan.interop.tracing.unmarked import steps_of, unmarked_actions
from gplan.nouns import Action, ActionKind

_CHUNK_KINDS = {"forward_one_chunk": ActionKind.FORWARD, "backward_one_chunk": ActionKind.BACKWARD}


class Ranged(NamedTuple):
    """One action and the stretch in which it ran."""

    action: Action
    stretch: Mark


def ranges_of(device: Device, *, place: int, num_ranks: int) -> tuple[Ranged, ...]:
    """The actions of a rank in order of time; `place` is its place among the ranks, the stage where ranges name none.

    Raises FileError where the trace has no pipeline in it.
    """
    trace = device.trace
    found = _of_the_runtime(device)
    if not found:
        found = _of_one_stage(trace, place)
        _check_neighbours(device, found, place=place, num_ranks=num_ranks)
        found = found or _of_functions(trace, place)
    if not found:
        found = [Ranged(*x) for x in unmarked_actions(trace, stage=place, num_stages=num_ranks)]
    if not found:
        raise FileError(f"{trace.name} {_reason(trace, place, num_ranks)}")
    return tuple(found)


def least_leads_us(devices: Sequence[Device], ranges: Sequence[Sequence[Ranged]]) -> dict[ActionKind, float]:
    """For each kind of action the least time from the beginning of a range to its first operation, on any rank.

    That is what the stage's own code takes before: of some actions nobody waits for an input, such as the first stage's
    forwards. On a GPU only kernels count, and there is none.
    """
    leads: dict[ActionKind, float] = {}
    for device, own in zip(devices, ranges, strict=True):
        for x in own if not device.has_kernels else ():
            times = device.times(x.stretch)
            if times is not None and len(actions_of(x.stretch.name)) < 2:
                leads[x.action.kind] = min(leads.get(x.action.kind, math.inf), times[0] - x.stretch.start_us)
    return leads


def missing_stages(trace: RankTrace, known: set[int]) -> set[int]:
    """Stages that a rank sends to or receives from and that no trace has."""
    return {x for x in (neighbour_of(mark.name) for mark in trace.marks) if x is not None} - known


def _reason(trace: RankTrace, place: int, num_ranks: int) -> str:
    """Why there are no actions, and what would help."""
    if np.isin(trace.operations.role, BETWEEN).any():
        return (
            "names no actions, and what lies between its sends and receives is not Schedule1F1B's order on stage "
            f"{place} of {num_ranks}; expected a trace of every rank with whole steps in it, or one with_stack=True"
        )
    return (
        "has no actions of a pipeline: neither ranges such as 'PP:0F1' or 'Forward 1', nor sends and receives; expected a "
        "trace of a torch.distributed.pipelining schedule with whole steps in it"
    )


def _check_neighbours(device: Device, found: Sequence[Ranged], *, place: int, num_ranks: int) -> None:
    """Raise FileError where the first rank's forwards receive or the last one's send: then a rank is missing."""
    forwards = [within(device.trace.operations, x.stretch) for x in found if x.action.kind is ActionKind.FORWARD]
    own = [device.trace.operations] if num_ranks == 1 else forwards
    wrong = {OperationRole.RECEIVES} if place == 0 else set()
    wrong |= {OperationRole.SENDS} if place == num_ranks - 1 else set()
    if any(np.isin(x.role, list(wrong)).any() for x in own):
        raise FileError(
            f"rank {place if device.trace.rank is None else device.trace.rank} sends to or receives from a rank whose trace "
            f"is missing ({device.trace.name} and {num_ranks - 1} more were given); expected a trace of every rank"
        )


def _of_the_runtime(device: Device) -> list[Ranged]:
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


def _of_functions(trace: RankTrace, stage: int) -> list[Ranged]:
    """The n-th forward of a step is micro-batch n, as it is in Schedule1F1B; so is the n-th backward."""
    found = []
    for step in steps_of(trace):
        for name, kind in _CHUNK_KINDS.items():
            marks = [x for x in _within(trace.marks, step) if chunk_kind(x.name) == name]
            found += [Ranged(Action(stage, kind, i), mark) for i, mark in enumerate(marks)]
    return sorted(found, key=lambda x: x.stretch.start_us)


def _within(marks: Sequence[Mark], step: Mark) -> list[Mark]:
    return [x for x in marks if step.start_us <= x.start_us < step.end_us]
