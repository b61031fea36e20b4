"""Published partitioning rules of other frameworks, as baselines for gplan's plans.

Each maps layer costs to cuts: the first layer of each stage but stage 0. None considers transfers or memory or proves
anything, and some can leave a stage empty, which is an error here.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Protocol, TypeAlias

import numpy as np

from gplan.core.errors import NoPlanError
from gplan.evaluate.rivals import equal_counts

Cuts: TypeAlias = tuple[int, ...]


class PartitionRule(Protocol):
    """Cuts of a chain into `num_stages` by the layers' seconds or parameter counts."""

    def __call__(self, costs: Sequence[float], *, num_parameters: Sequence[int], num_stages: int) -> Cuts:
        """The cuts; raises NoPlanError if the rule leaves a stage empty."""
        ...


def least_spread(weights: Sequence[float], *, num_stages: int) -> Cuts:
    """A small difference between the heaviest and the lightest stage; O(K L^2), not exact.

    DeepSpeed's partition_balanced (deepspeed/runtime/utils.py since pull request 4312), which its default
    `partition_method="parameters"` gives the parameter counts. For every number of stages and of layers before a cut it
    keeps only the partition with the least difference, with the shortest last stage among ties, although a partition
    with a greater difference may extend to a better one.

    >>> least_spread([1, 1, 1, 3, 3], num_stages=3)
    (3, 4)
    """
    num_layers = len(weights)
    if num_layers <= num_stages:
        return _equal(num_layers, num_stages=num_stages)
    if not any(weights):
        raise NoPlanError("all weights are 0, so every stage looks empty to DeepSpeed's balance")
    before = np.concatenate([[0.0], np.cumsum(np.asarray(weights, dtype=np.float64))])
    largest, smallest = (np.full((num_stages + 1, num_layers + 1), np.inf) for _ in range(2))
    largest[0, 0] = 0.0
    begins = np.zeros((num_stages + 1, num_layers + 1), dtype=np.int64)
    for k in range(1, num_stages + 1):
        for end in range(k, num_layers + 1):
            last = before[end] - before[k - 1 : end]
            high, low = np.maximum(largest[k - 1, k - 1 : end], last), np.minimum(smallest[k - 1, k - 1 : end], last)
            spread = high - low
            best = len(spread) - 1 - int(np.argmin(spread[::-1]))
            largest[k, end], smallest[k, end], begins[k, end] = high[best], low[best], k - 1 + best
    cuts = [num_layers]
    for k in range(num_stages, 1, -1):
        cuts.append(int(begins[k, cuts[-1]]))
    return _without_empty(cuts[:0:-1], num_layers, rule="DeepSpeed's balance by parameters")


def block_partition(costs: Sequence[float], *, num_stages: int) -> Cuts:
    """Stages whose costs differ by no more than the largest layer's, after the smallest layer's is taken off all.

    torchgpipe's balance_by_time and balance_by_size (torchgpipe/balance/blockpartition.py), after Bárány and Grolmusz,
    "Block Partitions of Sequences" (arXiv 1308.2452): costs are scaled to [0, 1]; from equal counts, as long as the
    heaviest block p exceeds the lightest q by more than 1, the neighbour of q on p's side gives its layer next to q to
    q. Of blocks that weigh the same the last counts as heaviest, the first as lightest (the paper has the one closest
    to p, without which it can go round in circles: an error here), and p is chosen anew only after it gave a layer.

    >>> block_partition([13, 8, 5, 7, 5, 11], num_stages=4)
    (1, 2, 3)
    """
    num_layers = len(costs)
    if num_layers < num_stages:
        raise _empty(num_layers, num_stages, rule="torchgpipe's block partition")
    low, span = min(costs), max(costs) - min(costs)
    scaled = [(x - low) / span if span else 0.0 for x in costs]
    bounds = [k * (num_layers // num_stages) for k in range(num_stages)] + [num_layers]
    weights = [sum(scaled[i:j]) for i, j in pairwise(bounds)]
    heaviest, seen = _last_largest(weights), set()
    while weights[heaviest] > min(weights) + 1:
        lightest = weights.index(min(weights))
        is_right = heaviest < lightest
        giver = lightest - 1 if is_right else lightest + 1
        if (heaviest, *bounds) in seen or not 0 <= min(bounds) <= max(bounds) <= num_layers:
            raise NoPlanError(
                f"torchgpipe's block partition into {num_stages} stages does not terminate on these costs"
            )
        seen.add((heaviest, *bounds))
        bounds[lightest if is_right else giver] += -1 if is_right else 1
        for k in (lightest, giver):
            weights[k] = sum(scaled[bounds[k] : bounds[k + 1]])
        if giver == heaviest:
            heaviest = _last_largest(weights)
    return _without_empty(bounds[1:-1], num_layers, rule="torchgpipe's block partition")


def cumulative_share(costs: Sequence[float], *, num_stages: int) -> Cuts:
    """Layer i goes to stage int(K c_i / c), with c_i the costs up to and with layer i, and c those of all.

    GPipe's own code (lingvo/core/gpipe.py, PartitionSequentialLayers), which takes FLOPs for costs. A layer with
    more than 1/K of the cost can leave a stage empty, and on equal layers a stage can be a third too heavy.

    >>> cumulative_share([1.0, 1.0, 1.0, 1.0], num_stages=2)
    (1,)
    """
    reached = list(accumulate(costs))
    total = reached[-1] or 1.0
    stage = [min(int(x / total * num_stages), num_stages - 1) for x in reached]
    cuts = [sum(x < k for x in stage) for k in range(1, num_stages)]
    return _without_empty(cuts, len(costs), rule="GPipe's cumulative share")


RULES: dict[str, PartitionRule] = {
    "equal layer counts": lambda costs, *, num_parameters, num_stages: _equal(len(costs), num_stages=num_stages),
    "DeepSpeed, by parameters": lambda costs, *, num_parameters, num_stages: least_spread(
        num_parameters, num_stages=num_stages
    ),
    "torchgpipe, by time": lambda costs, *, num_parameters, num_stages: block_partition(costs, num_stages=num_stages),
    "GPipe (lingvo), by time": lambda costs, *, num_parameters, num_stages: cumulative_share(
        costs, num_stages=num_stages
    ),
}


def _equal(num_layers: int, *, num_stages: int) -> Cuts:
    return _without_empty(equal_counts(num_layers, num_stages=num_stages), num_layers, rule="equal layer counts")


def _last_largest(weights: Sequence[float]) -> int:
    return max(range(len(weights)), key=lambda k: (weights[k], k))


def _without_empty(cuts: Sequence[int], num_layers: int, *, rule: str) -> Cuts:
    if any(end <= first for first, end in pairwise((0, *cuts, num_layers))):
        raise _empty(num_layers, len(cuts) + 1, rule=rule)
    return tuple(cuts)


def _empty(num_layers: int, num_stages: int, *, rule: str) -> NoPlanError:
    return NoPlanError(f"{rule} leaves one of {num_stages} stages of {num_layers} layers empty; try fewer stages")
