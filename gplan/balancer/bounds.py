"""What a step takes at least, whatever the rest of the partition: the bounds that the search prunes with.

Take one candidate as stage s, and let all other stages be pure delays, through which any number of micro-batches may
pass at once; at least the shortest delays that any partition can have there. The candidate's own order, simulated alone
against them, bounds every plan that has it. For 1F1B this contains
    T >= M t_s + sum_{i<s} (t_i + c_i)                        the stage is busy from its first to its last action
    T >= sum t + sum c + (M-1) t_s - (w_s - 1) min(f_s, b_s)  w_s = K - s warm-up forwards
and what warm-up, steady state and drain make of them together. A plan takes as long as its worst stage, so
smallest-maximum programs over (stage, position) extend the bound to every prefix, every suffix and the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gplan.balancer.arcs import Arcs, Cap, compute_sums_s, on_paths
from gplan.balancer.batch import Delay, simulate_window
from gplan.balancer.price import Problem
from gplan.balancer.tables import prefix_tables, suffix_tables
from gplan.downsets import Floats, Ints
from gplan.nouns import ActionKind
from gplan.schedules import make_schedule
from gplan.simulator import is_recomputed


@dataclass(frozen=True)
class StepBounds:
    """Lower bounds of the simulated step over the partitions that are paths of these arcs."""

    problem: Problem
    arcs: Sequence[Arcs]

    @cached_property
    def through_s(self) -> list[Floats]:
        """[E] for each stage: of every plan that takes this arc."""
        left = prefix_tables(self.arcs, self._alone_s, np.maximum, num_positions=self._size)
        return [
            np.maximum(np.maximum(alone, left[stage][some.first]), self.rest_s[stage + 1][some.end])
            for stage, (some, alone) in enumerate(zip(self.arcs, self._alone_s, strict=True))
        ]

    @cached_property
    def rest_s(self) -> Floats:
        """[K+1, P]: of every plan whose stage s begins at this position, by its stages from s on."""
        return suffix_tables(self.arcs, self._alone_s, np.maximum, num_positions=self._size)[:, 0]

    @property
    def whole_s(self) -> float:
        """Of every plan."""
        return float(self.rest_s[0, 0])

    @cached_property
    def around_after_s(self) -> Floats:
        """[K+1, P]: the least that a forward and backward of a kept micro-batch take on stages s, ..., with transfers."""
        return suffix_tables(self.arcs, self._around_s(again=False), np.add, num_positions=self._size)[:, 0]

    @cached_property
    def around_after_again_s(self) -> Floats:
        """[K+1, P]: the same of a micro-batch that is recomputed."""
        if self.problem.recompute == "never":
            return self.around_after_s
        return suffix_tables(self.arcs, self._around_s(again=True), np.add, num_positions=self._size)[:, 0]

    def delay_after(self, stage: int, index: Ints | slice) -> Delay:
        """The pure delay, at least, behind some arcs of a stage."""
        some, times = self.arcs[stage], self.arcs[stage].times
        crossing_s, end = times.activation_s[index] + times.gradient_s[index], some.end[index]
        return Delay(
            kept_s=crossing_s + self.around_after_s[stage + 1][end],
            recomputed_s=crossing_s + self.around_after_again_s[stage + 1][end],
        )

    @property
    def _size(self) -> int:
        return self.problem.costs.num_positions

    def _around_s(self, *, again: bool) -> list[Floats]:
        """[E] for each stage: a forward and a backward, and the transfers over the cut after it."""
        around = []
        for times in (some.times for some in self.arcs):
            seconds = times.forward_s + times.backward_s + times.activation_s + times.gradient_s
            around.append(seconds + times.recompute_s if again else seconds)
        return around

    @cached_property
    def _forward_before_s(self) -> Floats:
        """[K+1, P]: the least that the first forward takes to reach this position as the start of stage s."""
        values = [some.times.forward_s + some.times.activation_s for some in self.arcs]
        return prefix_tables(self.arcs, values, np.add, num_positions=self._size)

    @cached_property
    def _around_before_s(self) -> tuple[Floats, Floats]:
        """[K+1, P] each: the least of a forward to this position and a backward from it; kept, and recomputed."""
        kept, again = (
            prefix_tables(self.arcs, self._around_s(again=x), np.add, num_positions=self._size) for x in (False, True)
        )
        return kept, again

    @cached_property
    def _alone_s(self) -> list[Floats]:
        """[E] for each stage: what its own order takes among pure delays."""
        return [self._alone(stage) for stage in range(self.problem.num_stages)]

    def _alone(self, stage: int) -> Floats:
        some = self.arcs[stage]
        delay = self.delay_after(stage, slice(None))
        ends = simulate_window(self.problem, [some.times], first_stage=stage, delay=delay)
        kept, again = self._around_before_s
        around_s = (again if self._recomputes_last(stage) else kept)[stage][some.first]
        bound: Floats = np.maximum(around_s + ends.loop_s, self._forward_before_s[stage][some.first] + ends.optimizer_s)
        return bound

    def _recomputes_last(self, stage: int) -> bool:
        """Whether the micro-batch that leaves the stage last is recomputed on its way back."""
        problem = self.problem
        schedule = make_schedule(
            problem.schedule, num_stages=problem.num_stages, num_microbatches=problem.num_microbatches
        )
        last = next(x for x in reversed(schedule.orders[stage]) if x.kind is ActionKind.BACKWARD)
        return is_recomputed(last.microbatch, num_microbatches=problem.num_microbatches, recompute=problem.recompute)


def sifted(problem: Problem, arcs: Sequence[Arcs], limit_s: float) -> list[Arcs]:
    """The arcs that closed forms do not rule out of every step up to that length; O(arcs), each time a few are left out.

    The first micro-batch goes all the way through, and a stage computes all of them: after the first has come to it,
    before the last has left it; under GPipe even beside the way of one through all stages.
    """
    size, num_microbatches = problem.costs.num_positions, problem.num_microbatches
    num_arcs = None
    while num_arcs != (num_arcs := sum(len(some) for some in arcs)):
        around = [x.times.forward_s + x.times.backward_s + x.times.activation_s + x.times.gradient_s for x in arcs]
        before = prefix_tables(arcs, around, np.add, num_positions=size)
        after = suffix_tables(arcs, around, np.add, num_positions=size)[:, 0]
        kept = []
        for stage, (some, around_s) in enumerate(zip(arcs, around, strict=True)):
            compute_s = some.times.forward_s + some.times.backward_s
            through_s = before[stage][some.first] + around_s + after[stage + 1][some.end]
            least_s = before[stage][some.first] + num_microbatches * compute_s
            if problem.schedule == "gpipe":
                through_s = through_s + (num_microbatches - 1) * compute_s
            kept.append(some.take(np.maximum(through_s, least_s) <= limit_s))
        left = on_paths(kept, size)
        assert left is not None, "a plan within the limit is a path"
        arcs = left
    return list(arcs)


def busy_within(problem: Problem, limit_s: float) -> Cap:
    """Every stage that a step of that length can contain, and perhaps some more.

    A stage computes all M micro-batches after the first has come through the stages before it and before the last has
    gone back through them. Under GPipe, where all forwards come first, the other M-1 are as long a path through all.
    """
    sums, num_microbatches = compute_sums_s(problem.costs), problem.num_microbatches
    fastest = max(problem.speed(s) for s in range(problem.num_stages))
    beside_all_s = (limit_s - float(sums[-1]) / fastest) / max(1, num_microbatches - 1)

    def seconds(_stage: int, first: Ints) -> Floats:
        alone_s = (limit_s - sums[first] / fastest) / num_microbatches
        if problem.schedule != "gpipe" or num_microbatches == 1:
            return alone_s
        return np.minimum(alone_s, beside_all_s)

    transfers_s = limit_s - float(sums[-1]) / fastest  # the first micro-batch goes all the way, over every cut
    return Cap(by_load=False, seconds_of=seconds, transfers_s=max(transfers_s, 0.0) * (1 + 1e-9))
