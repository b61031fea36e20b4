"""GPipe's step if a recompute does not wait for the gradient,
which is how the paper explains part of its small bubbles.

gplan's engine, and with it the simulator, recomputes when the gradient has come, as torch's checkpoint does. Here the
recompute of a micro-batch begins as soon as its device is free, for one micro-batch ahead. For K = 2, M = 1,
r a recompute:

    waiting     stage 0  F...........r B        ahead     stage 0  F....r......B
                stage 1   F r B                           stage 1   F r B
"""

from __future__ import annotations

from collections.abc import Sequence

from gplan.core import StageCost


def recomputing_ahead_s(costs: Sequence[StageCost], *, num_microbatches: int) -> float:
    """Seconds of GPipe's step with these stages where every micro-batch is recomputed; O(K M).

    >>> from gplan.core import StageCost
    >>> stage = StageCost(forward_s=1.0, backward_s=2.0, recompute_s=1.0, optimizer_s=0.0, activation_bytes=0,
    ...     gradient_bytes=0, activation_s=0.0, gradient_s=0.0)
    >>> recomputing_ahead_s([stage, stage], num_microbatches=1)  # one recompute less than 8.0 on the way
    7.0
    """
    arrived, freed = [0.0] * num_microbatches, list[float]()
    for cost in costs:
        now_s = 0.0
        for m in range(num_microbatches):
            now_s = max(now_s, arrived[m]) + cost.forward_s
            arrived[m] = now_s + cost.activation_s
        freed.append(now_s)
    done, ended = [0.0] * num_microbatches, list[float]()  # done: when the next stage has each gradient ready
    for cost, now_s in zip(reversed(costs), reversed(freed), strict=True):
        for m in reversed(range(num_microbatches)):
            now_s = max(now_s + cost.recompute_s, done[m] + cost.gradient_s) + cost.backward_s
            done[m] = now_s
        ended.append(now_s + cost.optimizer_s)
    return max(ended)
