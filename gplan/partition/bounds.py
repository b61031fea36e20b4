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

from gplan.core import is_recomputed
from gplan.cost.layer_sums import SecondsOf
from gplan.graph.down_sets import Floats, Ints
from gplan.partition.batch_simulation import Delay, simulate_window
from gplan.partition.candidates import CandidateLimit, Candidates, prefix_tables, suffix_tables
from gplan.partition.problem import Problem, compute_sums_s
from gplan.schedules.dependencies import INPUT_GRADIENT_KINDS
from gplan.schedules.registry import make_schedule

_SLACK = 1e-9  # share by which sums may be off


@dataclass(frozen=True)
class StepBounds:
    """Lower bounds of the simulated step over the partitions that are paths of these candidates."""

    problem: Problem
    candidates: Sequence[Candidates]

    @cached_property
    def through_s(self) -> list[Floats]:
        """[E] for each stage: of every plan that takes this candidate."""
        left = prefix_tables(self.candidates, self._alone_s, np.maximum, num_positions=self._size)
        return [
            np.maximum(np.maximum(alone, left[stage][some.first]), self.rest_s[stage + 1][some.end])
            for stage, (some, alone) in enumerate(zip(self.candidates, self._alone_s, strict=True))
        ]

    @cached_property
    def rest_s(self) -> Floats:
        """[S+1, P]: of every plan whose stage s begins at this position, by its stages from s on."""
        return suffix_tables(self.candidates, self._alone_s, np.maximum, num_positions=self._size)[:, 0]

    @cached_property
    def _around_after_s(self) -> list[Floats]:
        """[S+1, P] each: the least that a forward and backward take on stages s, ..., with transfers; of a micro-batch that
        is kept, and of one that is recomputed."""
        ways = (self._around_s(again=x) for x in (False, True))
        return [suffix_tables(self.candidates, x, np.add, num_positions=self._size)[:, 0] for x in ways]

    def delay_after(self, stage: int, index: Ints | slice) -> Delay:
        """The pure delay, at least, behind some candidates of a stage."""
        some, times = self.candidates[stage], self.candidates[stage].times
        crossing_s, end = times.activation_s[index] + times.gradient_s[index], some.end[index]
        kept_s, recomputed_s = (crossing_s + after_s[stage + 1][end] for after_s in self._around_after_s)
        return Delay(kept_s=kept_s, recomputed_s=recomputed_s)

    @property
    def _size(self) -> int:
        return self.problem.costs.num_positions

    def _around_s(self, *, again: bool) -> list[Floats]:
        """[E] for each stage: a forward and, at least, what gradients wait for, and the transfers over the cut after it.

        Gradients wait for the first half of a split backward; on stage 0 all of it comes last.
        """
        found = []
        for some, share in zip(self.candidates, self.problem.split_shares, strict=True):
            times, back_s = some.times, some.times.backward_s
            if share:
                assert times.input_gradient_s is not None, "a schedule with halves is planned with their times"
                back_s = times.input_gradient_s if share == 1 else np.minimum(times.input_gradient_s, back_s)
            kept_s = back_s + times.forward_s + times.activation_s + times.gradient_s
            found.append(kept_s + times.recompute_s if again else kept_s)
        return found

    @cached_property
    def _alone_s(self) -> list[Floats]:
        """[E] for each stage: what its own order takes among pure delays."""
        problem, found, num_microbatches = self.problem, list[Floats](), self.problem.num_microbatches
        ways = (
            [some.times.forward_s + some.times.activation_s for some in self.candidates],
            *(self._around_s(again=x) for x in (False, True)),
        )  # to a position as the start of a stage: the first forward, and a forward and a backward, kept or recomputed
        forward, kept, again = (prefix_tables(self.candidates, x, np.add, num_positions=self._size) for x in ways)
        last_back = _last_back(problem.schedule, problem.num_devices, num_microbatches)
        for stage, some in enumerate(self.candidates):
            delay = self.delay_after(stage, slice(None))
            ends = simulate_window(problem, [some.times], first_stage=stage, delay=delay)
            is_again = is_recomputed(last_back[stage], num_microbatches=num_microbatches, recompute=problem.recompute)
            around_s = (again if is_again else kept)[stage][some.first]
            found.append(np.maximum(around_s + ends.back_s, forward[stage][some.first] + ends.optimizer_s))
        return found


@lru_cache(maxsize=64)
def _last_back(schedule: str, num_devices: int, num_microbatches: int) -> tuple[int, ...]:
    """[S]: the micro-batch that leaves each stage last on its way back."""
    orders = make_schedule(schedule, num_devices=num_devices, num_microbatches=num_microbatches).orders
    last = {x.stage: x.microbatch for order in orders for x in order if x.kind in INPUT_GRADIENT_KINDS}
    return tuple(last[stage] for stage in sorted(last))


