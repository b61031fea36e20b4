"""GPipe prefixes as labels: a few numbers say all that the rest of a partition needs to know of one.

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
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gplan.core import StageSeconds, is_recomputed
from gplan.graph.down_sets import Floats, Ints
from gplan.partition.dp import suffix_tables
from gplan.partition.partial_plans import PartialPlans, SimulatedPrefixes, best_by_end, empty_prefix

_NO_TIED = (0.0,) * 5  # labels of a prefix without tied weights


@dataclass(frozen=True)
class GPipeLabels(SimulatedPrefixes):
    """Prefixes of GPipe pipelines; with all K stages their bounds are the step, up to rounding."""

    def root(self) -> PartialPlans:
        """The empty prefix: nothing was sent, and no backward follows the first stage's."""
        tied = _NO_TIED if self._may_be_tied else ()
        return empty_prefix(self.bounds, [0.0, 0.0, -np.inf, -np.inf, -np.inf, *tied])

    def grow(self, parents: PartialPlans, candidates: Ints) -> PartialPlans:
        """Each parent with one more stage; O(1) array operations."""
        some = self.bounds.candidates[parents.stage]
        times, gradient_s = some.times.take(candidates), self._gradient_before_s(parents)
        max_f, passed_s, *before = parents.labels.T[:5]
        max_f = np.maximum(max_f, np.maximum(times.forward_s, times.activation_s))
        passed_s = passed_s + times.forward_s + times.activation_s
        columns = [max_f, passed_s, *self._paths_s(before, gradient_s, times, times.optimizer_s)]
        if self._may_be_tied:
            columns += self._tied_labels(parents.labels.T[5:], gradient_s, times)
        labels = np.column_stack(columns)
        children = PartialPlans(
            paths=np.column_stack([parents.paths, candidates]),
            last_end=some.end[candidates],
            labels=labels,
            bounds_s=parents.bounds_s,
        )
        longest_s = np.maximum(self._bounds_s(children, times.gradient_s), parents.bounds_s)
        return PartialPlans(paths=children.paths, last_end=children.last_end, labels=labels, bounds_s=longest_s)

    def _paths_s(
        self, before: Sequence[Floats], gradient_s: Floats, times: StageSeconds[Floats], end_s: Floats
    ) -> list[Floats]:
        """`last`, `second` and `first` with one more stage; `end_s` is what follows its last backward."""
        last, second, first = before
        first_b, b = self._backwards_s(times)
        num_microbatches = self.bounds.problem.num_microbatches
        num_between = num_microbatches - 2
        last = gradient_s + last
        second = np.maximum(num_between * gradient_s + last, gradient_s + second)
        first = gradient_s + (np.maximum(second, first) if num_microbatches > 1 else first)
        last = b + np.maximum(end_s, last)
        second = np.maximum(num_between * b + last, b + second)
        after_first = second if num_microbatches > 1 else end_s
        return [last, second, first_b + np.maximum(after_first, first)]

    def _tied_labels(self, before: Floats, gradient_s: Floats, times: StageSeconds[Floats]) -> list[Floats]:
        """Whether any stage has tied weights, the longest update of one, and the paths to the first one's last backward."""
        had_tied, update_s, paths = before[0] > 0, before[1], before[2:]
        is_tied = np.asarray(times.is_tied) > 0
        has_tied = is_tied | had_tied
        end_s = np.where(has_tied & ~had_tied, 0.0, -np.inf)
        found = self._paths_s(list(np.where(had_tied, paths, -np.inf)), gradient_s, times, end_s)
        update_s = np.maximum(update_s, np.where(is_tied, times.optimizer_s, 0.0))
        return [has_tied.astype(np.float64), update_s, *(np.where(has_tied, x, 0.0) for x in found)]

    @property
    def _may_be_tied(self) -> bool:
        return self.bounds.candidates[0].times.is_tied is not None

    def undominated(self, nodes: PartialPlans) -> PartialPlans:
        """One of the best nodes for each trade-off, for every layer at which the next stage may begin."""
        return best_by_end(nodes, nodes.labels)

    def _gradient_before_s(self, nodes: PartialPlans) -> Floats:
        """[N]: seconds in which the next stage's gradients reach the last stage of each prefix;
        nothing before stage 0."""
        if not nodes.stage:
            return np.zeros(len(nodes))
        return self.bounds.candidates[nodes.stage - 1].times.gradient_s[nodes.paths[:, -1]]

    def _bounds_s(self, nodes: PartialPlans, gradient_s: Floats) -> Floats:
        """Of prefixes: the path through `first`, or one that is slowest further on."""
        bounds, stage, end = self.bounds, nodes.stage, nodes.last_end
        around_s = bounds.around_after_again_s if self._recomputes[0] else bounds.around_after_s
        later_f, later_b, later_both = (table[stage][end] for table in self._largest_after)
        max_f, passed_s, last, _, first = nodes.labels.T[:5]
        if self._may_be_tied:
            _, update_s, tied_last, _, tied_first = nodes.labels.T[5:]
            last, first = np.maximum(last, tied_last + update_s), np.maximum(first, tied_first + update_s)
        passing_s = passed_s + around_s[stage][end] + gradient_s
        num_more = bounds.problem.num_microbatches - 1
        max_f = np.maximum(max_f, later_f)
        here_s = passing_s + num_more * max_f + first
        further_s = passing_s + num_more * np.maximum(max_f + later_b, later_both) + last
        bounds_s: Floats = np.maximum(here_s, further_s)
        return bounds_s

    @cached_property
    def _largest_after(self) -> tuple[Floats, Floats, Floats]:
        """[K+1, P] each: the least that max f, max b and max (f + b) of the stages from s on can be."""
        candidates, size = self.bounds.candidates, self.bounds.problem.costs.num_positions
        f = [some.times.forward_s for some in candidates]
        b = [self._backwards_s(some.times)[1] for some in candidates]
        both = [x + y for x, y in zip(f, b, strict=True)]
        f_table, b_table, both_table = (
            suffix_tables(candidates, values, np.maximum, num_positions=size)[:, 0] for values in (f, b, both)
        )
        return f_table, b_table, both_table

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
