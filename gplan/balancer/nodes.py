"""Prefixes of a partition, many at once, and what a search must be able to do with them.

`SimulatedPrefixes` serves any schedule: the stages of the prefix are simulated exactly, the others are a pure delay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from gplan.balancer.batch import simulate_window, window_times
from gplan.balancer.bounds import StepBounds
from gplan.costs import Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """N prefixes of s stages each, with a lower bound of every plan that begins with them."""

    ends: Ints  # [N, s]: the layer after the last of each stage
    labels: Floats  # [N, D]: what a relaxation keeps of a prefix
    bounds_s: Floats  # [N]

    def __len__(self) -> int:
        return len(self.bounds_s)

    @property
    def stage(self) -> int:
        """The index of the stage that comes next."""
        return int(self.ends.shape[1])

    @property
    def last_end(self) -> Ints:
        """[N]: the layer at which the next stage begins."""
        return self.ends[:, -1] if self.stage else np.zeros(len(self), dtype=np.int64)

    def take(self, index: Ints) -> Nodes:
        """Some of the nodes."""
        return Nodes(ends=self.ends[index], labels=self.labels[index], bounds_s=self.bounds_s[index])

    @classmethod
    def joined(cls, parts: list[Nodes]) -> Nodes:
        """All nodes of all parts."""
        return cls(
            ends=np.concatenate([x.ends for x in parts]),
            labels=np.concatenate([x.labels for x in parts]),
            bounds_s=np.concatenate([x.bounds_s for x in parts]),
        )


class Relaxation(Protocol):
    """What the search asks of a bound on prefixes."""

    @property
    def solver(self) -> str:
        """Its name in a proof."""
        ...

    def root(self) -> Nodes:
        """The empty prefix."""
        ...

    def grow(self, parents: Nodes, ends: Ints) -> Nodes:
        """Each parent with one more stage, up to that layer."""
        ...

    def undominated(self, nodes: Nodes) -> Nodes:
        """The nodes without those that cannot lead to anything better than another one does."""
        ...


def empty_prefix(bounds: StepBounds, labels: list[float]) -> Nodes:
    """The one prefix of no stages."""
    return Nodes(ends=np.zeros((1, 0), dtype=np.int64), labels=np.array([labels]), bounds_s=np.array([bounds.whole_s]))


@dataclass(frozen=True)
class SimulatedPrefixes:
    """Prefixes simulated with the stages after them as a pure delay; with all K stages this is the step itself."""

    bounds: StepBounds
    solver: str = "branch-and-bound"

    def root(self) -> Nodes:
        """The empty prefix."""
        return empty_prefix(self.bounds, [])

    def grow(self, parents: Nodes, ends: Ints) -> Nodes:
        """Each parent with one more stage, simulated; O(M s) array operations."""
        problem, all_ends = self.bounds.problem, np.column_stack([parents.ends, ends])
        delay = self.bounds.delay_after(parents.stage, ends)
        window = window_times(problem, all_ends)
        steps = simulate_window(problem, window, first_stage=0, delay=delay)
        longest_s = np.maximum(steps.optimizer_s, parents.bounds_s)
        return Nodes(ends=all_ends, labels=parents.labels, bounds_s=longest_s)

    def undominated(self, nodes: Nodes) -> Nodes:
        """All of them: a prefix acts on the rest by as many numbers as there are micro-batches."""
        return nodes
