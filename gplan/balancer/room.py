"""The room on devices that hold several stages: what partitions, prefixes and single stages leave of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gplan.balancer.arcs import Arcs
from gplan.balancer.held import counts_of, part_bytes, peaks_of
from gplan.balancer.problem import Problem
from gplan.downsets import Bools, Floats, Ints


@dataclass(frozen=True)
class Room:
    """What devices hold, at least, of partitions and their prefixes that are paths of some arcs."""

    problem: Problem
    arcs: Sequence[Arcs]

    def may_fit(self, paths: Ints) -> Bools:
        """[N]: whether the device of the last of these stages, [N, s], may have room for all its own; of all, has."""
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
        """[E]: whether the device of a stage may have room for each arc, beside the least of its other stages."""
        limit, device = self.problem.memory_of(stage), self.problem.devices[stage]
        if limit is None:
            return np.ones(len(self.arcs[stage]), dtype=np.bool_)
        stages = self.problem.stages_by_device[device]
        parts = [self.all_parts(k) if k == stage else self._least_parts[k] for k in stages]
        return np.asarray(peaks_of(counts_of(self.problem, device), parts) <= limit)

    def least_bytes(self, device: int, paths: Ints) -> Ints:
        """[N]: the peak of a device, with the least of each of its stages that is to come."""
        parts = [
            self.parts(k, paths[:, k]) if k < paths.shape[1] else self._least_parts[k]
            for k in self.problem.stages_by_device[device]
        ]
        return np.broadcast_to(peaks_of(counts_of(self.problem, device), parts), len(paths))

    def fullest(self, device: int, parts: Floats) -> Floats:
        """[S, parts]: what of each part a device holds when it holds most, given those of all stages, [S, parts]."""
        counts, stages = counts_of(self.problem, device), list(self.problem.stages_by_device[device])
        held = (counts * parts[stages]).sum(axis=(1, 2))
        weights = np.zeros(parts.shape)
        weights[stages] = counts[int(held.argmax())]
        return weights

    def parts(self, stage: int, index: Ints) -> Ints:
        """[parts, N]: what the memory of some arcs is made of."""
        some = self.arcs[stage]
        return part_bytes(self.problem.costs, some.first[index], some.end[index], self.problem.apart(stage))

    def all_parts(self, stage: int) -> Ints:
        """[parts, E] of all arcs of a stage."""
        return self.parts(stage, np.arange(len(self.arcs[stage])))

    @cached_property
    def _least_parts(self) -> list[Ints]:
        """[parts, 1] for each stage: the least of each part."""
        return [self.all_parts(stage).min(axis=1, keepdims=True) for stage in range(len(self.arcs))]
