"""What a bench's layers cost in one piece, and so what being cut off costs: the layers' sum over the one stage.

Both are compared within each round, as a host's speed drifts, and only what is more than the differences scatter counts:
noise would be taken off the layers, times the number of those that one was measured for, and never be put on them.
It is taken off the layers, the same from each, but never more than half of what a layer takes: no layer is free. What
the small ones cannot bear is taken off the others, so that the layers' sum is the stage's wherever it can be.

A step adds up what many layers take, and medians do not add up: where samples have a long tail, that of the sum is
above the sum of theirs, and every layer takes longer by as much. The sum is that of a round: what slows all of a round,
as other work on the host does, is as rare in the median of the sums as in those of the layers.

The second half of a split backward starts autograd once for every place where weights come in, and each start looks at
the whole graph below: what it takes grows faster than a stage's layers. The layers share what the one stage takes beyond
their sum, so a stage of more layers than were measured takes somewhat longer than this says, one of fewer less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gplan.nouns import Timing
from profiler.timing.bench import Bench
from profiler.timing.clock import Samples, median_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """What a bench's layers cost in one piece, and what being cut off costs each of them."""

    whole_forward: Timing
    whole_backward: Timing
    recompute_factor: float  # what recomputing adds, over a forward
    forward_cut_s: float
    backward_cut_s: float
    input_gradient_cut_s: float  # of the halves of a split backward
    weight_gradient_factor: float  # what the second half takes in one piece, over the sum of the layers'
    overhead_s: float  # what a stage adds to each forward or backward: it is cut off once
    forward_tail: float  # the median of what the layers took together in a round, over the sum of their medians
    backward_tail: float


def pieces_of(bench: Bench, samples: Callable[[str], Samples]) -> Pieces:
    """The sums of the layers held against the same layers as one stage."""

    def seconds(*names: str) -> float:
        return sum(samples(name).timing().median_s for name in names)

    cuts, excesses = {}, {}
    halved = [key for key in bench.keys if samples(f"{key}/input gradient").timing().num_samples]
    for name, keys in (("forward", bench.keys), ("backward", bench.keys), ("input gradient", halved)):
        excesses[name] = sure_s(samples(f"excess/{name}"))
        cuts[name] = cut_s([samples(f"{key}/{name}").timing().low_s / 2 for key in keys], excesses[name])
    plain_s, again_s = (seconds(f"{name}/forward", f"{name}/backward") for name in ("stage", "recomputed"))
    differences = samples("excess/recomputed").clean_s or [again_s - plain_s]  # none where every round was disturbed
    forward_s, weights_s = seconds("stage/forward"), seconds("stage/weight gradient")
    return Pieces(
        whole_forward=samples("whole/forward").timing(),
        whole_backward=samples("whole/backward").timing(),
        recompute_factor=max(0.0, median_s(differences)) / forward_s if forward_s else 1.0,
        forward_cut_s=cuts["forward"],
        backward_cut_s=cuts["backward"],
        input_gradient_cut_s=cuts["input gradient"],
        weight_gradient_factor=_ratio(weights_s, seconds(*(f"{key}/weight gradient" for key in halved))),
        overhead_s=(excesses["forward"] + excesses["backward"]) / 2 / max(1, len(bench.keys)),
        forward_tail=_ratio(seconds("together/forward"), seconds(*(f"{key}/forward" for key in bench.keys))),
        backward_tail=_ratio(seconds("together/backward"), seconds(*(f"{key}/backward" for key in bench.keys))),
    )


def _ratio(piece_s: float, sum_s: float) -> float:
    """1 where either was not measured."""
    return piece_s / sum_s if piece_s and sum_s else 1.0


def sure_s(excess: Samples) -> float:
    """The median less its standard error, at least 0; few samples are sure of nothing.

    >>> sure_s(Samples([1.0] * 5)), sure_s(Samples([1.0] * 4)), sure_s(Samples([-1.0, 1.0, 0.0, 0.5, -0.5]))
    (1.0, 0.0, 0.0)
    """
    return max(0.0, median_s(excess.clean_s) - excess.median_error_s) if excess.clean_s else 0.0


def cut_s(most_s: Sequence[float], total_s: float) -> float:
    """Seconds that, taken off each layer but no more than it can bear, are `total_s` together.

    Where all of them together cannot bear that, the most that any can.

    >>> cut_s([1.0, 4.0, 4.0], 3.0), cut_s([1.0, 4.0, 4.0], 6.0), cut_s([1.0, 4.0, 4.0], 20.0)
    (1.0, 2.5, 4.0)
    """
    left_s = total_s
    for place, most in enumerate(sorted(most_s)):
        share_s = left_s / (len(most_s) - place)
        if share_s <= most:
            return share_s
        left_s -= most
    return max(most_s, default=0.0)


def net(timing: Timing, cut_off_s: float) -> Timing:
    """A layer's time without the cost of being cut off, but at least half of it."""
    return timing.less(min(cut_off_s, timing.low_s / 2))
