"""What is to be balanced, and what a solver hands back.

A pipeline of K devices has `num_stages` stages, K times as many as the schedule has chunks; `devices` says where each
of them is. Neighbours on one device hand each other nothing over a link.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

import numpy as np

from gplan.core import ActionKind, Constraints, Link, MachineDevice, Objective, RecomputeMode, Schedule, is_recomputed
from gplan.core.units import percent_text
from gplan.cost.memory_moments import Moments, peak_moments
from gplan.cost.stage_table import DeviceBoundaries, StagePlace, StageTable
from gplan.graph.down_sets import Floats, Ints
from gplan.partition.recompute import PeakMoments, RecomputeSelector
from gplan.schedules.custom import is_custom_order
from gplan.schedules.registry import make_schedule, num_devices_of, schedule_info, stage_devices
from gplan.schedules.request import OptionNames

ROUNDING = 1e-12
"""The share within which plans count as equal."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What to balance: the costs, the stages, how the pipeline runs, its devices,
    the objective and the user's constraints."""

    costs: StageTable
    num_stages: int
    schedule: str
    recompute: RecomputeMode
    minimize: Objective
    memory_bytes: int | None = None  # of every device; None: only the limits of `machine_devices`
    machine_devices: tuple[MachineDevice, ...] = ()  # the device of each stage; none: all are as the profiled one
    links: tuple[Link, ...] = ()  # from each stage but the last to the next; none: all are the profile's
    constraints: Constraints = field(default_factory=Constraints)
    options: OptionNames = field(default_factory=OptionNames)

    @property
    def num_replicas(self) -> int:
        """R."""
        return self.costs.num_replicas

    @property
    def num_microbatches(self) -> int:
        """M."""
        return self.costs.num_microbatches

    @property
    def num_devices(self) -> int:
        """K; each holds as many stages as the schedule has chunks."""
        return num_devices_of(self.schedule, self.num_stages)

    @property
    def made_schedule(self) -> Schedule:
        """The orders of the devices."""
        return make_schedule(self.schedule, num_devices=self.num_devices, num_microbatches=self.num_microbatches)

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """The device of each stage; that of a schedule by rule is the same for all M."""
        if is_custom_order(self.schedule):
            return self.made_schedule.devices
        return stage_devices(self.schedule, num_devices=self.num_devices)

    @property
    def has_chunks(self) -> bool:
        """Whether any device holds several stages."""
        return self.num_stages > self.num_devices

    @cached_property
    def stages_by_device(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each device, rising."""
        stages: list[list[int]] = [[] for _ in range(self.num_devices)]
        for stage, device in enumerate(self.devices):
            stages[device].append(stage)
        return tuple(map(tuple, stages))

    @property
    def speeds(self) -> list[float]:
        """[K]: how much faster each device is than the profiled one."""
        return [self.speed(stages[0]) for stages in self.stages_by_device]

    @cached_property
    def split_shares(self) -> tuple[float, ...]:
        """Of each stage the share of the micro-batches whose backward is in halves; on stage 0 the second is all of it."""
        if not schedule_info(self.schedule).splits_backward:
            return (0.0,) * self.num_stages
        if not is_custom_order(self.schedule):
            return (0.0, *(1.0,) * (self.num_stages - 1))
        orders = self.made_schedule.orders
        counts = Counter(x.stage for order in orders for x in order if x.kind is ActionKind.WEIGHT_GRADIENT)
        return (0.0, *(counts[stage] / self.num_microbatches for stage in range(1, self.num_stages)))

    @cached_property
    def splits_backward(self) -> bool:
        """Whether any stage but the first splits a backward."""
        return any(self.split_shares)

    @property
    def num_layers(self) -> int:
        """L."""
        return self.costs.num_layers

    def boundaries(self, stage: int) -> DeviceBoundaries:
        """Whether the stages before and after this one are on other devices, and all its backwards in halves."""
        here, last = self.devices[stage], self.num_stages - 1
        return DeviceBoundaries(
            before=stage == 0 or self.devices[stage - 1] != here,
            after=stage == last or self.devices[stage + 1] != here,
            in_halves=self.split_shares[stage] == 1.0,
        )

    def speed(self, stage: int) -> float:
        """How much faster the stage's device is than the profiled one."""
        return self.machine_devices[stage].speed if self.machine_devices else 1.0

    def memory_of(self, stage: int) -> int | None:
        """The memory of the stage's device; None: no limit."""
        limits = [self.memory_bytes, self.machine_devices[stage].memory_bytes if self.machine_devices else None]
        return min((x for x in limits if x is not None), default=None)

    @property
    def has_memory_limit(self) -> bool:
        """Whether any device has one."""
        return any(self.memory_of(stage) is not None for stage in range(self.num_stages))

    def link_after(self, stage: int) -> Link:
        """The link from the stage to the next one."""
        return self.links[stage] if self.links and stage < self.num_stages - 1 else self.costs.profile.link

    def activation_s(self, stage: int) -> Floats:
        """[P]: seconds to send the activations over the cut after the stage, by its position; 0 before stage 0."""
        return self.costs.transfers_s(self.link_after(stage))[0] * self._is_sent(stage)

    def gradient_s(self, stage: int) -> Floats:
        """[P]: seconds to send the gradients back over the cut after the stage."""
        return self.costs.transfers_s(self.link_after(stage))[1] * self._is_sent(stage)

    @cached_property
    def tied_links(self) -> tuple[Link, ...]:
        """The links that the gradients of tied weights may cross to be summed; the slowest counts.

        None where nothing tied is trained, or where one device has the first stage and the last, which mostly are those
        that hold the same weight. Ties between other stages then cost nothing here; elsewhere they cost what they would
        between two devices, even if one device has both stages.
        """
        if self.devices[0] == self.devices[-1] or not any(x.gradient_bytes for x in self.costs.profile.shared_weights):
            return ()
        return tuple(dict.fromkeys(self.links)) or (self.costs.profile.link,)

    @cached_property
    def stage_places(self) -> tuple[StagePlace, ...]:
        """Where each stage runs."""
        return tuple(
            StagePlace(
                link=self.link_after(stage),
                boundaries=self.boundaries(stage),
                speed=self.speed(stage),
                tied_links=self.tied_links,
            )
            for stage in range(self.num_stages)
        )

    def peak_bytes(self, stage: int, first: Ints, end: Ints) -> Ints:
        """[E]: the most memory that stages hold at least, without what their device holds for its other stages."""
        if self.recompute == "selected":
            return self.selector.least_peak_bytes(first, end, peak_moments_of(self, stage))
        return moments_of(self, stage).peak([self.costs.part_rows(first, end, self.boundaries(stage))])

    @cached_property
    def selector(self) -> RecomputeSelector:
        """Which layers to recompute, where they are selected."""
        return RecomputeSelector(self.costs)

    def _is_sent(self, stage: int) -> bool:
        """Whether anything crosses from the stage to the next one by a link."""
        return stage >= 0 and self.boundaries(stage).after


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """What a solver hands back: the layers of each stage, and below what no plan's objective lies."""

    stages: tuple[tuple[int, ...], ...]
    lower_bound_s: float
    solver: str
    notes: tuple[str, ...] = ()

    @property
    def cuts(self) -> tuple[int, ...]:
        """Where the layers, laid out in the order of the stages, are cut."""
        return tuple(accumulate(len(stage) for stage in self.stages[:-1]))


def without_memory(problem: Problem) -> Problem:
    """The same problem on devices whose memory has no limit."""
    devices = tuple(replace(device, memory_bytes=None) for device in problem.machine_devices)
    return replace(problem, memory_bytes=None, machine_devices=devices)


def num_recomputed(problem: Problem) -> int:
    """The micro-batches whose backward recomputes: all layers of its stage, or those selected."""
    num = problem.num_microbatches
    return sum(is_recomputed(m, num_microbatches=num, recompute=problem.recompute) for m in range(num))


def nothing_recomputed(problem: Problem) -> Problem:
    """The same problem without selecting layers to recompute; others as they are."""
    return replace(problem, recompute="never") if problem.recompute == "selected" else problem


def with_valid_bound(problem: Problem, solution: Solution) -> Solution:
    """The solution with a bound that holds although some choices of layers to recompute may not be the best."""
    inflation = problem.selector.inflation if problem.recompute == "selected" else 1.0
    if inflation == 1.0:
        return solution
    error = f"to within {percent_text(inflation - 1)} of a backward; the bound allows for it"
    note = f"layers to recompute were selected {error if math.isfinite(inflation) else 'roughly, so nothing is proven'}"
    return replace(solution, lower_bound_s=solution.lower_bound_s / inflation, notes=(*solution.notes, note))


def peak_moments_of(problem: Problem, stage: int) -> PeakMoments:
    """The moments at which the memory of a stage may peak that recomputes nothing, or selected layers."""
    return PeakMoments(keeping=moments_of(nothing_recomputed(problem), stage), selecting=moments_of(problem, stage))


def device_peaks(problem: Problem, first: Ints, end: Ints, *, devices: Iterable[int] | None = None) -> Ints:
    """[K, N]: the peaks of the devices of N partitions, to the byte, given where their stages begin and end, [S, N].

    With `devices` only theirs, in that order.
    """
    peaks = []
    for device in range(problem.num_devices) if devices is None else devices:
        stages = problem.stages_by_device[device]
        parts = [problem.costs.part_rows(first[k], end[k], problem.boundaries(k)) for k in stages]
        peaks.append(moments_of(problem, *stages).peak(parts))
    return np.array(peaks)


def moments_of(problem: Problem, *stages: int) -> Moments:
    """The moments at which the memory of a device may peak that holds these stages; of one stage those by itself."""
    return peak_moments(
        problem.schedule,
        num_devices=problem.num_devices,
        num_microbatches=problem.num_microbatches,
        stages=stages,
        recompute=problem.recompute,
        receives_ahead=problem.costs.transfers.receives_ahead,
    )


def compute_sums_s(problem: Problem) -> Floats:
    """[P]: seconds of forward and backward, at least, of one micro-batch of all layers before each position, on the
    profiled device."""
    return problem.costs.sums.seconds(
        "least_compute" if problem.splits_backward else "compute", *problem.costs.prefixes
    )


def layers_compute_s(problem: Problem) -> Floats:
    """[L]: seconds of forward and backward, at least, of each layer, on the profiled device."""
    return problem.costs.sums.layer_s("least_compute" if problem.splits_backward else "compute")


def device_sums(problem: Problem, by_stage: Sequence[float]) -> tuple[float, ...]:
    """[K]: the sum over the stages of each device."""
    return tuple(sum(by_stage[stage] for stage in stages) for stages in problem.stages_by_device)
