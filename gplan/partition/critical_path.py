"""The critical path of a step as a sum of stage times: how many forwards, transfers and so on of each stage it has.

An action comes after the one before it on its device, and after the arrival of what it needs; transfers of a link come
after each other. The length of a path is linear in the times of the stages, and the step is at least the longest of all paths;
so the counts of any path give a lower bound of the step that is linear in the partition (`lagrangian.py`). The step is
longer than all paths where devices with tied weights wait for each other before their updates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from gplan.core import ActionKind, StageSeconds
from gplan.graph.down_sets import Floats
from gplan.partition.batch_simulation import window_program
from gplan.partition.problem import Problem
from gplan.simulation.kernel import NONE, ActionProgram, PathEntry, action_times, critical_entries

TIMES = (
    "forward_s", "backward_s", "recompute_s", "input_gradient_s", "weight_gradient_s", "activation_s", "gradient_s",
    "optimizer_s",
)  # fmt: skip
"""The times of a stage, in the order in which arrays hold them."""

_LONG = 20_000  # actions of a step: of more, paths are those of a shorter step, made longer
_FEW = 4  # times K micro-batches: the shorter step


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
        return self._counts(device, critical_entries(program, seconds, program.last[device]), flat)

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

    def _counts(self, device: int, path: Iterable[PathEntry], times: Floats | None = None) -> Floats:
        """[S, times]: what a path takes that ends with a device's updates; `times`, [S times], if the path is for them."""
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


@dataclass(frozen=True)
class RepeatedPaths(Paths):
    """The paths through a step with more micro-batches than the problem's, each made from a path of the problem's step.

    An order of (interleaved) 1F1B is some forwards, then forwards and backwards in turn, then backwards; `num_more`
    micro-batches more only lengthen the middle part (for interleaved 1F1B a multiple of the devices):

        M          F0 F1 | B0 F2 B1 F3 | B2 B3
        M + 2      F0 F1 | B0 F2 B1 F3   B2 F4 B3 F5 | B4 B5

    So a path may wait in the middle part of a device until the same action of the micro-batch `num_more` later, and go on
    as before with later micro-batches: the actions before are not behind any device's middle part, those after not
    before it. It is then longer by what the device computes for so many micro-batches. Of the devices where a path can
    wait, the one that computes most is taken.
    """

    num_more: int

    def _counts(self, device: int, path: Iterable[PathEntry], times: Floats | None = None) -> Floats:
        chain = list(path)
        waits = self._devices_to_wait_at(chain)
        each = self._each_microbatch
        if times is None:  # the path is through all actions of a device
            taken = Counter(self.program.entries[x.entry].device for x in chain if x.runs)
            waits &= {max(taken, key=taken.__getitem__)}
        if not waits:
            return np.zeros((self.problem.num_stages, len(TIMES)))  # no path of the longer step is known
        longest = max(waits, key=lambda x: 0.0 if times is None else float(each[x] @ times))
        counts: Floats = super()._counts(device, chain) + self.num_more * each[longest].reshape(-1, len(TIMES))
        return counts

    def _devices_to_wait_at(self, chain: Sequence[PathEntry]) -> set[int]:
        """Devices in whose middle part a path, last entry first, may wait."""
        middle, devices = self._middle, [x.device for x in self.program.entries]
        first_early, last_late = len(chain), -1
        while (
            first_early and self._place[chain[first_early - 1].entry] < middle[devices[chain[first_early - 1].entry]][1]
        ):
            first_early -= 1
        while last_late + 1 < len(chain) and (
            self._place[chain[last_late + 1].entry] >= middle[devices[chain[last_late + 1].entry]][0]
        ):
            last_late += 1
        return {devices[x.entry] for x in chain[first_early : last_late + 1] if x.runs}

    @cached_property
    def _place(self) -> list[int]:
        """The place of each entry in the order of its device."""
        count, found = [0] * self.problem.num_devices, list[int]()
        for entry in self.program.entries:
            found.append(count[entry.device])
            count[entry.device] += 1
        return found

    @cached_property
    def _middle(self) -> list[tuple[int, int]]:
        """Of each device the place of its first backward, and that after its last forward."""
        first, end = [len(self._place)] * self.problem.num_devices, [0] * self.problem.num_devices
        for place, entry, action in zip(self._place, self.program.entries, self.program.actions, strict=True):
            if action.kind is ActionKind.FORWARD:
                end[entry.device] = place + 1
            else:
                first[entry.device] = min(first[entry.device], place)
        return list(zip(first, end, strict=True))

    @cached_property
    def _each_microbatch(self) -> Floats:
        """[K, S times]: what each device computes for a micro-batch."""
        found = np.zeros((self.problem.num_devices, self._durations.shape[1]))
        for entry in self.program.entries:
            found[entry.device] += self._durations[entry.duration]
        return found / self.problem.num_microbatches


def paths_of(problem: Problem) -> Paths:
    """The paths through a problem's step, made from a step with fewer micro-batches where there are many."""
    name, num_devices = problem.schedule.partition(":")[0], problem.num_devices
    few = _FEW * num_devices
    num_more = problem.num_microbatches - few
    is_long = 2 * problem.num_stages * problem.num_microbatches > _LONG and num_more > few
    if not is_long or name not in ("1f1b", "interleaved-1f1b") or problem.recompute not in ("never", "always"):
        return Paths(problem)
    return RepeatedPaths(replace(problem, costs=problem.costs.with_microbatches(few)), num_more)
