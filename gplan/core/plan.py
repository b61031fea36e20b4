"""Plans and runs: the stages, their predicted costs and memory, and what was measured when a plan was executed."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Generic, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from gplan.core.checks import (
    Granularity,
    LossReduction,
    Objective,
    Origin,
    RecomputeMode,
    Sharding,
    check_amounts,
    check_names,
    check_not_negative,
    check_positive,
    check_share,
)
from gplan.core.host_load import EqualSpeed, HostLoad, interruption_text
from gplan.core.machine import Device, Link, MachineDevice
from gplan.core.precision import Precision
from gplan.core.profile import ModelId
from gplan.core.schedule import Timeline
from gplan.core.stage_cost import StageCost
from gplan.core.units import ends_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """A layer that must be on a given stage."""

    layer: str
    stage: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """Constraints on a partition, by layer names; ranges of layers are in the profile's order."""

    cut_after: tuple[str, ...] = ()  # a cut lies between all layers up to this one and the rest
    keep_together: tuple[tuple[str, str], ...] = ()  # (first, last): all layers from first to last are on one stage
    pins: tuple[Pin, ...] = ()
    profile_order: bool = False  # stages are ranges of the profile's order, also where the model has branches

    def __bool__(self) -> bool:
        """Whether there is any constraint."""
        return bool(self.cut_after or self.keep_together or self.pins or self.profile_order)


Bytes = TypeVar("Bytes", int, NDArray[np.int64])


