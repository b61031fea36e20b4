"""GPipe prefixes as labels: a few numbers that are all that the rest of a partition depends on.

All forwards run, then all backwards, so a step is two flow shops, one after the other, each with its closed form:
    T = sum (f + a) + (M-1) max (f, a) + first_{K-1}
with a the transfers forward, one after the other on each link. `first`, from the first backward on the last stage to the
last optimizer, grows from stage 0 on. A backward on stage s takes e_s for the micro-batch that comes back first and b_s
for the other M-1 (they differ under "except-last" recompute), its gradients travel g_{s-1}, its optimizer takes o_s. The
longest path that begins on stage s with the backward of the
    last micro-batch to come back      last_s   = b_s + max(o_s, last')
    second                             second_s = max((M-2) b_s + last_s, b_s + second')
    first                              first_s  = e_s + max(second_s, first')
(with M = 1 there is only the first, and o_s in place of second_s). Primes are of the link to the stage before, which is
like a stage without an optimizer on which each transfer takes g_{s-1}. A prefix that is no better in any of max (f, a),
sum (f + a), last, second and first than another up to the same layer is pointless. Few remain, as the numbers rise and
fall together, but their number has no polynomial bound.

Stages with tied weights update when the first of them, which is done last, has done all its backwards. Where weights may be
tied there are five more labels: whether a stage has a tied weight, the longest update of such a stage, and the three paths
to the last backward of the first one (0 if there is none).

A prefix is bounded by the path through `first`, or through `last` and the slowest stage further on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gplan.core import StageSeconds, is_recomputed
from gplan.graph.down_sets import Floats, Ints
from gplan.partition.batch_simulation import window_times
from gplan.partition.bounds import StepBounds
from gplan.partition.dp import suffix_tables

_Paths = tuple[Floats, Floats, Floats]  # last, second, first


@dataclass(frozen=True)
class GPipePrefixes:
    """Prefixes of GPipe pipelines of some candidates, with one stage on each device."""

    bounds: StepBounds

    def of_prefixes(self, paths: Ints) -> tuple[Floats, Floats]:
        """[N]: a lower bound of every plan with these first stages, [N, s], of all stages the step; [N, labels]."""
        window = window_times(self.bounds.candidates, paths)
        none = np.full(len(paths), -np.inf)
        zero = np.zeros(len(paths))
        max_f, passed_s, gradient_s = zero, zero, zero
        before: _Paths = none, none, none
        tied_before, has_tied, tied_update_s = before, zero > 0, zero
        for times in window:
            max_f = np.maximum(max_f, np.maximum(times.forward_s, times.activation_s))
            passed_s = passed_s + times.forward_s + times.activation_s
            before = self._with_stage(before, gradient_s, times, times.optimizer_s)
            if times.is_tied is not None:
                is_tied, had_tied = np.asarray(times.is_tied) > 0, has_tied
                has_tied = had_tied | is_tied
                end_s = np.where(has_tied & ~had_tied, 0.0, -np.inf)
                tied_before = self._with_stage(tied_before, gradient_s, times, end_s)
                tied_update_s = np.maximum(tied_update_s, np.where(is_tied, times.optimizer_s, 0.0))
            gradient_s = times.gradient_s
        labels, (last, _, first) = [max_f, passed_s, *before], before
        if window[0].is_tied is not None:
            tied_paths = [np.where(has_tied, x, 0.0) for x in tied_before]
            labels += [has_tied.astype(np.float64), tied_update_s, *tied_paths]
            last, first = (
                np.maximum(last, tied_paths[0] + tied_update_s),
                np.maximum(first, tied_paths[2] + tied_update_s),
            )
        stage = paths.shape[1]
        end = self.bounds.candidates[stage - 1].end[paths[:, -1]]
        around_s = self.bounds.around_after_again_s if self._recomputes[0] else self.bounds.around_after_s
        later_f, later_b, later_both = (table[stage][end] for table in self._largest_after)
        passing_s = passed_s + around_s[stage][end] + gradient_s
        num_more, max_f = self.bounds.problem.num_microbatches - 1, np.maximum(max_f, later_f)
        here_s = passing_s + num_more * max_f + first
        further_s = passing_s + num_more * np.maximum(max_f + later_b, later_both) + last
        return np.maximum(here_s, further_s), np.column_stack(labels)

    def _with_stage(self, before: _Paths, gradient_s: Floats, times: StageSeconds[Floats], end_s: Floats) -> _Paths:
        """`last`, `second` and `first` with one more stage; `end_s` is what follows its last backward."""
        (first_b, b), num_microbatches = self._backwards_s(times), self.bounds.problem.num_microbatches
        last, second, first = before
        last = gradient_s + last
        second = np.maximum((num_microbatches - 2) * gradient_s + last, gradient_s + second)
        first = gradient_s + (np.maximum(second, first) if num_microbatches > 1 else first)
        last = b + np.maximum(end_s, last)
        second = np.maximum((num_microbatches - 2) * b + last, b + second)
        after_first = second if num_microbatches > 1 else end_s
        return last, second, first_b + np.maximum(after_first, first)

    @cached_property
    def _largest_after(self) -> Sequence[Floats]:
        """[K+1, P] each: the least that max f, max b and max (f + b) of the stages from s on can be."""
        candidates, size = self.bounds.candidates, self.bounds.problem.costs.num_positions
        f = [some.times.forward_s for some in candidates]
        b = [self._backwards_s(some.times)[1] for some in candidates]
        both = [x + y for x, y in zip(f, b, strict=True)]
        return [suffix_tables(candidates, x, np.maximum, num_positions=size)[:, 0] for x in (f, b, both)]

    def _backwards_s(self, times: StageSeconds[Floats]) -> tuple[Floats, Floats]:
        """Seconds of the backward of the micro-batch that comes back first, and of each other one, if there is any."""
        again = times.backward_s + times.recompute_s
        first, other = (again if recomputes else times.backward_s for recomputes in self._recomputes)
        return first, other

    @property
    def _recomputes(self) -> tuple[bool, bool]:
        """Whether the micro-batch that comes back first, the last one, is recomputed, and whether each other one is."""
        problem, num = self.bounds.problem, self.bounds.problem.num_microbatches
        first, other = (is_recomputed(m, num_microbatches=num, recompute=problem.recompute) for m in (num - 1, 0))
        return first, other
