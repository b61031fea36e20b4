"""Schedules and timelines: the ordered actions of every device, and the spans of time they take.

A predicted and a measured step are the same type, `Timeline`; only the `origin` differs.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from statistics import fmean, median
from typing import TypeVar

import msgspec

from gplan.core.checks import Origin, RecomputeMode, check_not_empty, check_not_negative, check_positive


class ActionKind(str, Enum):
    """Kinds of actions, by the letter used in action strings."""

    FORWARD = "F"
    BACKWARD = "B"  # whole, or split into two halves:
    INPUT_GRADIENT = "I"  # the previous stage waits for it
    WEIGHT_GRADIENT = "W"  # no stage waits for it
    OPTIMIZER = "O"

    __str__ = str.__str__
    __hash__ = str.__hash__  # the default hash of an enum is slow, and actions are often keys

    @property
    def words(self) -> str:
        """Its name in words."""
        return self.name.lower().replace("_", " ")


BACKWARD_KINDS = (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)
"""The actions of a backward pass."""


class Action(msgspec.Struct, frozen=True, order=True, gc=False):  # made faster than a dataclass; there are very many
    """One unit of work: `3F0` is stage 3, forward, micro-batch 0.

    >>> str(Action(3, ActionKind.FORWARD, 0)), Action.parse("2B11").microbatch
    ('3F0', 11)
    """

    stage: int
    kind: ActionKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @property
    def receiver(self) -> int:
        """The stage that its output is for: the next after a forward, else the one before; it need not exist."""
        return self.stage + (1 if self.kind is ActionKind.FORWARD else -1)

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action in a text such as `3F0`, with numbers below 10^9; raises ValueError for anything else."""
        match = re.fullmatch(r"([0-9]{1,9})([FBIW])([0-9]{1,9})", text)
        if match is None:
            found = text if len(text) <= 30 else f"{text[:30]}..."
            raise ValueError(f"{found!r} is not an action; expected stage, F, B, I or W, micro-batch, such as 3F0")
        return cls(int(match[1]), ActionKind(match[2]), int(match[3]))


def moment_text(moment: str, *, with_stage: bool) -> str:
    """An action in words, as of a peak of memory, or "optimizer", which has no micro-batch.

    >>> moment_text("2B3", with_stage=True), moment_text("optimizer", with_stage=True)
    ('backward of micro-batch 3 in stage 2', 'optimizer')
    """
    try:
        action = Action.parse(moment)
    except ValueError:
        return moment
    where = f" in stage {action.stage}" if with_stage else ""
    return f"{action.kind.words} of micro-batch {action.microbatch}{where}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """The actions of every device in order: device d runs `orders[d]` from left to right.

    A device has one stage, or several, its chunks. Schedules are compared by identity.
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
        """The stages of a device, rising."""
        return tuple(stage for stage, found in enumerate(self.devices) if found == device)


class Span(msgspec.Struct, frozen=True, kw_only=True, gc=False):  # faster than a dataclass; there are very many
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
    """The transfer of an action's output to a neighbouring device: activations after F, gradients after B or I."""

    action: Action
    source: int
    target: int
    start_s: float
    end_s: float
    num_bytes: int

    def __post_init__(self) -> None:
        if not 0 <= self.num_bytes < math.inf:  # faster than the call
            check_not_negative(self, "num_bytes")
        _check_interval(self)


class IdleCause(str, Enum):
    """The cause of idle time."""

    __str__ = str.__str__

    WARM_UP = "warm-up"
    DRAIN = "drain"
    IMBALANCE = "imbalance"
    COMMUNICATION = "communication"
    ENGINE = "engine"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """An interval in which one device is idle for one cause."""

    device: int
    cause: IdleCause
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        """Seconds from start to end."""
        return self.end_s - self.start_s


