"""Prefixes of a partition, many at once, and what a search must be able to do with them.

`SimulatedPrefixes` serves any schedule: the stages of the prefix are simulated exactly, the others are a pure delay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from gplan.graph.down_sets import Floats, Ints
from gplan.partition.batch_simulation import simulate_window, steps_s, window_times
from gplan.partition.bounds import StepBounds
from gplan.partition.candidates import Candidates
from gplan.partition.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialPlans:
    """N prefixes of s stages each, with a lower bound of every plan that begins with them."""

    paths: Ints  # [N, s]: the candidate that each stage takes
    last_end: Ints  # [N]: the position at which the next stage begins
    labels: Floats  # [N, D]: what a relaxation keeps of a prefix
    bounds_s: Floats  # [N]

    def __len__(self) -> int:
        return len(self.bounds_s)

    @property
    def stage(self) -> int:
        """The index of the stage that comes next."""
        return int(self.paths.shape[1])

    def take(self, index: Ints) -> PartialPlans:
        """Some of the nodes."""
        return PartialPlans(
            paths=self.paths[index],
            last_end=self.last_end[index],
            labels=self.labels[index],
            bounds_s=self.bounds_s[index],
        )

    @classmethod
    def joined(cls, parts: list[PartialPlans]) -> PartialPlans:
        """All nodes of all parts."""
        return cls(
            paths=np.concatenate([x.paths for x in parts]),
            last_end=np.concatenate([x.last_end for x in parts]),
            labels=np.concatenate([x.labels for x in parts]),
            bounds_s=np.concatenate([x.bounds_s for x in parts]),
        )


class CandidateBounds(Protocol):
    """Bounds of the plans that take a candidate."""

    @property
    def problem(self) -> Problem:
        """What is balanced."""
        ...

    @property
    def candidates(self) -> Sequence[Candidates]:
        """The candidates of each stage."""
        ...

    @property
    def through_s(self) -> list[Floats]:
        """[E] for each stage: of every plan that takes this candidate."""
        ...

    @property
    def whole_s(self) -> float:
        """Of every plan."""
        ...


class Relaxation(Protocol):
    """What the search asks of a bound on prefixes."""

    def root(self) -> PartialPlans:
        """The empty prefix."""
        ...

    def grow(self, parents: PartialPlans, candidates: Ints) -> PartialPlans:
        """Each parent with one more stage, that candidate of the next one's."""
        ...

    def undominated(self, nodes: PartialPlans) -> PartialPlans:
        """The nodes without those that cannot lead to anything better than another one does."""
        ...

    def values(self, paths: Ints) -> Floats:
        """[N]: what is to be small, of N partitions."""
        ...


def empty_prefix(bounds: CandidateBounds, labels: list[float]) -> PartialPlans:
    """The one prefix of no stages."""
    return PartialPlans(
        paths=np.zeros((1, 0), dtype=np.int64),
        last_end=np.zeros(1, dtype=np.int64),
        labels=np.array([labels]),
        bounds_s=np.array([bounds.whole_s]),
    )


@dataclass(frozen=True)
class SimulatedPrefixes:
    """Prefixes simulated with the stages after them as a pure delay; with all K stages this is the step itself."""

    bounds: StepBounds

    def root(self) -> PartialPlans:
        """The empty prefix."""
        return empty_prefix(self.bounds, [])

    def grow(self, parents: PartialPlans, candidates: Ints) -> PartialPlans:
        """Each parent with one more stage, simulated; O(M s) array operations."""
        bounds, paths = self.bounds, np.column_stack([parents.paths, candidates])
        steps = simulate_window(
            bounds.problem,
            window_times(bounds.candidates, paths),
            first_stage=0,
            delay=bounds.delay_after(parents.stage, candidates),
        )
        return PartialPlans(
            paths=paths,
            last_end=bounds.candidates[parents.stage].end[candidates],
            labels=parents.labels,
            bounds_s=np.maximum(steps.optimizer_s, parents.bounds_s),
        )

    def undominated(self, nodes: PartialPlans) -> PartialPlans:
        """All of them: a prefix acts on the rest by as many numbers as there are micro-batches."""
        return nodes

    def values(self, paths: Ints) -> Floats:
        """[N]: the steps."""
        return steps_s(self.bounds.problem, self.bounds.candidates, paths)
