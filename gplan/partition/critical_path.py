"""The critical path of a step as a sum of stage times: how many forwards, transfers and so on of each stage it has.

An action comes after the one before it on its device, and after the arrival of what it needs; transfers of a link come
after each other. The length of a path is linear in the times of the stages, and the step is at least the longest of all paths;
so the counts of any path give a lower bound of the step that is linear in the partition (`lagrangian.py`). The step is
longer than all paths where devices with tied weights wait for each other before their updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gplan.core import StageSeconds
from gplan.graph.down_sets import Floats
from gplan.partition.batch_simulation import window_program
from gplan.partition.problem import Problem
from gplan.simulation.kernel import NONE, ActionProgram, PathEntry, action_times, critical_entries

TIMES = (
    "forward_s", "backward_s", "recompute_s", "input_gradient_s", "weight_gradient_s", "activation_s", "gradient_s",
    "optimizer_s",
)  # fmt: skip
"""The times of a stage, in the order in which arrays hold them."""


@dataclass(frozen=True)
class Paths:
    """The paths through the step of a problem's schedule, as counts [S, times] of each stage's times."""

    problem: Problem

    def longest(self, times: Floats) -> Floats:
        """The counts of the longest path with these times of the stages, [S, times]; O(S M)."""
        flat, program = times.ravel(), self.program
        durations, hops = (self._durations @ flat).tolist(), (self._hops @ flat).tolist()
        seconds = list(action_times(program, durations, hops, zero=0.0))
        ends = zip(program.last, self._updates, strict=True)
        device = int(np.argmax([seconds[last][1] + float(update @ flat) for last, update in ends]))
        return self._counts(device, critical_entries(program, seconds, program.last[device]))

    def by_device(self) -> Floats:
        """[K, S, times]: for each device a path through all of its actions, and on to its updates."""
        return np.array([self._walked(device, self._device_first) for device in range(self.problem.num_devices)])

    def by_device_and_back(self) -> Floats:
        """[K, S, times]: for each device a path through all of its actions, and on to the end of the first device."""
        found = []
        for device in range(self.problem.num_devices):
            on_device = {self.program.last[device]}

            def earlier(entry: int, on_device: set[int] = on_device) -> tuple[int, bool]:
                if entry not in on_device:
                    need = self.program.entries[entry].need
                    return (need, True) if need != NONE else (self.program.previous[entry], False)
                on_device.add(self.program.previous[entry])
                return self._device_first(entry)

            found.append(self._walked(0, earlier))
        return np.array(found)

    @cached_property
    def program(self) -> ActionProgram:
        """The actions of the problem's schedule."""
        return window_program(self.problem, 0, self.problem.num_stages - 1)

    def _device_first(self, entry: int) -> tuple[int, bool]:
        """The entry before on the device, or, of a device's first, the one that it waits for, by transfer."""
        previous, need = self.program.previous[entry], self.program.entries[entry].need
        return (previous, False) if previous != NONE else (need, need != NONE)

    def _walked(self, device: int, earlier: Callable[[int], tuple[int, bool]]) -> Floats:
        """The counts of the path that ends with a device's updates; `earlier` goes back from one entry to another."""
        chain, entry, sends = list[PathEntry](), self.program.last[device], False
        while entry != NONE:
            chain.append(PathEntry(entry, runs=True, sends=sends))
            entry, sends = earlier(entry)
        return self._counts(device, chain)

    def _counts(self, device: int, path: Iterable[PathEntry]) -> Floats:
        """[S, times]: what a path takes."""
        chain, entries = list(path), self.program.entries
        counts: Floats = self._updates[device].copy()
        taken = np.array([entries[x.entry].duration for x in chain if x.runs], dtype=np.int64)
        sent = np.array([entries[x.entry].hop for x in chain if x.sends], dtype=np.int64)
        for indices, each in ((taken, self._durations), (sent, self._hops)):
            counts += np.bincount(indices, minlength=len(each)) @ each
        return counts.reshape(self.problem.num_stages, len(TIMES))

    @cached_property
    def _units(self) -> list[StageSeconds[Floats]]:
        """The times of each stage as unit vectors [S times]: what is computed from them are counts."""
        units = np.eye(self.problem.num_stages * len(TIMES)).reshape(self.problem.num_stages, len(TIMES), -1)
        return [StageSeconds(**dict(zip(TIMES, rows, strict=True))) for rows in units]

    @cached_property
    def _durations(self) -> Floats:
        """[kinds, S times]: the times that an action of each kind takes."""
        return np.array(self.program.durations_s(self._units))

    @cached_property
    def _hops(self) -> Floats:
        """[kinds, S times]: the times that its transfer takes."""
        return np.array(self.program.hops_s(self._units)).reshape(len(self.program.hops), -1)

    @cached_property
    def _updates(self) -> list[Floats]:
        """[S times] of each device: its updates."""
        stages_by_device = self.problem.stages_by_device
        return [np.sum([self._units[stage].optimizer_s for stage in own], axis=0) for own in stages_by_device]
