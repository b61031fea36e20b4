"""Prefixes of a partition, many at once, and what a search must be able to do with them.

`SimulatedPrefixes` serves any schedule: the stages of the prefix are simulated exactly, the others are a pure delay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from gplan.graph.down_sets import Floats, Ints
from gplan.partition.batch_simulation import simulate_window, steps_s, window_times
from gplan.partition.bounds import StepBounds
from gplan.partition.lagrangian import WeightedBounds
from gplan.partition.memory_feasibility import DeviceMemoryLimits
from gplan.partition.pareto import undominated

_ROUNDING = 1e-12  # share by which sums may be off
_LABEL_ROUNDING = 1e-13  # share of the step by which a label may be worse and still be dominant


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


CandidateBounds: TypeAlias = StepBounds | WeightedBounds
"""Bounds of the plans that take a candidate."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedPrefixes:
    """Prefixes bounded by weights and by their goal; those that do not fit are bounded by infinity."""

    weighted: WeightedBounds
    limits: DeviceMemoryLimits | None

    def root(self) -> PartialPlans:
        """The empty prefix; labels hold what its stages add to the mean."""
        return empty_prefix(self.weighted, [0.0])

    def grow(self, parents: PartialPlans, candidates: Ints) -> PartialPlans:
        """Each parent with one more stage."""
        weighted, stage, paths = self.weighted, parents.stage, np.column_stack([parents.paths, candidates])
        end = weighted.candidates[stage].end[candidates]
        added = parents.labels[:, 0] + weighted.values[stage][candidates]
        bounds = np.maximum(parents.bounds_s, (added + weighted.rest_s[stage + 1][end]) * (1 - _ROUNDING))
        there = np.arange(len(paths)) if self.limits is None else np.flatnonzero(self.limits.may_fit(paths))
        least = np.full(len(paths), np.inf)
        least[there] = weighted.goal.least(paths[there])
        return PartialPlans(paths=paths, last_end=end, labels=added[:, None], bounds_s=np.maximum(bounds, least))

    def undominated(self, nodes: PartialPlans) -> PartialPlans:
        """Without the prefixes that another one matches in all that the rest needs to know, where that is little."""
        labels = None if self.limits is not None else self.weighted.goal.labels(nodes.paths)
        if labels is None:
            return nodes
        return best_by_end(nodes, labels)

    def values(self, paths: Ints) -> Floats:
        """[N]: what is to be small."""
        return self.weighted.goal.values(paths)


Relaxation: TypeAlias = SimulatedPrefixes | WeightedPrefixes
"""How prefixes are grown and bounded, and which of them make others pointless."""


def best_by_end(nodes: PartialPlans, labels: Floats) -> PartialPlans:
    """The nodes whose labels, [N, D], no other one matches or beats in every number,
    for each position where they end."""
    slack_s = _LABEL_ROUNDING * float(nodes.bounds_s.max(initial=0.0))
    kept = []
    for end in np.unique(nodes.last_end):
        there = np.flatnonzero(nodes.last_end == end)
        kept.append(there[undominated(labels[there], slack=slack_s)])
    return nodes.take(np.concatenate(kept)) if kept else nodes
