"""The names in a torch.profiler trace: pipeline actions, operations that send or receive, optimizer updates, steps.

torch.distributed.pipelining writes `PP:2F0` around every action of the schedules that its runtime runs (gplan's engine
is one), with two actions in `PP:(0F3;3B1)OVERLAP_F_B`; ScheduleGPipe writes `Forward 0` and `Backward 0`; Schedule1F1B
writes nothing. With stacks (`with_stack=True`) all of them record the stage's own functions, and Megatron-core's schedules
theirs, which write no ranges either: what they mark by NVTX is not in a trace of torch.profiler.
"""

from __future__ import annotations

import re
from enum import IntEnum
from typing import NamedTuple

from gplan.core import Action, ActionKind

_PLAIN = re.compile(r"PP:([0-9]{1,9}[FBIW][0-9]{1,9})")
_OVERLAPPED = re.compile(r"PP:\(([0-9]{1,9}F[0-9]{1,9});([0-9]{1,9}B[0-9]{1,9})\)OVERLAP_F_B")
_SENT = re.compile(r"PP:([0-9]{1,9})(SEND|RECV)_([FB])[0-9]{1,9}")
_OF_ONE_STAGE = re.compile(r"(Forward|Backward) ([0-9]{1,9})")
_FUNCTION = re.compile(
    r"(?:.*/)?(?:torch/distributed/pipelining/stage\.py\([0-9]+\): (forward|backward)_one_chunk"
    r"|megatron/core/pipeline_parallel/schedules\.py\([0-9]+\): (forward|backward)_step)$"
)
_STEP = re.compile(r"ProfilerStep#([0-9]+)")
_UPDATE = re.compile(r"Optimizer\.(step|zero_grad)#")


class Mark(NamedTuple):
    """A named time range of one thread."""

    name: str
    start_us: float
    end_us: float
    thread: int


class OperationRole(IntEnum):
    """What an operation does in a pipeline."""

    COMPUTES = 0
    SENDS = 1
    RECEIVES = 2
    GOES_BACK = 3  # part of a backward
    SPLITS = 4  # cuts the batch into micro-batches, before the first action


BETWEEN = (OperationRole.SENDS, OperationRole.RECEIVES)
"""Operations that end a run of computing operations."""


def role_of(name: str) -> int:
    """The role of an operation by its name."""
    if name.startswith("autograd::engine::"):
        return OperationRole.GOES_BACK
    if name.startswith("c10d::send"):
        return OperationRole.SENDS
    if name.startswith("c10d::recv"):
        return OperationRole.RECEIVES
    return OperationRole.SPLITS if name == "aten::tensor_split" else OperationRole.COMPUTES


def is_point_to_point(name: str) -> bool:
    """Whether a kernel sends to another device or receives from one."""
    return "SendRecv" in name


def is_kept_mark(name: str) -> bool:
    """Whether a range is about the pipeline."""
    return any(x.match(name) for x in (_PLAIN, _OVERLAPPED, _SENT, _OF_ONE_STAGE, _FUNCTION, _STEP, _UPDATE))


def actions_of(name: str) -> tuple[Action, ...]:
    """The actions that a range of the runtime names, in their order: mostly one, none for other ranges.

    >>> [str(x) for x in actions_of("PP:(0F3;3B1)OVERLAP_F_B")]
    ['0F3', '3B1']
    """
    match = _PLAIN.fullmatch(name) or _OVERLAPPED.fullmatch(name)
    return tuple(Action.parse(x) for x in match.groups()) if match else ()


def neighbour_of(name: str) -> int | None:
    """The stage that a range sends to or receives from; None for other ranges."""
    match = _SENT.fullmatch(name)
    if match is None:
        return None
    return int(match[1]) + (1 if (match[2] == "SEND") == (match[3] == "F") else -1)


def one_stage_action(name: str, stage: int) -> Action | None:
    """The action of a range that names no stage; None for other ranges."""
    match = _OF_ONE_STAGE.fullmatch(name)
    return Action(stage, ActionKind(match[1][0]), int(match[2])) if match else None


def function_kind(name: str) -> ActionKind | None:
    """The kind of action that a trainer's own function runs; None for other ranges.

    >>> function_kind("megatron/core/pipeline_parallel/schedules.py(311): forward_step").value
    'F'
    """
    match = _FUNCTION.fullmatch(name)
    return ActionKind((match[1] or match[2])[0].upper()) if match else None


def step_number(name: str) -> int | None:
    """The number of the profiler's step; None for other ranges."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def is_update(name: str) -> bool:
    """Whether a range is an optimizer's."""
    return _UPDATE.match(name) is not None
