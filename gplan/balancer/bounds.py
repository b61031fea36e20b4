"""What a step takes at least, whatever the rest of the partition: the bounds that the search prunes with.

Take one segment as stage s, and let all other stages be pure delays, through which any number of micro-batches may
pass at once; the sum of those delays is known but for the transfers, of which the least possible are counted. The
segment's own order, simulated alone against them, bounds every plan that has it. For 1F1B this contains
    T >= M t_s + sum_{i<s} (t_i + c_i)                        the stage is busy from its first to its last action
    T >= sum t + sum c + (M-1) t_s - (w_s - 1) min(f_s, b_s)  w_s = K - s warm-up forwards
and what warm-up, steady state and drain make of them together. A plan takes as long as its worst segment, so
smallest-maximum programs over (stage, cut) extend the bound to every prefix, every suffix and the whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gplan.balancer.batch import Delay, simulate_window, stage_times
from gplan.balancer.price import Problem
from gplan.balancer.segments import INFINITY, Segments, all_segments, fitting, prefix_tables, suffix_tables
from gplan.costs import Floats, Ints
from gplan.nouns import ActionKind
from gplan.schedules import make_schedule
from gplan.simulator import is_recomputed


@dataclass(frozen=True)
class StepBounds:
    """Lower bounds of the simulated step over the partitions made of these segments that fit the memory."""

    problem: Problem
    segments: Segments

    @cached_property
    def through_s(self) -> Floats:
        """[K, L+1, W]: of every plan with this segment as this stage."""
        num_stages, segments = self.problem.num_stages, self.segments
        left = prefix_tables(segments, lambda stage: self._alone_s[stage], np.maximum)
        return np.stack([
            np.maximum(
                np.maximum(self._alone_s[stage], left[stage][segments.first]), self.rest_s[stage + 1][segments.end]
            )
            for stage in range(num_stages)
        ])  # fmt: skip

    @cached_property
    def rest_s(self) -> Floats:
        """[K+1, L+1]: of every plan whose stage s begins at layer i, by its stages from s on."""
        return suffix_tables(self.segments, lambda stage: self._alone_s[stage], np.maximum)[:, 0]

    @property
    def whole_s(self) -> float:
        """Of every plan."""
        return float(self.rest_s[0, 0])

    @cached_property
    def crossing_after_s(self) -> Floats:
        """[K+1, L+1]: the least that both transfers over all cuts from layer i on take, with stage s beginning at i."""
        at_left = fitting(self.segments, self._transfer_s[self.segments.first])
        return suffix_tables(self.segments, at_left, np.add)[:, 0]

    def delay_after(self, stage: int, end: Ints) -> Delay:
        """The pure delay, at least, behind a stage that ends at these layers."""
        costs, size = self.problem.costs, self.problem.num_layers
        num_after = self.problem.num_stages - 1 - stage
        kept_s = costs.forward_s[end, size] + costs.backward_s[end, size] + num_after * 2 * costs.profile.overhead_s
        kept_s = kept_s + self.crossing_after_s[stage + 1][end]
        return Delay(kept_s=kept_s, recomputed_s=kept_s + costs.recompute_s[end, size])

    @cached_property
    def _transfer_s(self) -> Floats:
        return self.problem.costs.activation_s + self.problem.costs.gradient_s

    @cached_property
    def _crossing_before_s(self) -> Floats:
        """[K+1, L+1]: the least that both transfers over all cuts up to layer i take, with stage s beginning at i."""
        at_right = fitting(self.segments, self._transfer_s[self.segments.end])
        return prefix_tables(self.segments, at_right, np.add)

    @cached_property
    def _alone_s(self) -> list[Floats]:
        """[L+1, W] for each stage: what its own order takes among pure delays."""
        return [self._alone(stage) for stage in range(self.problem.num_stages)]

    def _alone(self, stage: int) -> Floats:
        problem, costs, first = self.problem, self.problem.costs, self.segments.first
        own = stage_times(problem, first, self.segments.end)
        ends = simulate_window(problem, [own], first_stage=stage, delay=self.delay_after(stage, self.segments.end))
        overhead_s = stage * costs.profile.overhead_s
        forward_s = costs.forward_s[0, first] + overhead_s
        around_s = forward_s + costs.backward_s[0, first] + overhead_s + self._crossing_before_s[stage][first]
        if self._recomputes_last(stage):
            around_s = around_s + costs.recompute_s[0, first]
        bound = np.maximum(around_s + ends.loop_s, forward_s + ends.optimizer_s)
        return np.where(self.segments.fits(stage), bound, INFINITY)

    def _recomputes_last(self, stage: int) -> bool:
        """Whether the micro-batch that leaves the stage last is recomputed on its way back."""
        problem = self.problem
        schedule = make_schedule(
            problem.schedule, num_stages=problem.num_stages, num_microbatches=problem.num_microbatches
        )
        last = next(x for x in reversed(schedule.orders[stage]) if x.kind is ActionKind.BACKWARD)
        return is_recomputed(last.microbatch, num_microbatches=problem.num_microbatches, recompute=problem.recompute)


def segments_within(problem: Problem, limit_s: float) -> Segments:
    """Every segment that is busy for at most that long in a step, and perhaps longer ones."""
    costs = problem.costs
    layers = np.arange(problem.num_layers + 1)
    lengths = layers[None, :] - layers[:, None]
    busy_s = problem.num_microbatches * (costs.forward_s + costs.backward_s)
    widest = all_segments(problem).width
    return Segments(problem, max(1, min(widest, int(lengths[busy_s <= limit_s].max()))))
