"""The least step of a chain within a memory, by what each stage takes and holds at least: no search, no simulation.

A step is as long as what any one of its stages makes of it, so a smallest-maximum program over (stage, position) of
lower bounds of single stages is a lower bound of every partition; O(K P^2) array operations. With t the seconds of a
micro-batch on stage s, forward f and backward b, recompute included as far as the stage needs it to fit, W those of all
layers, M micro-batches and w warm-up forwards:
    any       T >= layers before, forward + M t + layers before, backward, or the update
    gpipe     T >= W + (M-1) t
    1F1B      T >= W + (M-1) t - (w-1) min(f, b)               w = K - s; eager 1F1B 2 (K - s) - 1
    ZB-H1     T >= forward of all layers + first halves of the layers after + M t - (K - s) f
What a stage holds follows from how many micro-batches it has in flight, in closed form (`least_moments`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from gplan.core import RecomputeMode, StageBytes
from gplan.cost.memory_moments import RESTING, Moment, peak_of
from gplan.cost.stage_costs import Costs
from gplan.cost.stage_seconds import StageSeconds
from gplan.graph.down_sets import Bools, Floats, Ints
from gplan.partition.bounds import least_hops_s, through_all_s
from gplan.partition.candidates import stage_seconds
from gplan.partition.device_bounds import AlikeLayers
from gplan.partition.dp import INFINITY
from gplan.partition.plan_evaluation import passes_s
from gplan.partition.problem import Problem, recomputed_share
from gplan.partition.recompute import PeakMoments, RecomputeSelector
from gplan.schedules.in_flight import NUM_WARMUP, max_in_flight

MOST_POSITIONS = 400
"""Chains with more positions have too many stages to be looked at for every setting."""

_SLACK = 1e-9


@dataclass(frozen=True)
class ChainStages:
    """Every stage that a chain can be cut into, by rising end, with its bytes for one micro-batch size.

    Stage s of K begins at position s or later, and at least K - 1 - s layers come after it. So each has a window of as
    many positions, and the stages of a window are in the same order, [E].
    """

    costs: Costs

    def window(self, stage: int, num_stages: int) -> tuple[Ints, Ints]:
        """[E] each: where the candidates of a stage begin and end."""
        one, other = _pairs(self.costs.num_positions - num_stages)
        return one + stage, other + stage

    def parts(self, first: Ints, end: Ints) -> StageBytes[Ints]:
        """[E]: what the memory of stages is made of."""
        return _rows(self._every_part, _index(first, end))

    def emptied_parts(self, first: Ints, end: Ints) -> StageBytes[Ints]:
        """[E]: the parts of stages that recompute all layers, with nothing kept of them."""
        return _rows(self._every_emptied_part, _index(first, end))

    @cached_property
    def whole(self) -> StageBytes[Ints]:
        """What the memory of a stage with all layers is made of, [1]."""
        return self.costs.parts(np.array([0]), np.array([self.costs.num_positions - 1]))

    @cached_property
    def alike(self) -> AlikeLayers:
        """The layers that most of the time is in."""
        return AlikeLayers(self.costs)

    @cached_property
    def selector(self) -> RecomputeSelector:
        """Which layers to recompute."""
        return RecomputeSelector(self.costs)

    @cached_property
    def _every(self) -> tuple[Ints, Ints]:
        return _pairs(self.costs.num_positions - 1)

    @cached_property
    def _every_part(self) -> Ints:
        """[parts, stages]."""
        return _stacked(self.costs.parts(*self._every))

    @cached_property
    def _every_emptied_part(self) -> Ints:
        return _stacked(self.selector.emptied_parts(*self._every, _rows(self._every_part, slice(None))))

    def least_largest(self, values: Sequence[Floats]) -> float:
        """The smallest largest value of the stages of a partition, given those of each stage's window; exact."""
        width = self.costs.num_positions - len(values)
        first, _ = _pairs(width)
        starts = np.concatenate([[0], np.cumsum(np.arange(1, width))])
        best = np.zeros(width)  # by where the stage begins in its window, which is one position on from stage to stage
        best[1:] = INFINITY
        for own in values:
            best = np.minimum.reduceat(np.maximum(own, best[first]), starts)
        return float(best[-1])


