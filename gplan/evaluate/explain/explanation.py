"""The reasons for a plan, as numbers: bottleneck, options, sensitivities and baselines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from gplan.evaluate.replanning import PlanSettings

Binding: TypeAlias = Literal["compute", "memory", "cut", "filling", "optimizer"]
"""What limits the step: one device's compute, memory, the transfers over the cuts, filling and draining the pipeline,
or the optimizer."""

OptionKind: TypeAlias = Literal[
    "same", "no constraints", "more memory", "no memory limit", "more devices", "fewer devices", "smaller microbatches",
    "more microbatches", "schedule", "recompute", "faster link", "free link",
]  # fmt: skip
"""What an option changes; "same" is the best plan for the plan's own setting. Other memory may give two options: with
the plan's recompute mode, and without recompute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShare:
    """The share of one layer in its device's compute."""

    layer: str
    time_s: float  # forward and backward of one micro-batch, without recompute
    share: float  # of all layers of the device


@dataclass(frozen=True, slots=True, kw_only=True)
class CutCost:
    """What the transfers over one cut between devices cost."""

    stage: int  # the cut is after it
    layer: str  # the last one before the cut
    transfer_s: float  # of one micro-batch, both ways
    exposed_s: float  # by how much the step is shorter where these transfers take no time


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """The device that computes longest, and where its time goes. The six times add up to the step."""

    device: int
    stages: tuple[int, ...]  # that the device holds
    equals: tuple[int, ...]  # other devices whose compute is within one percent
    layers: tuple[LayerShare, ...]  # the slowest first, up to half of the device's compute and their equals
    num_layers: int  # of all its stages
    busy_s: float  # computing
    filling_s: float  # idle while the pipeline fills and drains, the transfers of that included
    imbalance_s: float  # idle because another device was slower
    communication_s: float  # idle during a transfer
    engine_s: float  # idle during the engine's own work
    tail_s: float  # after the last backward of the pipeline
    cuts: tuple[CutCost, ...]
    exposed_s: float  # by how much the step is shorter where all transfers take no time
    memory_gain_s: float | None  # of the step without a memory limit; None: not known
    binds: Binding


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionResult:
    """The best plan of an option."""

    step_s: float
    samples_per_s: float
    peak_bytes: int  # of the device that needs most
    is_proven: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A change with its best plan, or the reason why there is none."""

    kind: OptionKind
    setting: PlanSettings
    outcome: OptionResult | None
    reason: str = ""  # why there is no outcome
    is_interpolated: bool = False  # its micro-batch size was not profiled


@dataclass(frozen=True, slots=True, kw_only=True)
class TurningPoint:
    """The factor on a layer's times beyond which other cuts are better."""

    factor: float
    moved: tuple[str, ...]  # layers that are then on another stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """How much slower or faster one layer must be for the best plan to change; None: no change within the range."""

    layer: str
    stage: int
    time_s: float  # forward and backward of one micro-batch
    slower: TurningPoint | None
    faster: TurningPoint | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivities:
    """The sensitivities of the relevant layers."""

    layers: tuple[Sensitivity, ...]
    left_out: tuple[str, ...]  # relevant layers that the time did not suffice for
    most_factor: float  # the range is 1 / most_factor to most_factor
    is_proven: bool = True  # the best plan is; else a change may come sooner
    reason: str = ""  # why there are none


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineOutcome:
    """The partition of a published rule of thumb for the same layers."""

    rule: str
    cuts: tuple[int, ...] | None  # in the plan's order of layers; None: the rule finds none
    step_s: float | None = None
    largest_s: float | None = None  # compute seconds of one micro-batch on the device with most
    peak_bytes: int | None = None  # of the device that needs most
    fits: bool = True  # within the memory limit
    reason: str = ""  # why there are no cuts, or why they do not fit


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A plan and the reasons for it."""

    model: str
    setting: PlanSettings
    step_s: float
    samples_per_s: float
    peak_bytes: int
    bottleneck: Bottleneck
    options: tuple[Option, ...]
    sensitivities: Sensitivities
    rules: tuple[BaselineOutcome, ...]  # the plan itself first
    notes: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()  # warnings of the profile: its times are uncertain
