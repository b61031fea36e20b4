"""When things happen: the ordered actions of every device, and the spans of time they took or should take.

A predicted and a measured run are the same noun, `Timeline`; only its `origin` differs.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from statistics import median

import msgspec

from gplan.core.checks import Origin, RecomputeMode, check_not_empty, check_not_negative, check_positive


class ActionKind(StrEnum):
    """What a device does, by the letter used in action strings."""

    FORWARD = "F"
    BACKWARD = "B"  # whole, or in its two halves:
    INPUT_GRADIENT = "I"  # which the stage before waits for
    WEIGHT_GRADIENT = "W"  # which nobody waits for
    OPTIMIZER = "O"

    __hash__ = str.__hash__  # an enum's own is slow, and actions are keys everywhere

    @property
    def words(self) -> str:
        """What it is called."""
        return self.name.lower().replace("_", " ")


BACKWARD_KINDS = (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)
"""All that a backward pass can consist of."""


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One unit of work: `3F0` is stage 3, forward, micro-batch 0.

    >>> str(Action(3, ActionKind.FORWARD, 0)), Action.parse("2B11").microbatch
    ('3F0', 11)
    """

    stage: int
    kind: ActionKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action written as stage, letter, micro-batch, numbers below 10^9; raises ValueError for anything else."""
        match = re.fullmatch(r"([0-9]{1,9})([FBIW])([0-9]{1,9})", text)
        if match is None:
            found = text if len(text) <= 30 else f"{text[:30]}..."
            raise ValueError(f"{found!r} is not an action; expected stage, F, B, I or W, micro-batch, such as 3F0")
        return cls(int(match[1]), ActionKind(match[2]), int(match[3]))


@dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """The order in which every device performs its actions; device d runs `orders[d]` from left to right.

    A device holds one stage, or several of them, its chunks. Two schedules are equal only if they are the same object.
    """

    name: str
    num_stages: int
    num_microbatches: int
    orders: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        check_not_empty("orders", self.orders)

    @property
    def num_devices(self) -> int:
        """K."""
        return len(self.orders)

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """The device of each stage."""
        device = {action.stage: i for i, order in enumerate(self.orders) for action in order}
        return tuple(device[stage] for stage in range(self.num_stages))

    def stages_of(self, device: int) -> tuple[int, ...]:
        """The stages that a device holds, rising."""
        return tuple(stage for stage, found in enumerate(self.devices) if found == device)


class Span(msgspec.Struct, frozen=True, kw_only=True, gc=False):  # there are very many of both, and a dataclass is slow
    """One action of one device, from start to end, in seconds since the step began."""

    device: int
    action: Action
    start_s: float
    end_s: float

    def __post_init__(self) -> None:
        _check_interval(self)

    @property
    def duration_s(self) -> float:
        """Seconds from start to end."""
        return self.end_s - self.start_s


class Transfer(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The output of `action` on its way from one device to a neighbour: activations after F, gradients after B."""

    action: Action
    source: int
    target: int
    start_s: float
    end_s: float
    num_bytes: int

    def __post_init__(self) -> None:
        if not 0 <= self.num_bytes < math.inf:  # a look is quicker than a call
            check_not_negative(self, "num_bytes")
        _check_interval(self)


class IdleCause(StrEnum):
    """Why a device waits."""

    WARM_UP = "warm-up"
    DRAIN = "drain"
    IMBALANCE = "imbalance"
    COMMUNICATION = "communication"
    ENGINE = "engine"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """A piece of the bubble: one device waiting for one reason."""

    device: int
    cause: IdleCause
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        """Seconds from start to end."""
        return self.end_s - self.start_s


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One training step: what every device did and when. Spans are ordered by device, then by start."""

    num_devices: int
    num_microbatches: int
    spans: tuple[Span, ...]
    transfers: tuple[Transfer, ...]
    origin: Origin

    def __post_init__(self) -> None:
        check_not_empty("spans", self.spans)
        devices = {span.device for span in self.spans}
        if (len(devices), min(devices), max(devices)) != (self.num_devices, 0, self.num_devices - 1):
            raise ValueError(f"spans name devices {sorted(devices)}; expected 0 to {self.num_devices - 1}")
        check_positive(self, "num_microbatches")
        ends = (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT)
        for name, kinds in (("forward", (ActionKind.FORWARD,)), ("backward", ends)):
            without = devices - {span.device for span in self.spans if span.action.kind in kinds}
            if without:
                raise ValueError(f"device {min(without)} has no {name}; expected one per micro-batch")

    @property
    def step_s(self) -> float:
        """Seconds from the start of the step to the end of the last action."""
        return max(span.end_s for span in self.spans)

    @cached_property
    def loop_spans(self) -> tuple[Span, ...]:
        """Forward and backward spans: the micro-batch loop without the optimizer."""
        return tuple(span for span in self.spans if span.action.kind is not ActionKind.OPTIMIZER)

    @property
    def loop_start_s(self) -> float:
        """When the first forward begins."""
        return min(span.start_s for span in self.loop_spans)

    @property
    def loop_end_s(self) -> float:
        """When the last backward ends."""
        return max(span.end_s for span in self.loop_spans)

    @property
    def bubble(self) -> float:
        """The share of device time that is idle within the micro-batch loop; (K-1)/(M+K-1) for equal GPipe stages."""
        available_s = self.num_devices * (self.loop_end_s - self.loop_start_s)
        busy_s = sum(span.duration_s for span in self.loop_spans)
        return max(0.0, 1.0 - busy_s / available_s) if available_s else 0.0

    def mean_s(self, *, stage: int, kind: ActionKind) -> float:
        """Mean seconds of one kind of action of one stage; 0 where there is none."""
        durations = [x.duration_s for x in self.spans if x.action.stage == stage and x.action.kind is kind]
        return sum(durations) / len(durations) if durations else 0.0

    def median_s(self, *kinds: ActionKind, stage: int) -> float | None:
        """The median over the micro-batches of what a stage takes, the kinds of one added up; None: none ran."""
        spent: dict[int, float] = {}
        for x in self.spans:
            if x.action.stage == stage and x.action.kind in kinds:
                spent[x.action.microbatch] = spent.get(x.action.microbatch, 0.0) + x.duration_s
        return median(spent.values()) if spent else None

    def update_s(self, device: int) -> float:
        """Seconds of a device's optimizer, for all its stages."""
        own = (x for x in self.spans if x.device == device and x.action.kind is ActionKind.OPTIMIZER)
        return sum(x.duration_s for x in own)


def _check_interval(noun: Span | Transfer) -> None:
    """From a finite start of 0 or more to an end that is not before it."""
    if not 0.0 <= noun.start_s <= noun.end_s < math.inf:
        check_not_negative(noun, "start_s", "end_s")
        raise ValueError(f"end_s is {noun.end_s!r}; expected at least start_s, {noun.start_s!r}")


def is_recomputed(microbatch: int, *, num_microbatches: int, recompute: RecomputeMode) -> bool:
    """Whether the backward of this micro-batch runs its forward again."""
    return recompute in ("always", "selected") or (recompute == "except-last" and microbatch < num_microbatches - 1)
