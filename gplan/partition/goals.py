"""What is to be small: the step, the largest load of a device, or the largest peak of its memory.

Each is a `Goal`: the largest of many sums over the stages, or at least that. `cap` gives the stages that a partition with a
value up to some limit can have.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from gplan.graph.down_sets import Floats, Ints
from gplan.partition.batch_simulation import simulate_window, steps_s, window_times
from gplan.partition.bounds import StepBounds, busy_within, least_step_s
from gplan.partition.candidates import CandidateLimit, Candidates
from gplan.partition.critical_path import TIMES, Paths
from gplan.partition.memory_feasibility import DeviceMemoryLimits, lasting_bytes
from gplan.partition.minimax import least_load_s
from gplan.partition.problem import Problem

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from Python 3.11


@dataclass(frozen=True)
class Goal(ABC):
    """What is to be small: the largest of sums over the stages, or at least that."""

    problem: Problem
    candidates: Sequence[Candidates]

    @classmethod
    @abstractmethod
    def least_of(cls, problem: Problem) -> float:
        """A lower bound of all values."""

    @classmethod
    @abstractmethod
    def cap(cls, problem: Problem, limit: float) -> CandidateLimit:
        """Which stages a partition with a value up to this can have."""

    def among(self, candidates: Sequence[Candidates]) -> Self:
        """The same among other candidates."""
        return replace(self, candidates=candidates)

    @abstractmethod
    def figures(self, stage: int) -> Floats:
        """[figures, E]: what the sums are made of, of each candidate of a stage."""

    @abstractmethod
    def first_weights(self) -> list[Floats]:
        """[S, figures] each: means of some sums, to begin with."""

    @abstractmethod
    def heaviest(self, figures: Floats) -> Floats:
        """[S, figures]: the sum that is the largest with these figures of the stages, [S, figures]."""

    @abstractmethod
    def values(self, paths: Ints) -> Floats:
        """[N]: the largest sums of N partitions, [N, S]."""

    @abstractmethod
    def of_prefixes(self, paths: Ints) -> Floats:
        """[N]: a lower bound of every partition that begins with these stages, [N, s]; its value, if they are all."""

    def through(self) -> list[Floats] | None:
        """[E] for each stage: the least value of every partition that takes this candidate; None where that is not known."""
        return None


@dataclass(frozen=True)
class StepGoal(Goal):
    """The simulated step: at least the longest path. A prefix is simulated with the stages after it as a pure delay."""

    @classmethod
    def least_of(cls, problem: Problem) -> float:
        """Of closed forms."""
        return least_step_s(problem)

    @classmethod
    def cap(cls, problem: Problem, limit: float) -> CandidateLimit:
        """Stages that compute all micro-batches in that time."""
        return busy_within(problem, limit)

    def figures(self, stage: int) -> Floats:
        """[times, E]: those of `critical_path.TIMES` that the step has."""
        known = self.candidates[stage].times.present
        return np.array([known[TIMES[i]] for i in self._used])

    def first_weights(self) -> list[Floats]:
        """All devices alike, each busy from its first action to its last: to its own end,
        or that of the first device."""
        means = [self._paths.by_device().mean(axis=0), self._paths.by_device_and_back().mean(axis=0)]
        return [mean[:, self._used] for mean in means]

    def heaviest(self, figures: Floats) -> Floats:
        """[S, times]: the longest path."""
        times = np.zeros((len(figures), len(TIMES)))
        times[:, self._used] = figures
        return self._paths.longest(times)[:, self._used]

    def values(self, paths: Ints) -> Floats:
        """[N]: the steps."""
        return steps_s(self.problem, self.candidates, paths)

    def of_prefixes(self, paths: Ints) -> Floats:
        """Of simulated prefixes."""
        times = window_times(self.candidates, paths)
        delay = self._bounds.delay_after(paths.shape[1] - 1, paths[:, -1])
        return simulate_window(self.problem, times, first_stage=0, delay=delay).optimizer_s

    def through(self) -> list[Floats]:
        """[E] for each stage: what its own order takes with pure delays around it, or that of others does at least."""
        return self._bounds.through_s

    @cached_property
    def _paths(self) -> Paths:
        return Paths(self.problem)

    @cached_property
    def _bounds(self) -> StepBounds:
        return StepBounds(self.problem, self.candidates)

    @cached_property
    def _used(self) -> list[int]:
        known = {*self.candidates[0].times.present} - ({"recompute_s"} if self.problem.recompute == "never" else set())
        return [i for i, name in enumerate(TIMES) if name in known]


@dataclass(frozen=True)
class LoadGoal(Goal):
    """The largest load of a device, the sum over its stages."""

    @classmethod
    def least_of(cls, problem: Problem) -> float:
        """An even share of the work, or the longest layer."""
        return least_load_s(problem)

    @classmethod
    def cap(cls, problem: Problem, limit: float) -> CandidateLimit:
        """Stages with a load up to the limit."""
        return CandidateLimit.of_load(limit, num_stages=problem.num_stages)

    def figures(self, stage: int) -> Floats:
        """[1, E]: the loads."""
        return self.candidates[stage].load_s[None]

    def first_weights(self) -> list[Floats]:
        """All devices alike."""
        return [np.full((self.problem.num_stages, 1), 1 / self.problem.num_devices)]

    def heaviest(self, figures: Floats) -> Floats:
        """[S, 1]: the device that does most."""
        loads = [figures[list(stages)].sum() for stages in self.problem.stages_by_device]
        is_there: Floats = np.equal(self.problem.devices, int(np.argmax(loads))).astype(np.float64)
        return is_there[:, None]

    def values(self, paths: Ints) -> Floats:
        """[N]: the largest loads."""
        return np.asarray(self._loads(paths).max(axis=1))

    def of_prefixes(self, paths: Ints) -> Floats:
        """With the least of each stage that is to come."""
        so_far, least = paths.shape[1], [float(some.load_s.min()) for some in self.candidates]
        more = [sum(least[k] for k in stages if k >= so_far) for stages in self.problem.stages_by_device]
        return np.asarray((self._loads(paths) + np.array(more)).max(axis=1))

    def _loads(self, paths: Ints) -> Floats:
        """[N, K]: what each device does so far."""
        loads = np.zeros((len(paths), self.problem.num_devices))
        for stage in range(paths.shape[1]):
            loads[:, self.problem.devices[stage]] += self.candidates[stage].load_s[paths[:, stage]]
        return loads


@dataclass(frozen=True)
class PeakGoal(Goal):
    """The largest peak of a device, in bytes: a sum over its stages at one of its moments."""

    @classmethod
    def least_of(cls, problem: Problem) -> float:
        """An even share of what lasts."""
        return lasting_bytes(problem) / problem.num_devices

    @classmethod
    def cap(cls, problem: Problem, limit: float) -> CandidateLimit:
        """Every stage."""
        return CandidateLimit.of_load(float("inf"), num_stages=problem.num_stages)

    def figures(self, stage: int) -> Floats:
        """[parts, E]: what the memory of each candidate is made of."""
        return self._limits.all_parts(stage).astype(np.float64)

    def first_weights(self) -> list[Floats]:
        """All devices alike, each at the moment at which it holds most where stages need what they do on average."""
        means = np.array([self.figures(stage).mean(axis=1) for stage in range(self.problem.num_stages)])
        found = [self._limits.fullest(device, means) for device in range(self.problem.num_devices)]
        return [np.mean(found, axis=0)]

    def heaviest(self, figures: Floats) -> Floats:
        """[S, parts]: the moment at which most is held, and the device that does."""
        found = [self._limits.fullest(device, figures) for device in range(self.problem.num_devices)]
        return max(found, key=lambda weights: float((weights * figures).sum()))

    def values(self, paths: Ints) -> Floats:
        """[N]: the largest peaks."""
        peaks = [self._limits.least_bytes(device, paths) for device in range(self.problem.num_devices)]
        largest: Floats = np.maximum.reduce(peaks).astype(np.float64)
        return largest

    def of_prefixes(self, paths: Ints) -> Floats:
        """With the least of each stage that is to come."""
        return self.values(paths)

    @cached_property
    def _limits(self) -> DeviceMemoryLimits:
        return DeviceMemoryLimits(self.problem, self.candidates)