def busy_within(problem: Problem, limit_s: float) -> CandidateLimit:
    """Every stage that a step of that length can contain, and perhaps some more.

    A stage computes all M micro-batches after the first has come through the stages before it and before the last has
    gone back through them, but for second halves. Beside the way of one micro-batch through all stages, it computes M-1
    others; of these, 1F1B can hide the shorter half of those w_s - 1 that its warm-up takes in early.
    """
    num_microbatches, fastest = problem.num_microbatches, max(problem.speeds)
    sums, prefixes = problem.costs.sums, problem.costs.prefixes
    before_s = (sums.seconds("forward", *prefixes) if problem.splits_backward else compute_sums_s(problem)) / fastest
    beside_s = limit_s - through_all_s(problem)
    most_s = []
    for stage in range(problem.num_stages):
        within_s = limit_s / num_microbatches
        hidden: float = num_microbatches  # of the others, by the way of one through all
        if problem.schedule == "gpipe":
            hidden = 0.0
        elif problem.schedule == "1f1b":
            hidden = (min(problem.num_stages - stage, num_microbatches) - 1) / 2
        others = num_microbatches - 1 - hidden
        most_s.append(max(0.0, min(within_s, beside_s / others) if others > 0 else within_s))
    transfers_s = beside_s + least_transfers_s(problem).max(initial=0.0)
    return CandidateLimit(
        by_load=False,
        most_s=most_s,
        most_from_s=lambda first: (limit_s - before_s[first]) / num_microbatches,
        transfers_s=max(transfers_s, 0.0) * (1 + _SLACK),
    )


def least_step_s(problem: Problem) -> float:
    """What every step takes at least: the way of one micro-batch through all, and beside it an even share of the
    others; or the work of all devices, and what they wait for, shared out evenly.
    """
    if problem.schedule != "gpipe":
        return max(shared_step_s(problem), through_all_s(problem))
    even_s = float(compute_sums_s(problem)[-1]) / sum(problem.speeds)
    return through_all_s(problem) + (problem.num_microbatches - 1) * even_s


def shared_step_s(problem: Problem, *, tail_s: float = 0.0) -> float:
    """The mean over all devices of what each does and waits for at least; a step is as long as the longest of them.

    A device waits until the first forward has come to its first stage, which at least as many layers lie before as
    stages, and after its last backward, if that is not split, until it has gone through these. It does its share of all
    micro-batches, and of the tail, seconds of all optimizers, if that takes longer than to wait.
    """
    speeds, first = problem.speeds, [stages[0] for stages in problem.stages_by_device]
    overheads_s = problem.num_stages * problem.costs.microbatch_overhead_s
    work_s = problem.num_microbatches * (float(compute_sums_s(problem)[-1]) + overheads_s)
    start_s, back_s = (float(np.dot(speeds, least_s[first])) for least_s in least_before_s(problem))
    return (work_s + start_s + max(back_s, tail_s)) / sum(speeds)


def least_before_s(problem: Problem) -> tuple[Floats, Floats]:
    """[S] each: what the first forward takes at least to come to each stage,
    and the last gradients to come back from it.

    With the overheads of as many stages; of a split backward nothing.
    """
    costs, num_stages, fastest = problem.costs, problem.num_stages, max(problem.speeds)
    fewest = np.arange(num_stages)
    forward_s, back_s = np.zeros(num_stages), np.zeros(num_stages)
    if costs.given_downsets is None:
        forward_s, back_s = (costs.sums.seconds(of, np.zeros_like(fewest), fewest) for of in ("forward", "backward"))
    there_s, again_s, _ = np.cumsum([(0.0, 0.0, 0.0), *_least_over_cuts(problem)], axis=0).T
    overheads_s = fewest * costs.overhead_s
    start_s = (forward_s + overheads_s) / fastest + there_s
    if problem.splits_backward:
        return start_s, np.zeros(num_stages)
    return start_s, (back_s + overheads_s) / fastest + again_s


def _least_over_cuts(problem: Problem) -> list[tuple[float, float, float]]:
    """[S-1]: the least that the transfers over a cut take, wherever it is: forward, back, and both together."""
    known: dict[tuple[int, bool], tuple[float, float, float]] = {}
    found, devices = [], problem.devices
    for s in range(problem.num_stages - 1):
        kind = id(problem.link_after(s)), devices[s] != devices[s + 1]
        if kind not in known:
            there_s, back_s = problem.activation_s(s), problem.gradient_s(s)
            there, back, both = (float(x[1:-1].min(initial=np.inf)) for x in (there_s, back_s, there_s + back_s))
            known[kind] = there, back, both
        found.append(known[kind])
    return found


def through_all_s(problem: Problem) -> float:
    """What the first micro-batch takes at least, forward and backward through all stages, over every cut."""
    costs = problem.costs
    awaited: SecondsOf = "least_first_half" if problem.splits_backward else "backward"  # before gradients are sent
    layers_s = sum(float(costs.sums.seconds(of, *costs.all_layers)[0]) for of in ("forward", awaited))
    overheads_s = problem.num_stages * costs.microbatch_overhead_s
    return (layers_s + overheads_s) / max(problem.speeds) + float(least_transfers_s(problem).sum())


def least_transfers_s(problem: Problem) -> Floats:
    """[S-1]: the least that both transfers over each cut take, wherever it is."""
    return np.array([both for _, _, both in _least_over_cuts(problem)])