Piece = TypeVar("Piece", Span, Transfer)


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One training step: the actions of every device over time. Spans are ordered by device, then by start."""

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
        if (last := max(span.action.microbatch for span in self.spans)) >= self.num_microbatches:
            raise ValueError(f"spans name micro-batch {last}; expected 0 to {self.num_microbatches - 1}")
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
        return idle_share(sum(span.duration_s for span in self.loop_spans), available_s)

    @cached_property
    def stages_by_device(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each device, ascending."""
        stages: list[set[int]] = [set() for _ in range(self.num_devices)]
        for span in self.spans:
            stages[span.device].add(span.action.stage)
        return tuple(tuple(sorted(x)) for x in stages)

    @cached_property
    def chunks(self) -> dict[int, int]:
        """The number of each stage among those of its device."""
        return {stage: chunk for stages in self.stages_by_device for chunk, stage in enumerate(stages)}

    @property
    def num_chunks(self) -> int:
        """The stages of the device that has most."""
        return 1 + max(self.chunks.values())

    @property
    def num_stages(self) -> int:
        """The number of stages on all devices."""
        return 1 + max(max(stages) for stages in self.stages_by_device)

    @cached_property
    def _stage_spans(self) -> dict[tuple[int, ActionKind], list[Span]]:
        spans: dict[tuple[int, ActionKind], list[Span]] = {}
        for span in self.spans:
            spans.setdefault((span.action.stage, span.action.kind), []).append(span)
        return spans

    def microbatch_s(self, *kinds: ActionKind, stage: int) -> dict[int, float]:
        """Seconds that a stage spends on each micro-batch in these kinds of action; only micro-batches that have any.

        Of a backward in halves, INPUT_GRADIENT and WEIGHT_GRADIENT are the halves and `BACKWARD_KINDS` is the whole.
        A backward that recomputes includes its recompute.
        """
        seconds: dict[int, float] = {}
        for kind in kinds:
            for x in self._stage_spans.get((stage, kind), ()):
                seconds[x.action.microbatch] = seconds.get(x.action.microbatch, 0.0) + x.duration_s
        return seconds

    def total_s(self, *kinds: ActionKind, stage: int) -> float:
        """Seconds of the step that a stage spends in these kinds of action."""
        return sum(self.microbatch_s(*kinds, stage=stage).values())

    def mean_s(self, *kinds: ActionKind, stage: int) -> float:
        """The mean of `microbatch_s`; 0 where no micro-batch has such an action."""
        seconds = self.microbatch_s(*kinds, stage=stage)
        return sum(seconds.values()) / len(seconds) if seconds else 0.0

    def actions_per_microbatch(self, *kinds: ActionKind, stage: int) -> float:
        """How many actions of these kinds take time, per micro-batch."""
        found = [self.microbatch_s(kind, stage=stage).values() for kind in kinds]
        return sum(seconds > 0 for of_kind in found for seconds in of_kind) / self.num_microbatches

    def median_s(self, *kinds: ActionKind, stage: int) -> float | None:
        """The median of `microbatch_s`; None where no micro-batch has such an action."""
        seconds = self.microbatch_s(*kinds, stage=stage)
        return median(seconds.values()) if seconds else None

    def mean_durations(self, recompute: RecomputeMode) -> dict[Action, float]:
        """For each loop action the mean duration over its stage and kind, actions that recompute apart from the rest."""
        alike: dict[tuple[int, ActionKind, bool], list[Span]] = {}
        for span in self.loop_spans:
            again = runs_forward_again(span.action, num_microbatches=self.num_microbatches, recompute=recompute)
            alike.setdefault((span.action.stage, span.action.kind, again), []).append(span)
        return {
            x.action: mean for spans in alike.values() for mean in [fmean(x.duration_s for x in spans)] for x in spans
        }

    def busy_s(self, device: int) -> float:
        """Seconds of a device's forwards and backwards."""
        return sum(x.duration_s for x in self.loop_spans if x.device == device)

    def update_s(self, device: int) -> float:
        """Seconds of a device's optimizer, for all its stages."""
        return sum(self.total_s(ActionKind.OPTIMIZER, stage=stage) for stage in self.stages_by_device[device])

    def idle_s(self, device: int) -> float:
        """Seconds of the step in which a device neither computes nor updates."""
        return self.step_s - self.busy_s(device) - self.update_s(device)

    def received_s(self, stage: int) -> float:
        """Mean seconds per micro-batch of the transfers to a stage: activations from before it, gradients from after."""
        seconds = (x.end_s - x.start_s for x in self.transfers if x.action.receiver == stage)
        return sum(seconds) / self.num_microbatches


def _check_interval(interval: Span | Transfer) -> None:
    """From a finite start of 0 or more to an end that is not before it."""
    if not 0.0 <= interval.start_s <= interval.end_s < math.inf:
        check_not_negative(interval, "start_s", "end_s")
        raise ValueError(f"end_s is {interval.end_s!r}; expected at least start_s, {interval.start_s!r}")


def idle_share(busy_s: float, available_s: float) -> float:
    """The share of the available device time that is idle; 0 without any.

    >>> idle_share(3.0, 4.0), idle_share(0.0, 0.0)
    (0.25, 0.0)
    """
    return max(0.0, 1.0 - busy_s / available_s) if available_s else 0.0


def is_recomputed(microbatch: int, *, num_microbatches: int, recompute: RecomputeMode) -> bool:
    """Whether the backward of this micro-batch recomputes its forward."""
    return recompute in ("always", "selected") or (recompute == "except-last" and microbatch < num_microbatches - 1)


def runs_forward_again(action: Action, *, num_microbatches: int, recompute: RecomputeMode) -> bool:
    """Whether an action includes a recompute: a backward, or of its halves the first, on the first stage the second."""
    half = ActionKind.INPUT_GRADIENT if action.stage else ActionKind.WEIGHT_GRADIENT
    again = is_recomputed(action.microbatch, num_microbatches=num_microbatches, recompute=recompute)
    return again and action.kind in (ActionKind.BACKWARD, half)
