"""What fits the memory of devices: bytes alone are looked at, no times. With one stage per device nothing is searched.

Candidates are the stages that need no more than a limit by themselves, and a dynamic program over (stage, position)
joins them. Of what a stage holds at some moment, weights, optimizer state, gradients and stashes grow with its layers,
so they tell of most stages that they are too large before their memory is worked out. Stages that hold the same numbers
of everything at the same moments share their candidates: all of GPipe's; under 1F1B those that are as far from the end,
in pipelines of any length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from gplan.cost.memory_moments import ALIKE_FROM_THE_END, Moments
from gplan.cost.stage_table import DeviceBoundaries, StageTable
from gplan.graph.down_sets import Bools, Floats, Ints
from gplan.partition.candidates import (
    INFINITY,
    Candidates,
    StagePairs,
    TooManyCandidates,
    best_path,
    pairs_within,
    suffix_tables,
)
from gplan.partition.problem import Problem, moments_of, peak_moments_of
from gplan.partition.recompute import PeakMoments
from gplan.partition.validation import ConstraintCheck

_MOST_CHUNKS = 4  # of pairs of positions that are looked at for one stage
_RISES = (1.0, 1.02, 1.05, 1.1, 1.2, 1.4, 2.0, 4.0, 10.0, 100.0, INFINITY)


@dataclass(frozen=True, slots=True, kw_only=True)
class FittingStages(StagePairs):
    """The stages that need no more than a limit and what they need, [E]."""

    peak_bytes: Floats

    def take(self, chosen: Bools) -> FittingStages:
        """Some of them."""
        return FittingStages(first=self.first[chosen], end=self.end[chosen], peak_bytes=self.peak_bytes[chosen])


def any_fits(problem: Problem) -> bool:
    """Whether any partition fits the memory of its devices and satisfies the constraints; exact.

    Raises TooManyCandidates where the stages that might fit are too many to be looked at.
    """
    limits = (problem.memory_of(stage) for stage in range(problem.num_stages))
    return _least_within(problem, [INFINITY if x is None else float(x) for x in limits]) is not None


def least_peak(problem: Problem) -> tuple[int, list[int]]:
    """The smallest largest peak of all partitions, in bytes, and where the stages of one end that has it; exact.

    Raises TooManyCandidates as above, ValueError where the constraints leave no partition.
    """
    demands = {x.key: x for x in (_demand(problem, stage) for stage in range(problem.num_stages))}
    even = min(float(_least_held(problem, x)[-1]) for x in demands.values()) / problem.num_stages
    for times in _RISES:
        found = _least_within(problem, [max(1.0, even) * times] * problem.num_stages)
        if found is not None:
            return found
    raise ValueError(
        f"no partition of {problem.num_layers} layers into {problem.num_stages} stages satisfies the constraints"
    )


def numbers_of_stages_that_fit(problem: Problem) -> Iterator[bool]:
    """For K = 1, 2, ..., L whether any partition into K stages fits the memory of devices that are all alike; exact.

    Whatever the constraints. Raises TooManyCandidates as above.
    """
    limit, lasting = problem.memory_of(0) or 0, lasting_bytes(problem)
    every = _Within(replace(problem, num_stages=1), float(limit))
    at_end = np.arange(problem.costs.num_positions) == problem.costs.num_positions - 1
    reached = at_end
    for num_stages in range(1, problem.num_layers + 1):
        requested = replace(problem, num_stages=num_stages)
        if problem.schedule in ALIKE_FROM_THE_END:
            reached = _extended(reached, every.candidates(requested, 0))
        elif num_stages * limit >= lasting:
            reached = at_end
            for stage in reversed(range(num_stages)):
                reached = _extended(reached, every.candidates(requested, stage))
        yield bool(reached[0])


def lasting_bytes(problem: Problem) -> int:
    """What all devices together hold at least when the optimizers run: weights,
    gradients and state of the whole model."""
    layers = bytes_before(problem.costs)
    rounded = problem.num_layers  # the state of a stage is a whole number of bytes
    return int(layers["weight"][-1] + layers["gradient"][-1] + layers["optimizer"][-1]) - rounded


def bytes_before(costs: StageTable) -> dict[str, Floats]:
    """[P] by part: bytes of the layers before each position;
    of each part a stage has at least the difference of two."""
    return {
        "weight": costs.sums.held("weight_bytes", *costs.prefixes).astype(np.float64),
        "gradient": costs.sums.held("gradient_bytes", *costs.prefixes).astype(np.float64),
        "optimizer": costs.trained_share(*costs.prefixes) * costs.profile.step.state_bytes,
        "stash": costs.sums.stash.astype(np.float64),
        "recomputed_stash": costs.sums.stash.astype(np.float64),
    }


def _extended(reached: Bools, some: FittingStages) -> Bools:
    """[P]: where a candidate begins that ends where the rest is known to fit."""
    starts = np.zeros_like(reached)
    starts[some.first[reached[some.end]]] = True
    return starts


def _least_within(problem: Problem, limits: Sequence[float]) -> tuple[int, list[int]] | None:
    """As `least_peak`, of the partitions whose stages are within some limits, [K]; None where none is."""
    most, constraints = max(limits), ConstraintCheck(problem)
    every, candidates = _Within(problem, most), []
    for stage, limit in enumerate(limits):
        some = every.candidates(problem, stage)
        if problem.constraints or limit < most:
            some = some.take((some.peak_bytes <= limit) & constraints.allows(stage, some.first, some.end))
        if not len(some.first):
            return None
        candidates.append(some)
    peaks = [some.peak_bytes for some in candidates]
    tables = suffix_tables(candidates, peaks, np.maximum, num_positions=problem.costs.num_positions)
    if tables[0, 1, 0] == INFINITY:
        return None
    path = best_path(candidates, tables, peaks, np.maximum)
    return int(tables[0, 1, 0]), [int(some.end[i]) for some, i in zip(candidates, path, strict=True)]


class _Within:
    """Makes the candidates within a limit, once for all stages that hold the same numbers of everything."""

    def __init__(self, problem: Problem, most_bytes: float) -> None:
        self._problem, self._most_bytes = problem, most_bytes
        self._known: dict[tuple[object, DeviceBoundaries], FittingStages] = {}

    def candidates(self, requested: Problem, stage: int) -> FittingStages:
        """Those of a stage of the same problem, with any number of stages."""
        demand, boundaries = _demand(requested, stage), requested.boundaries(stage)
        key = demand.key, boundaries
        if key not in self._known:
            self._known[key] = self._made(demand, boundaries)
        return self._known[key]

    def _made(self, peak_moments: PeakMoments, boundaries: DeviceBoundaries) -> FittingStages:
        costs, parts = self._problem.costs, list[FittingStages]()
        longest = costs.num_layers - self._problem.num_stages + 1
        every, held = np.arange(costs.num_positions), _least_held(self._problem, peak_moments)
        most = np.full(len(every), self._most_bytes + 1)  # for what is rounded
        pairs = pairs_within(costs.downsets, held, every, every, most=most, low=-INFINITY, high=INFINITY)
        for first, end in pairs:
            if len(parts) == _MOST_CHUNKS:
                raise TooManyCandidates
            short = costs.downsets.num_before[end] - costs.downsets.num_before[first] <= longest
            first, end = first[short], end[short]
            if self._problem.recompute == "selected":
                peaks = self._problem.selector.least_peak_bytes(first, end, peak_moments)
            else:
                peaks = peak_moments.keeping.peak([costs.part_rows(first, end, boundaries)])
            some = FittingStages(first=first, end=end, peak_bytes=peaks.astype(np.float64))
            parts.append(some.take(some.peak_bytes <= self._most_bytes))
        fields = ("first", "end", "peak_bytes")
        return FittingStages(**{x: np.concatenate([getattr(some, x) for some in parts]) for x in fields})


def _demand(problem: Problem, stage: int) -> PeakMoments:
    """The moments of a stage, or of another one that holds the same."""
    if problem.schedule in ALIKE_FROM_THE_END:
        num_stages = 1 + min(problem.num_stages - stage, problem.num_microbatches + 1)
        problem, stage = replace(problem, num_stages=num_stages), 1  # of the first, nothing is before layer 0
    return peak_moments_of(problem, stage)


def _least_held(problem: Problem, peak_moments: PeakMoments) -> Floats:
    """[P]: bytes of all layers before each position at one moment,
    such that a stage has at least the difference of two."""
    layers = bytes_before(problem.costs)
    always = layers["weight"] + layers["optimizer"]
    may_stash = problem.recompute != "selected"  # else a layer's stash may be given up
    moments = peak_moments.selecting
    num_stashes = may_stash * (moments.of("stash") - moments.of("pending") + moments.of("recomputed_stash"))
    pairs = zip(num_stashes, moments.of("gradient"), strict=True)
    held = [always + stashes * layers["stash"] + gradients * layers["gradient"] for stashes, gradients in pairs]
    return max(held, key=lambda sums: float(sums[-1]))


@dataclass(frozen=True)
class DeviceMemoryLimits:
    """Whether devices that hold several stages fit partitions, their prefixes and single candidates."""

    problem: Problem
    candidates: Sequence[Candidates]

    def may_fit(self, paths: Ints) -> Bools:
        """[N]: whether the device of the last of these stages, [N, s], may hold all its own; with all stages: whether it can."""
        stage = paths.shape[1] - 1
        limit = self.problem.memory_of(stage)
        if limit is None:
            return np.ones(len(paths), dtype=np.bool_)
        return np.asarray(self.least_bytes(self.problem.devices[stage], paths) <= limit)

    def fits(self, paths: Ints) -> Bools:
        """[N]: whether partitions, [N, S], fit the memory of every device."""
        fits = np.ones(len(paths), dtype=np.bool_)
        for device, stages in enumerate(self.problem.stages_by_device):
            limit = self.problem.memory_of(stages[0])
            if limit is not None:
                fits &= self.least_bytes(device, paths) <= limit
        return fits

    def fitting(self, stage: int) -> Bools:
        """[E]: whether the device of a stage may hold each candidate, beside the least of its other stages."""
        limit, device = self.problem.memory_of(stage), self.problem.devices[stage]
        if limit is None:
            return np.ones(len(self.candidates[stage]), dtype=np.bool_)
        stages = self.problem.stages_by_device[device]
        parts = [self.all_parts(k) if k == stage else self._least_parts[k] for k in stages]
        return np.asarray(self._moments(device).peak(parts) <= limit)

    def least_bytes(self, device: int, paths: Ints) -> Ints:
        """[N]: the peak of a device, with the least of each of its stages that is to come."""
        parts = [
            self.parts(k, paths[:, k]) if k < paths.shape[1] else self._least_parts[k]
            for k in self.problem.stages_by_device[device]
        ]
        return np.broadcast_to(self._moments(device).peak(parts), len(paths))

    def fullest(self, device: int, parts: Floats) -> Floats:
        """[S, parts]: what of each part a device holds when it holds most, given those of all stages, [S, parts]."""
        counts, stages = self._moments(device).counts, list(self.problem.stages_by_device[device])
        held = (counts * parts[stages]).sum(axis=(1, 2))
        weights = np.zeros(parts.shape)
        weights[stages] = counts[int(held.argmax())]
        return weights

    def parts(self, stage: int, index: Ints) -> Ints:
        """[parts, N]: what the memory of some candidates is made of."""
        some = self.candidates[stage]
        return self.problem.costs.part_rows(some.first[index], some.end[index], self.problem.boundaries(stage))

    def all_parts(self, stage: int) -> Ints:
        """[parts, E] of all candidates of a stage."""
        return self.parts(stage, np.arange(len(self.candidates[stage])))

    def _moments(self, device: int) -> Moments:
        return moments_of(self.problem, *self.problem.stages_by_device[device])

    @cached_property
    def _least_parts(self) -> list[Ints]:
        """[parts, 1] for each stage: the least of each part."""
        return [self.all_parts(stage).min(axis=1, keepdims=True) for stage in range(len(self.candidates))]
