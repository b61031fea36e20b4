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
from functools import cached_property, lru_cache

import numpy as np

from gplan.balancer.arcs import Arcs, Cap, StageTimes, compute_sums_s, on_paths
from gplan.balancer.batch import Delay, simulate_window
from gplan.balancer.problem import Problem
from gplan.balancer.tables import prefix_tables, suffix_tables
from gplan.downsets import Floats, Ints
from gplan.nouns import ActionKind
from gplan.schedules import make_schedule
from gplan.simulator import is_recomputed

_SLACK = 1e-9  # share by which sums may be off


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
        kept = [_around_s(some.times) for some in self.arcs]
        return [x + some.times.recompute_s for x, some in zip(kept, self.arcs, strict=True)] if again else kept

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
        last = _last_back(problem.schedule, problem.num_devices, problem.num_microbatches)[stage]
        return is_recomputed(last, num_microbatches=problem.num_microbatches, recompute=problem.recompute)


@lru_cache(maxsize=64)
def _last_back(schedule: str, num_devices: int, num_microbatches: int) -> tuple[int, ...]:
    """[K]: the micro-batch that leaves each stage last on its way back."""
    orders = make_schedule(schedule, num_devices=num_devices, num_microbatches=num_microbatches).orders
    return tuple(next(x.microbatch for x in reversed(order) if x.kind is ActionKind.BACKWARD) for order in orders)


def sifted(problem: Problem, arcs: Sequence[Arcs], limit_s: float) -> list[Arcs] | None:
    """The arcs that closed forms do not rule out of every step up to that length; None where that leaves no path.

    The first micro-batch goes all the way through, and a stage computes all of them: after the first has come to it,
    before the last has left it; under GPipe even beside the way of one through all stages.
    """
    size, num_microbatches = problem.costs.num_positions, problem.num_microbatches
    num_arcs = None
    while num_arcs != (num_arcs := sum(len(some) for some in arcs)):
        around = [_around_s(x.times) for x in arcs]
        before = prefix_tables(arcs, around, np.add, num_positions=size)
        after = suffix_tables(arcs, around, np.add, num_positions=size)[:, 0]
        kept = []
        for stage, (some, around_s) in enumerate(zip(arcs, around, strict=True)):
            compute_s = some.times.forward_s + some.times.backward_s
            through_s = before[stage][some.first] + around_s + after[stage + 1][some.end]
            least_s = before[stage][some.first] + num_microbatches * compute_s
            if problem.schedule == "gpipe":
                through_s = through_s + (num_microbatches - 1) * compute_s
            kept.append(some.take(np.maximum(through_s, least_s) <= limit_s * (1 + _SLACK)))
        left = on_paths(kept, size)
        if left is None:
            return None
        arcs = left
    return list(arcs)


def _around_s(times: StageTimes) -> Floats:
    """[E]: a forward and a backward of a kept micro-batch, and the transfers over the cut after them."""
    return times.forward_s + times.backward_s + times.activation_s + times.gradient_s


def busy_within(problem: Problem, limit_s: float) -> Cap:
    """Every stage that a step of that length can contain, and perhaps some more.

    A stage computes all M micro-batches after the first has come through the stages before it and before the last has
    gone back through them. Beside the way of one micro-batch through all stages, it computes M-1 others; of these, 1F1B
    can hide the shorter half of those w_s - 1 that its warm-up takes in early.
    """
    num_microbatches, fastest = problem.num_microbatches, _fastest(problem)
    sums = compute_sums_s(problem.costs)
    beside_s = limit_s - _through_all_s(problem)
    most_s = []
    for stage in range(problem.num_stages):
        hidden = 0 if problem.schedule == "gpipe" else (min(problem.num_stages - stage, num_microbatches) - 1) / 2
        others = num_microbatches - 1 - hidden
        within_s = limit_s / num_microbatches
        most_s.append(max(0.0, min(within_s, beside_s / others) if others > 0 else within_s))
    transfers_s = beside_s + _least_transfers_s(problem).max(initial=0.0)
    return Cap(
        by_load=False,
        most_s=most_s,
        most_from_s=lambda first: (limit_s - sums[first] / fastest) / num_microbatches,
        transfers_s=max(transfers_s, 0.0) * (1 + _SLACK),
    )


def least_step_s(problem: Problem) -> float:
    """What every step takes at least: the way of one micro-batch through all, and beside it an even share of the others."""
    even_s = float(compute_sums_s(problem.costs)[-1]) / sum(problem.speed(s) for s in range(problem.num_stages))
    if problem.schedule != "gpipe":
        return max(problem.num_microbatches * even_s, _through_all_s(problem))
    return _through_all_s(problem) + (problem.num_microbatches - 1) * even_s


def _through_all_s(problem: Problem) -> float:
    """What the first micro-batch takes at least, forward and backward through all stages, over every cut."""
    overheads_s = 2 * problem.num_stages * problem.costs.profile.overhead_s
    compute_s = (float(compute_sums_s(problem.costs)[-1]) + overheads_s) / _fastest(problem)
    return compute_s + float(_least_transfers_s(problem).sum())


def _least_transfers_s(problem: Problem) -> Floats:
    """[K-1]: the least that both transfers over each cut take, wherever it is."""
    both = [problem.activation_s(s) + problem.gradient_s(s) for s in range(problem.num_stages - 1)]
    return np.array([float(x[1:-1].min(initial=np.inf)) for x in both])


def _fastest(problem: Problem) -> float:
    return max(problem.speed(s) for s in range(problem.num_stages))
