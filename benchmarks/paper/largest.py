"""Table 1: the largest model that fits so many accelerators, and what the paper's own sizes take,
by gplan's memory model.

A model fits if any partition of it is within the memory of every accelerator; memory rises with depth and width, so the
largest is found by halving. Parameters are counted as the paper counts them, 12 bytes each, or as
gplan's engine holds them, 16: weight, gradient, mean square and momentum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import gplan
from gplan.core import Constraints, Profile, RecomputeMode
from gplan.partition.balance import problem_of
from gplan.partition.memory_feasibility import any_fits
from gplan.partition.problem import Problem
from paper.profiles import counted_as_in_the_paper, without_limit

ENGINE_BYTES_PER_PARAMETER = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a model must fit: accelerators, a mini-batch, how parameters are counted, whether it is pipelined."""

    num_devices: int
    batch_size: int
    num_microbatches: int
    bytes_per_parameter: int
    is_pipelined: bool = True  # with recompute; else one accelerator, one batch, nothing recomputed

    def __post_init__(self) -> None:
        if not self.is_pipelined and (self.num_devices, self.num_microbatches) != (1, 1):
            raise ValueError(f"{self} is not pipelined; expected one device and one micro-batch")

    @property
    def microbatch_size(self) -> int:
        """Samples."""
        return self.batch_size // self.num_microbatches

    @property
    def recompute(self) -> RecomputeMode:
        """Of every micro-batch, or of none."""
        return "always" if self.is_pipelined else "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What a model takes of the memory of all its accelerators together, in bytes."""

    parameter_bytes: int
    activation_bytes: int  # with buffers and workspaces, at the moment at which each holds most
    buffer_bytes: int  # of it, what is received for all micro-batches: activations and gradients
    checkpoint_bytes: int  # of it at most, outputs and, on the last one, the loss's tensors kept for all micro-batches
    largest_bytes: int  # of one accelerator
    does_fit: bool


def fits(profile: Profile, setting: Setting) -> bool:
    """Whether any partition of the profile's layers fits its device.

    Exact, by the planner's own memory model (gplan/partition/memory_feasibility.py).
    """
    return any_fits(_problem(profile, setting))


def _problem(profile: Profile, setting: Setting) -> Problem:
    counted = _counted(profile, setting)
    return problem_of(
        counted,
        num_devices=setting.num_devices,
        num_microbatches=setting.num_microbatches,
        microbatch_size=setting.microbatch_size,
        schedule="gpipe",
        recompute=setting.recompute,
        memory_bytes=counted.device.memory_bytes,
        minimize="max-stage",
        constraints=Constraints(),
        num_replicas=1,
    )


def _counted(profile: Profile, setting: Setting) -> Profile:
    if setting.bytes_per_parameter == ENGINE_BYTES_PER_PARAMETER:
        return profile
    return counted_as_in_the_paper(profile, setting.bytes_per_parameter)


def memory_taken(profile: Profile, setting: Setting) -> Taken:
    """What the model takes under the partition with the smallest largest stage: of those that fit, if any does."""
    does_fit = fits(profile, setting)
    plan = gplan.balance(
        _counted(profile if does_fit else without_limit(profile), setting),
        num_devices=setting.num_devices,
        num_microbatches=setting.num_microbatches,
        microbatch_size=setting.microbatch_size,
        schedule="gpipe",
        recompute=setting.recompute,
        minimize="max-stage",
    )
    held, parts = [stage.memory for stage in plan.stages], [stage.parts for stage in plan.stages if stage.parts]
    kept = sum(x.checkpoint for x in parts) if setting.is_pipelined else 0
    return Taken(
        parameter_bytes=setting.bytes_per_parameter * profile.num_parameters,
        activation_bytes=sum(x.activation_bytes + x.workspace_bytes + x.buffer_bytes for x in held),
        buffer_bytes=sum(x.buffer_bytes for x in held),
        checkpoint_bytes=setting.num_microbatches * kept,
        largest_bytes=plan.peak_bytes,
        does_fit=does_fit,
    )


def largest_fitting(fits: Callable[[int], bool], *, step: int, at_most: int) -> int:
    """The largest multiple of `step`, up to `at_most`, that fits; 0 where none does.
    What fits stays so when it shrinks.

    >>> largest_fitting(lambda x: x <= 37, step=5, at_most=100)
    35
    """
    low, high = 0, at_most // step + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * step) else (low, middle)
    return low * step


def deepest(profile_of: Callable[[int], Profile], setting: Setting, *, at_most: int) -> int:
    """The most layers with which a model fits; 0 where not even one for each accelerator does."""
    fewest = setting.num_devices
    found = largest_fitting(lambda x: fits(profile_of(max(x, fewest)), setting), step=1, at_most=at_most)
    return max(found, fewest) if found else 0


def widest(profile_of: Callable[[int], Profile], setting: Setting, *, step: int, at_most: int) -> int:
    """The largest width, a multiple of `step`, with which a model fits; 0 where none does."""
    return largest_fitting(lambda width: fits(profile_of(width), setting), step=step, at_most=at_most)
