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
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gplan.core import StageSeconds, is_recomputed
from gplan.graph.down_sets import Floats
from gplan.partition.problem import Problem

_Paths = tuple[Floats, Floats, Floats]  # last, second, first


def gpipe_labels(problem: Problem, window: Sequence[StageSeconds[Floats]]) -> Floats:
    """[N, labels] of N prefixes, given the times of their stages, [N] each."""
    none = np.full(window[0].forward_s.shape, -np.inf)
    zero = np.zeros_like(none)
    max_f, passed_s, gradient_s = zero, zero, zero
    paths: _Paths = none, none, none
    tied_paths, has_tied, tied_update_s = paths, zero > 0, zero
    for times in window:
        max_f = np.maximum(max_f, np.maximum(times.forward_s, times.activation_s))
        passed_s = passed_s + times.forward_s + times.activation_s
        paths = _with_stage(problem, paths, gradient_s, times, times.optimizer_s)
        if times.is_tied is not None:
            is_tied, had_tied = np.asarray(times.is_tied) > 0, has_tied
            has_tied = had_tied | is_tied
            end_s = np.where(has_tied & ~had_tied, 0.0, -np.inf)
            tied_paths = _with_stage(problem, tied_paths, gradient_s, times, end_s)
            tied_update_s = np.maximum(tied_update_s, np.where(is_tied, times.optimizer_s, 0.0))
        gradient_s = times.gradient_s
    labels = [max_f, passed_s, *paths]
    if window[0].is_tied is not None:
        labels += [has_tied.astype(np.float64), tied_update_s, *(np.where(has_tied, x, 0.0) for x in tied_paths)]
    return np.column_stack(labels)


def _with_stage(
    problem: Problem, before: _Paths, gradient_s: Floats, times: StageSeconds[Floats], end_s: Floats
) -> _Paths:
    """`last`, `second` and `first` with one more stage; `end_s` is what follows its last backward."""
    num_microbatches = problem.num_microbatches
    first_b, b = (
        times.backward_s
        + is_recomputed(m, num_microbatches=num_microbatches, recompute=problem.recompute) * times.recompute_s
        for m in (num_microbatches - 1, 0)
    )
    last, second, first = before
    last = gradient_s + last
    second = np.maximum((num_microbatches - 2) * gradient_s + last, gradient_s + second)
    first = gradient_s + (np.maximum(second, first) if num_microbatches > 1 else first)
    last = b + np.maximum(end_s, last)
    second = np.maximum((num_microbatches - 2) * b + last, b + second)
    after_first = second if num_microbatches > 1 else end_s
    return last, second, first_b + np.maximum(after_first, first)
