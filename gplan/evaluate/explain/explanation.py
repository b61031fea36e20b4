"""Why a plan is as it is, in numbers: the values that the other modules of this room fill in and the tables put in
words."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from gplan.core import Constraints, Objective, RecomputeMode
from gplan.schedules.registry import schedule_info

Binding: TypeAlias = Literal["compute", "memory", "cut", "filling", "optimizer"]
"""What holds the step up: the work of one device, the memory of the devices, the transfers over the cuts, the filling
and draining of the pipeline, or the optimizer at its end."""

OptionKind: TypeAlias = Literal[
    "same", "no constraints", "more memory", "no memory limit", "more devices", "fewer devices", "smaller microbatches",
    "more microbatches", "schedule", "recompute", "faster link", "free link",
]  # fmt: skip
"""What an option changes; "same" changes nothing and is the best plan that there is for the plan's own setting. With
other memory there may be two: recomputing as the plan does, and not at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a plan is asked for: the arguments of `gplan.balance` beside the profile."""

    num_stages: int
    num_microbatches: int
    microbatch_size: int
    schedule: str
    recompute: RecomputeMode
    minimize: Objective
    memory_bytes: int | None  # of each device; None: no limit
    num_replicas: int = 1
    constraints: Constraints = field(default_factory=Constraints)

    @property
    def num_devices(self) -> int:
        """K, in one replica; each holds as many stages as the schedule has chunks."""
        return schedule_info(self.schedule).num_devices or self.num_stages // schedule_info(self.schedule).num_chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShare:
    """How much of its device one layer is."""

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
    """The device that computes longest: where its time goes. The five times add up to the step."""

    device: int
    stages: tuple[int, ...]  # that the device holds
    equals: tuple[int, ...]  # other devices that compute as long, within one percent
    layers: tuple[LayerShare, ...]  # the dearest first, up to half of the device
    num_layers: int  # of all its stages
    busy_s: float
    filling_s: float  # idle while the pipeline fills and drains, the transfers of that included
    imbalance_s: float  # idle because a neighbour was slower
    communication_s: float  # idle while what it waited for was on its way
    engine_s: float  # idle while the engine itself was at work
    tail_s: float  # after the last backward of the pipeline
    cuts: tuple[CutCost, ...]
    exposed_s: float  # by how much the step is shorter where all transfers take no time
    memory_gain_s: float | None  # see `options.memory_gain_s`; None: not known
    binds: Binding


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the best plan of an option does."""

    step_s: float
    samples_per_s: float
    peak_bytes: int  # of the device that needs most
    is_proven: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """Something that could be otherwise, balanced anew; or why it cannot be."""

    kind: OptionKind
    setting: Setting
    outcome: Outcome | None
    reason: str = ""  # why there is no outcome
    is_interpolated: bool = False  # its micro-batch size lies between two that were profiled


@dataclass(frozen=True, slots=True, kw_only=True)
class TurningPoint:
    """The factor on a layer's times, found by bisection, beyond which other cuts are better."""

    factor: float
    moved: tuple[str, ...]  # layers that are on another stage then


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """By how much one layer must become slower or faster before the best plan changes; None: not within the range."""

    layer: str
    stage: int
    time_s: float  # forward and backward of one micro-batch
    slower: TurningPoint | None
    faster: TurningPoint | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivities:
    """The layers that were looked at, and those that were to be and were not."""

    layers: tuple[Sensitivity, ...]
    left_out: tuple[str, ...]
    most_factor: float  # looked for between 1 / most_factor and most_factor
    is_proven: bool = True  # the best plan is; else a change may come sooner than is said
    reason: str = ""  # why there are none


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleOutcome:
    """What a rule of thumb makes of the same layers."""

    rule: str
    cuts: tuple[int, ...] | None  # in the plan's order of layers; None: the rule has none
    step_s: float | None = None
    largest_s: float | None = None  # compute seconds of one micro-batch on the device with most
    peak_bytes: int | None = None  # of the device that needs most
    fits: bool = True  # within the memory limit
    reason: str = ""  # why there are no cuts, or why they do not fit


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The step with every time drawn from its spread in the profile."""

    median_s: float  # p50
    p95_s: float
    num_draws: int  # 0: no time of the profile has a spread
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A plan and the reasons for it."""

    model: str
    setting: Setting
    step_s: float
    samples_per_s: float
    peak_bytes: int
    bottleneck: Bottleneck
    options: tuple[Option, ...]
    sensitivities: Sensitivities
    rules: tuple[RuleOutcome, ...]  # this plan first
    spread: Spread
    notes: tuple[str, ...] = ()