class StageBytes(
    msgspec.Struct,
    Generic[Bytes],
    frozen=True,
    kw_only=True,
    rename={"recomputed_stash": "again", "recomputing_workspace": "again_workspace"},  # their names in plan files
):
    """The parts of the memory of one stage (int), or of many candidates (arrays); `gplan/cost/memory_moments.py` says when each is held."""

    weight: Bytes
    gradient: Bytes
    optimizer: Bytes
    stash: Bytes  # per micro-batch whose activations are all kept
    checkpoint: Bytes  # per micro-batch that will be recomputed
    recomputed_stash: Bytes  # of the micro-batch being recomputed; on all stages but the last with its checkpoint
    pending: Bytes  # per micro-batch between the halves of its backward, above the stash
    sent: Bytes  # per gradient that was sent and is not freed yet
    received_activation: Bytes  # per activation from when its receive is posted until the end of its backward
    received_gradient: Bytes  # the same of a gradient
    forward_workspace: Bytes
    backward_workspace: Bytes
    recompute_workspace: Bytes  # of a forward that keeps only its checkpoint
    recomputing_workspace: Bytes  # of a whole backward that recomputes
    optimizer_workspace: Bytes
    input_workspace: Bytes  # of the first half of a split backward
    weight_workspace: Bytes  # of the second half


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Memory of one stage by category, at the moment of its device's peak."""

    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int  # kept from forward to backward, including outputs not yet sent
    workspace_bytes: int  # temporary
    buffer_bytes: int  # receive buffers: of posted receives, and inputs kept until the backward
    moment: str  # the action of the device at which its peak occurs

    def __post_init__(self) -> None:
        check_amounts(self)

    @property
    def peak_bytes(self) -> int:
        """The sum of all categories."""
        return (
            self.weight_bytes + self.gradient_bytes + self.optimizer_bytes + self.activation_bytes
            + self.workspace_bytes + self.buffer_bytes
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Layers [first_layer, end_layer), counted in the plan's order, on one device.

    Several stages on one device are its chunks. The plan's order is the profile's, except where a model with branches
    runs faster or fits better in another one.
    """

    index: int
    first_layer: int
    end_layer: int
    layer_names: tuple[str, ...]
    layer_forward_s: tuple[float, ...]
    layer_backward_s: tuple[float, ...]  # the last layer's times include the loss
    cost: StageCost
    memory: StageMemory
    recompute_layers: tuple[str, ...] = ()  # with recompute "selected": the layers to recompute, one by one
    machine_device: MachineDevice | None = None  # None: no machine was given
    device: int | None = None  # None: the stage's number, as each device has one stage
    parts: StageBytes[int] | None = None  # that its memory is made of; None: not known
    gathered_bytes: int = 0  # of parameters that replicas divide: those that one gathers at a time

    def __post_init__(self) -> None:
        check_names("layer_names", *self.layer_names)
        unknown = [name for name in self.recompute_layers if name not in self.layer_names]
        if unknown:
            raise ValueError(f"stage {self.index} recomputes {unknown[0]}, which is not one of its layers")
        if not 0 <= self.first_layer < self.end_layer:
            raise ValueError(
                f"stage {self.index} has layers [{self.first_layer}, {self.end_layer}); expected at least one"
            )
        for name in ("layer_names", "layer_forward_s", "layer_backward_s"):
            found, expected = len(getattr(self, name)), self.num_layers
            if found != expected:
                raise ValueError(f"stage {self.index} has {found} {name}; expected {expected}")

    @property
    def layer_times_s(self) -> tuple[tuple[float, float], ...]:
        """The forward and the backward of each layer for one micro-batch."""
        return tuple(zip(self.layer_forward_s, self.layer_backward_s, strict=True))

    @property
    def num_layers(self) -> int:
        """Number of layers of the stage."""
        return self.end_layer - self.first_layer

    @property
    def layers_text(self) -> str:
        """The first and the last layer, and how many there are."""
        return ends_text(self.layer_names)

    @property
    def on_device(self) -> int:
        """The number of its device."""
        return self.index if self.device is None else self.device


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """How good the plan is: no plan has an objective below `lower_bound_s`."""

    solver: str  # "dp", "branch-and-bound", "milp/HiGHS" and so on
    objective_s: float
    lower_bound_s: float
    solve_s: float

    def __post_init__(self) -> None:
        check_amounts(self)

    @property
    def gap(self) -> float:
        """The share by which the objective may exceed the optimum; 0 proves the plan optimal."""
        return max(0.0, 1.0 - self.lower_bound_s / self.objective_s) if self.objective_s else 0.0

    @property
    def is_proven(self) -> bool:
        """Whether the plan is optimal up to rounding."""
        return self.gap < 1e-9


_ROUNDING = 1e-6  # share of a step


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBound:
    """What the step would be if the host that enqueues the device's work took less time."""

    device_step_s: float  # if it took none
    graphs_step_s: float  # if each pass of a stage were one CUDA graph

    def __post_init__(self) -> None:
        check_positive(self, "device_step_s", "graphs_step_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predicted step time and bubble."""

    step_s: float
    bubble: float
    ideal_bubble: float  # with equal stages and free transfers; (K-1)/(M+K-1) for GPipe and 1F1B
    host_bound: HostBound | None = None  # None: the profile has one clock

    def __post_init__(self) -> None:
        check_positive(self, "step_s")
        check_share(self, "bubble", "ideal_bubble")

    def gives(self, step_s: float) -> bool:
        """Whether a step equals the predicted one, up to rounding."""
        return abs(step_s - self.step_s) <= _ROUNDING * self.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another way to run the model, in one line, to compare a plan with."""

    label: str = ""  # its name, if it has one
    num_stages: int
    num_replicas: int
    num_microbatches: int
    microbatch_size: int
    schedule: str
    recompute: RecomputeMode
    sharding: Sharding = "none"
    cuts: tuple[int, ...]
    step_s: float
    peak_bytes: int  # of the device with the largest peak
    bubble: float

    def __post_init__(self) -> None:
        check_positive(self, "num_stages", "num_replicas", "num_microbatches", "microbatch_size", "step_s")
        check_not_negative(self, "peak_bytes")
        check_share(self, "bubble")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A partition into stages, how to run it, and what it should cost."""

    model: ModelId
    device: Device
    link: Link
    stages: tuple[Stage, ...]
    schedule: str
    num_microbatches: int
    microbatch_size: int
    recompute: RecomputeMode
    minimize: Objective
    memory_limit_bytes: int | None  # of each device; None: no limit
    loss_reduction: LossReduction
    prediction: Prediction
    proof: Proof
    notes: tuple[str, ...] = ()  # shown with the plan, such as interpolated costs
    granularity: Granularity = "layer"
    constraints: Constraints = field(default_factory=Constraints)  # satisfied by the partition
    shares_host: bool = False  # whether its times are those of devices that compute side by side on one host
    num_replicas: int = 1  # data-parallel pipelines, each with its share of the batch
    sharding: Sharding = "none"  # of each stage over the replicas
    frontier: tuple[Alternative, ...] = ()  # of a search: by rising step time and falling peak memory, with this plan
    rivals: tuple[Alternative, ...] = ()  # to compare it with, such as the best one without the user's constraints
    precision: Precision = field(default_factory=Precision)  # that it trains in, as profiled
    reserved_bytes: tuple[int, ...] = ()  # that the allocator of each device reserves at most; (): not known
    context_bytes: int = 0  # of a device that the driver and NCCL take beside it
    receives_ahead: int = 0  # passes before the one that needs it that the engine it is for posts a receive

    def __post_init__(self) -> None:
        check_positive(self, "num_microbatches", "microbatch_size", "num_replicas")
        check_not_negative(self, "receives_ahead")
        if [stage.index for stage in self.stages] != list(range(len(self.stages))) or not self.stages:
            raise ValueError(f"stages are numbered {[stage.index for stage in self.stages]}; expected 0, 1, 2, ...")
        if self.stages[0].first_layer != 0:
            raise ValueError(f"stage 0 begins at layer {self.stages[0].first_layer}; expected layer 0")
        devices = sorted(set(self.devices))
        if devices != list(range(len(devices))):
            raise ValueError(f"stages are on devices {devices}; expected 0, 1, 2, ...")
        for left, right in pairwise(self.stages):
            if left.end_layer != right.first_layer:
                raise ValueError(
                    f"stage {right.index} begins at layer {right.first_layer}; stage {left.index} ends at "
                    f"{left.end_layer} and every layer belongs to exactly one stage"
                )

    @property
    def stage_costs(self) -> tuple[StageCost, ...]:
        """The cost of each stage."""
        return tuple(stage.cost for stage in self.stages)

    @property
    def num_stages(self) -> int:
        """Number of stages on all devices together."""
        return len(self.stages)

    @property
    def devices(self) -> tuple[int, ...]:
        """The device of each stage, in one replica."""
        return tuple(x.on_device for x in self.stages)

    @property
    def num_devices(self) -> int:
        """K, in one replica."""
        return 1 + max(self.devices)

    def limit_of(self, stage: Stage) -> int | None:
        """Bytes that the stage's device may use: the limit, or what its device of a machine has; None: no limit."""
        limits = [self.memory_limit_bytes, stage.machine_device.memory_bytes if stage.machine_device else None]
        return min((x for x in limits if x is not None), default=None)

    @property
    def device_total_bytes(self) -> int:
        """What the fullest device needs: all that its allocator reserves, and what is taken beside it."""
        return max(self.reserved_bytes or self.device_peak_bytes) + self.context_bytes

    @property
    def is_for_machine(self) -> bool:
        """Whether its devices are those of a machine, not all like the profiled one."""
        return any(stage.machine_device for stage in self.stages)

    @property
    def num_ranks(self) -> int:
        """The devices of all replicas."""
        return self.num_replicas * self.num_devices

    @property
    def has_chunks(self) -> bool:
        """Whether any device has several stages."""
        return self.num_stages > self.num_devices

    @property
    def is_sharded(self) -> bool:
        """Whether replicas divide their stages among them."""
        return self.sharding != "none" and self.num_replicas > 1

    @property
    def batch_size(self) -> int:
        """Samples per step, of all replicas together."""
        return self.num_replicas * self.num_microbatches * self.microbatch_size

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Names of all layers in the plan's order."""
        return tuple(name for stage in self.stages for name in stage.layer_names)

    def stages_of(self, device: int) -> tuple[Stage, ...]:
        """The stages of a device, by rising number."""
        return tuple(stage for stage, found in zip(self.stages, self.devices, strict=True) if found == device)

    @property
    def device_peak_bytes(self) -> tuple[int, ...]:
        """Peak memory of each device, the sum over its stages."""
        return tuple(sum(x.memory.peak_bytes for x in self.stages_of(device)) for device in range(self.num_devices))

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the device with the largest peak."""
        return max(self.device_peak_bytes)

    @property
    def cuts(self) -> tuple[int, ...]:
        """The first layer of each stage but stage 0."""
        return tuple(stage.first_layer for stage in self.stages[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeBatch:
    """Loss and gradients of the mini-batch in one piece, if the check ran micro-batch by micro-batch."""

    loss: float
    max_relative_error: float  # how far the gradients micro-batch by micro-batch are from those in one piece
    worst_parameter: str
    reason: str  # follows "because of"


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientCheck:
    """Gradients and loss of the first step compared with the plain model."""

    max_relative_error: float  # over parameters: largest difference / largest gradient of that parameter
    worst_parameter: str
    loss: float
    plain_loss: float
    num_parameters: int  # tensors compared
    tolerance: float
    whole_batch: WholeBatch | None  # None: the plain model ran the mini-batch in one piece

    @property
    def passed(self) -> bool:
        """Whether the largest relative error, of gradients and of the loss, is within the tolerance."""
        loss_error = abs(self.loss - self.plain_loss) / max(abs(self.plain_loss), 1e-12)
        return max(self.max_relative_error, loss_error) <= self.tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What was measured when a plan was executed."""

    plan: Plan
    engine: str  # "torch" (one process per device) or "virtual" (one process, devices on the clock only)
    losses: tuple[float, ...]  # per step; empty: unknown
    step_s: tuple[float, ...]  # per step, warm-up steps included
    num_warmup_steps: int
    num_disturbed: int  # steps after the warm-up in which the processes lost their cores
    num_growing: int = 0  # further steps after the warm-up, left out because a process's memory still grew in them
    num_counted: int  # steps used in the means: the undisturbed ones, or all if those are too few
    timeline: Timeline  # measured: means over the counted steps
    step_timelines: tuple[Timeline, ...] = ()  # one per counted step, if requested
    peak_bytes: tuple[int, ...]  # per device, by the allocator; 0: not measured
    check: GradientCheck | None
    created: str  # ISO 8601, UTC
    versions: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()  # shown with the run
    origin: Origin = "measured"
    host_load: HostLoad | None = None  # of the host during all steps, also the warm-up; None: not measured
    equal_speed: EqualSpeed | None = None  # None: the profile was not there, or the speed not read in it or in the run
    reserved_bytes: tuple[int, ...] = ()  # per device, the peak of what a GPU's allocator reserved; (): not known

    def __post_init__(self) -> None:
        num_peaks, num_devices = len(self.peak_bytes), self.plan.num_devices
        if num_peaks != num_devices:
            raise ValueError(f"peak_bytes has {num_peaks} entries; the plan has {num_devices} devices")
        if self.reserved_bytes and (len(self.reserved_bytes) != num_devices or min(self.reserved_bytes) < 0):
            raise ValueError(
                f"reserved_bytes is {self.reserved_bytes}; expected 0 or more for each of {num_devices} devices, or nothing"
            )
        check_not_negative(self, "num_warmup_steps", "num_disturbed", "num_growing")
        check_positive(self, "num_counted")
        ran, planned = (
            (self.timeline.num_devices, self.timeline.num_microbatches),
            (num_devices, self.plan.num_microbatches),
        )
        if ran != planned:
            raise ValueError(f"the timeline has {ran} devices and micro-batches; the plan has {planned}")
        if self.num_counted > self.num_settled:
            raise ValueError(
                f"num_counted is {self.num_counted}; there are only {len(self.step_s)} steps, with "
                f"{self.num_warmup_steps + self.num_growing} of warm-up and growing memory"
            )
        if self.step_timelines and len(self.step_timelines) != self.num_counted:
            raise ValueError(f"there are {len(self.step_timelines)} step_timelines; num_counted is {self.num_counted}")
        if self.losses and len(self.losses) != len(self.step_s):
            raise ValueError(f"there are {len(self.losses)} losses and {len(self.step_s)} step times; expected as many")

    @property
    def num_settled(self) -> int:
        """The steps after the warm-up in which no process's memory grew."""
        return len(self.step_s) - self.num_warmup_steps - self.num_growing

    @property
    def steps_text(self) -> str:
        """The steps behind the measured times, in words."""
        growing = f", {self.num_growing} left out as memory still grew" if self.num_growing else ""
        of_all = f"{self.num_counted} of {len(self.step_s)} steps: {self.num_warmup_steps} to warm up{growing}"
        if not self.num_disturbed:
            return of_all
        if self.num_counted == self.num_settled:
            return f"{of_all}, {self.num_disturbed} of the {self.num_counted} interrupted"
        return f"{of_all}, {self.num_disturbed} left out as {interruption_text(self.host_load)}"

    @property
    def all_notes(self) -> tuple[str, ...]:
        """The notes of its plan and its own."""
        return (*self.plan.notes, *self.notes)