@lru_cache(maxsize=512)
def _pairs(width: int) -> tuple[Ints, Ints]:
    """Pairs of positions from 0 to `width`, the first before the other, by rising other."""
    ends = np.arange(1, width + 1)
    return np.concatenate([np.arange(end) for end in ends]), np.repeat(ends, ends)


def _index(first: Ints, end: Ints) -> Ints:
    """Where pairs of positions are among all pairs."""
    return end * (end - 1) // 2 + first


def _stacked(parts: StageBytes[Ints]) -> Ints:
    return np.array([getattr(parts, name) for name in StageBytes.__struct_fields__])


def _rows(stacked: Ints, index: Ints | slice) -> StageBytes[Ints]:
    return StageBytes(**dict(zip(StageBytes.__struct_fields__, stacked[:, index], strict=True)))


def least_moments(
    schedule: str, *, num_devices: int, num_microbatches: int, stage: int, recompute: RecomputeMode
) -> tuple[Moment, ...] | None:
    """Moments of a stage that holds no less at some moment of its order; None for schedules without closed form.

    >>> [x.num_stashes for x in least_moments("1f1b", num_devices=4, num_microbatches=8, stage=1, recompute="never")]
    [3, 0]
    """
    if schedule == "gpipe":
        in_flight = num_microbatches
    elif schedule in NUM_WARMUP:
        in_flight = min(num_microbatches, NUM_WARMUP[schedule](num_devices - stage))
    elif schedule == "zb-h1":
        in_flight = max_in_flight(schedule, num_devices=num_devices, num_microbatches=num_microbatches, num_chunks=1)
    else:
        return None
    again, kept = (0, in_flight) if recompute == "never" else (in_flight, 0)  # of the micro-batches in flight
    if recompute == "except-last" and (in_flight > 1 or num_microbatches == 1):
        again, kept = in_flight - 1, 1
    done = num_microbatches - in_flight
    if recompute == "except-last" and in_flight == 1 < num_microbatches:
        done -= 1  # the last one, which is in flight alone, is kept
    is_halved = schedule == "zb-h1" and stage > 0
    if is_halved:  # between the halves a recomputed micro-batch is there as a whole
        restored = min(again, stage + 1)
        again, kept = again - restored, kept + restored
    last_is_first = schedule == "gpipe" and recompute == "except-last"  # on the way back
    num_recomputing = int(again > 0 and not is_halved and not last_is_first)
    full = replace(
        RESTING,
        num_stashes=kept,
        num_checkpoints=again - num_recomputing,
        num_recomputing=num_recomputing,
        num_done=done,
        has_gradients=done > 0,
        workspace="" if num_recomputing else "backward_workspace",
    )
    return full, replace(RESTING, num_done=num_microbatches, has_gradients=True)


