"""What is asked of the planner: one value for the command line, Python users and everything that plans again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from gplan.core.machine import Machine
from gplan.core.plan import Constraints
from gplan.schedules.registry import num_stages_of

Auto: TypeAlias = Literal["auto"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSetting:
    """A pipeline as trainers and schedules see it, whatever its layers."""

    schedule: str
    num_devices: int  # K, of one replica
    num_microbatches: int
    recompute: str = "never"
    num_replicas: int = 1
    sharding: str = "none"

    @property
    def num_stages(self) -> int:
        """On all devices of a replica together."""
        return num_stages_of(self.schedule, self.num_devices)


def any_setting(_setting: PipelineSetting) -> bool:
    """What the planner may choose where nothing is ruled out."""
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionNames:
    """The options of the command that plans, for texts; "": it has no such option."""

    num_devices: str = "--k"
    schedule: str = "--schedule"
    granularity: str = "--granularity"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What is asked; of each dial a value, or "auto" for the planner to choose.

    All "auto" dials are searched together, for one batch and memory. With `total_devices` replicas are searched too;
    without it, devices on "auto" maximise samples per second and device.
    """

    num_devices: int | Auto | None = None  # K, of one pipeline; None: a custom order's, or "auto" with `total_devices`
    total_devices: int | None = None  # of all replicas together; None: those of `num_replicas` pipelines
    num_replicas: int = 1  # pipelines that each train a part of the batch, where `total_devices` is not given
    sharding: str = "none"  # what the replicas of a stage divide: "none", "optimizer", "weights", "auto"
    num_microbatches: int | Auto | None = None  # a step and replica; None: a custom order's, else four a device
    microbatch_size: int | None = None  # None: the largest profiled size; in a search any
    batch_size: int | None = None  # samples a step, of all replicas
    schedule: str = "gpipe"  # a name of `gplan.schedules.registry`, or "auto"
    recompute: str = "never"  # "never", "always", "except-last", "selected", "auto"
    memory_bytes: int | None = None  # of each device; None: that of the profile's device, or of the machine's
    minimize: str = "step-time"  # or "max-stage"
    constraints: Constraints = field(default_factory=Constraints)
    machine: Machine | None = None  # with `total_devices`, hosts that are alike; None: all devices as profiled
    allows: Callable[[PipelineSetting], bool] = any_setting  # which settings a search may choose: a receiver's rules
    solver: str = "auto"  # "auto", "dp", "milp", "cbc"
    time_limit_s: float | None = None  # None: 10 s; 18 s for a search, 20 s on a machine, 60 s for a MILP
    options: OptionNames = field(default_factory=OptionNames)

    @property
    def is_open(self) -> bool:
        """Whether any dial is to be searched."""
        dials = (self.num_devices, self.num_microbatches, self.schedule, self.recompute, self.sharding)
        return self.total_devices is not None or "auto" in dials
