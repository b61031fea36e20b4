"""What one layer takes in a step: means over its M micro-batches, the halves of its backward, and in company.

The first backward of a step, which makes the gradients, costs something else than the others; each of the M gets its
share of the difference, of a split backward its second half.
"""

from __future__ import annotations

from gplan.nouns import LayerCost


def mean_backward_s(cost: LayerCost, num_microbatches: int) -> float:
    """Seconds of a backward in one piece."""
    return cost.backward.median_s + _share_of_first_s(cost, num_microbatches)


def mean_weight_gradient_s(cost: LayerCost, num_microbatches: int) -> float:
    """Seconds of the second half of a split backward; none where there is no such half."""
    if cost.weight_gradient is None:
        return 0.0
    return max(0.0, cost.weight_gradient.median_s + _share_of_first_s(cost, num_microbatches))


def first_half_s(cost: LayerCost) -> float:
    """Seconds of the first half of a split backward.

    What has only a second half is before all weights; what has neither, as the loss, has no weights.
    """
    if cost.input_gradient is None and cost.weight_gradient is not None:
        return 0.0
    return (cost.input_gradient or cost.backward).median_s


def in_company(contention: float, company: int, *, num_measured: int) -> float:
    """The factor beside `company` other devices: 1 beside none, `contention` beside as many as were measured.

    >>> in_company(1.3, 1, num_measured=2), in_company(1.3, 5, num_measured=2), in_company(1.3, 5, num_measured=0)
    (1.15, 1.3, 1.0)
    """
    share = min(1.0, company / num_measured) if num_measured else 0.0
    return 1.0 + (contention - 1.0) * share


def _share_of_first_s(cost: LayerCost, num_microbatches: int) -> float:
    first = cost.first_backward or cost.backward
    return (first.median_s - cost.backward.median_s) / num_microbatches