@dataclass(frozen=True)
class ChainBounds:
    """Bounds over the partitions of a chain into one stage for each of some equal devices."""

    problem: Problem
    stages: ChainStages

    @staticmethod
    def apply_to(problem: Problem) -> bool:
        """Whether there are bounds for such a problem."""
        costs = problem.costs
        return (
            costs.given_downsets is None
            and costs.num_positions <= MOST_POSITIONS
            and not problem.has_chunks
            and not problem.machine_devices
            and not problem.links
            and _moments(problem, 0, problem.recompute) is not None
        )

    @cached_property
    def step_s(self) -> float:
        """A lower bound of the step of every partition that fits the memory; infinite where none fits."""
        values = [self._values(stage) for stage in range(self.problem.num_stages)]
        return self.stages.least_largest(values) * (1 - _SLACK)

    def _values(self, stage: int) -> Floats:
        """[E]: what the step takes at least with a candidate of a stage; infinite for those that do not fit."""
        problem, num = self.problem, self.problem.num_microbatches
        first, end = self.stages.window(stage, problem.num_stages)
        times = self._times.take(_index(first, end))
        recompute_s, fits = self._recompute(stage, times)
        passes = passes_s(problem, stage, times)
        compute = num * (passes + recomputed_share(problem) * recompute_s)
        after = times.optimizer_s
        if not any(problem.split_shares):
            after = np.maximum(after, self._before_s[1][first] + stage * self._overhead_s + self._hops_s[1][stage])
        bound: Floats = self._before_s[0][first] + stage * self._overhead_s + self._hops_s[0][stage] + compute + after
        beside = self._through_s - passes + compute - (recompute_s if problem.recompute == "always" else 0.0)
        if problem.schedule == "gpipe":
            bound = np.maximum(bound, beside)
        elif problem.schedule in NUM_WARMUP:
            num_warmup = min(num, NUM_WARMUP[problem.schedule](problem.num_stages - stage))
            shorter = np.minimum(times.forward_s, times.backward_s + recompute_s)
            bound = np.maximum(bound, beside - (num_warmup - 1) * shorter)
        elif problem.schedule == "zb-h1":
            num_warmup, num_after = min(num, problem.num_stages - stage), problem.num_stages - 1 - stage
            hops_s = self._hops_s[0][-1] + self._hops_s[1][-1] - self._hops_s[1][stage]
            layers_s = self._before_s[0][-1] + self._first_halves_s[-1] - self._first_halves_s[end]
            overheads_s = (problem.num_stages + num_after) * self._overhead_s
            bound = np.maximum(bound, layers_s + overheads_s + hops_s + compute - num_warmup * times.forward_s)
        return np.where(fits, bound, INFINITY)

    def _recompute(self, stage: int, times: StageSeconds[Floats]) -> tuple[Floats, Bools]:
        """[E] each: seconds of recompute for a micro-batch that is recomputed, at least; whether candidates may fit."""
        problem, limit = self.problem, self.problem.memory_of(stage)
        nothing, every = np.zeros(len(times.forward_s)), np.ones(len(times.forward_s), dtype=np.bool_)
        is_selected = problem.recompute == "selected"
        seconds = nothing if is_selected or problem.recompute == "never" else times.recompute_s
        if limit is None:
            return seconds, every
        first, end = self.stages.window(stage, problem.num_stages)
        parts = self.stages.parts(first, end)
        keeping = _moments(problem, stage, "never" if is_selected else problem.recompute) or ()
        is_kept = peak_of(keeping, parts) <= limit
        if not is_selected or is_kept.all():
            return seconds, is_kept
        selector = self.stages.selector
        peak_moments = PeakMoments(keeping=keeping, selecting=_moments(problem, stage, "always") or ())
        emptied = self.stages.emptied_parts(first, end)
        need = selector.least_saved_bytes(emptied, parts.stash, peak_moments, limit_bytes=limit)
        least_s = selector.least_seconds(first, end, need)
        fits = is_kept | np.isfinite(least_s)
        return np.where(is_kept | ~fits, 0.0, least_s), fits

    @cached_property
    def _times(self) -> StageSeconds[Floats]:
        """Of every stage, wherever it is."""
        return stage_seconds(self.problem, 0, *_pairs(self.problem.costs.num_positions - 1))

    @cached_property
    def _through_s(self) -> float:
        """The way of one micro-batch through all stages, recomputed where every one is."""
        problem, everything = self.problem, (np.array([0]), np.array([self.problem.costs.num_positions - 1]))
        again_s = float(problem.costs.least_recompute_s(*everything)[0]) if problem.recompute == "always" else 0.0
        return through_all_s(problem) + again_s

    @cached_property
    def _before_s(self) -> tuple[Floats, Floats]:
        """[P] each: forward and backward of the layers before each position, without overheads and transfers."""
        costs, every = self.problem.costs, np.arange(self.problem.costs.num_positions)
        nothing = np.zeros_like(every)
        backward_s = costs.backward_s(nothing, every)
        if self.problem.recompute == "always":
            backward_s = backward_s + costs.least_recompute_s(nothing, every)
        return costs.forward_s(nothing, every), backward_s

    @cached_property
    def _first_halves_s(self) -> Floats:
        """[P]: what gradients wait for at least in the layers before each position."""
        costs, every = self.problem.costs, np.arange(self.problem.costs.num_positions)
        again_s = costs.least_recompute_s(np.zeros_like(every), every) if self.problem.recompute == "always" else 0.0
        return costs.least_first_half_s(np.zeros_like(every), every) + again_s

    @property
    def _overhead_s(self) -> float:
        return self.problem.costs.overhead_s

    @cached_property
    def _hops_s(self) -> tuple[Floats, Floats]:
        return least_hops_s(self.problem)


def _moments(problem: Problem, stage: int, recompute: RecomputeMode) -> tuple[Moment, ...] | None:
    mode: RecomputeMode = "always" if recompute == "selected" else recompute
    return least_moments(
        problem.schedule,
        num_devices=problem.num_devices,
        num_microbatches=problem.num_microbatches,
        stage=stage,
        recompute=mode,
    )
