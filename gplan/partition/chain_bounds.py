"""The least step of a chain within a memory, with one stage for each device: no search, no simulation.

A partition whose step is at most T has no path longer than T. Each stage is looked at with the paths through its order
(`order_paths.py`); what such a path takes of the stages before and after is at least what the shortest ways through these
take, by programs over (stage, position). Candidates with a longer path are left out, which makes the ways through the
others longer, until no more are; where no partition is left, every step is longer than T. T is bisected. Stages with more
layers than any that fits the memory, or than any whose actions fit into the longest step of interest, are left out before:
with at most D layers, each round takes O(S P D).

What a stage takes counts with the recompute that it needs to fit where it is: how many micro-batches it has in flight
there is known in closed form (`least_moments`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from gplan.core import ActionKind, RecomputeMode, StageBytes, StageSeconds
from gplan.cost.memory_moments import RESTING, Moment, moment_bytes
from gplan.cost.part_table import PARTS, PartTable, parts_of
from gplan.cost.stage_costs import Costs
from gplan.cost.stage_seconds import ActionKey, action_s
from gplan.graph.down_sets import Bools, Floats, Ints
from gplan.partition.candidates import stage_seconds
from gplan.partition.device_bounds import AlikeLayers
from gplan.partition.device_memory import part_bytes
from gplan.partition.dp import INFINITY, Combine
from gplan.partition.order_paths import order_paths
from gplan.partition.problem import Problem, compute_sums_s
from gplan.partition.recompute import PeakMoments, RecomputeSelector
from gplan.schedules.dependencies import INPUT_GRADIENT_KINDS
from gplan.schedules.in_flight import NUM_WARMUP, max_in_flight

_SLACK = 1e-9
_MOST_CANDIDATES = 1_000_000  # of all stages together
_MOST_ROUNDS = 12  # of leaving candidates out for one step
_PRECISION = 1e-3  # to which share the bound is found
_PROMISING = (1.002, 1.01, 1.04)  # times the bound: steps whose candidates make plans to begin with
_STEEPNESS = 8  # with which candidates with long paths are avoided in them
_RISE = 1.05  # from one step to the next longer one that is tried
# rows of the unit matrix: `moment_bytes` of them is how often each part counts
_ONE_OF_EACH = parts_of(np.eye(len(PARTS), dtype=np.int64))


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Where a stage of a chain may begin and end, by rising end, [E]: the same for all stages of a partition.

    Stage s of K begins at position s or later, and at least K - 1 - s layers come after it. So each has as many places,
    one position on from stage to stage.
    """

    first: Ints  # of stage 0
    end: Ints
    by_first: Ints  # the order by rising first
    firsts: Ints  # where each first begins in that order
    ends: Ints  # where each end begins
    most: int  # layers of a stage

    @property
    def width(self) -> int:
        """The number of positions at which a stage may begin."""
        return len(self.ends)

    def least_largest(self, values: Floats) -> float:
        """The smallest largest value of the stages of a partition, given the values of each stage, [S, E]; exact."""
        return float(self._least_to(values, np.maximum)[-1, -1])

    def least_before(self, values: Floats) -> Floats:
        """[S, ..., E]: the least sum of the stages before each candidate, given the values of each stage, [S, ..., E]."""
        least: Floats = self._least_to(values, np.add)[:-1, ..., self.first]
        return least

    def least_after(self, values: Floats) -> Floats:
        """[S, ..., E]: the least sum of the stages after each candidate."""
        least = np.full((len(values), *values.shape[1:-1], self.width), INFINITY)
        least[-1, ..., -1] = 0.0
        for stage in reversed(range(1, len(values))):
            sums = values[stage] + least[stage][..., self.end - 1]
            least[stage - 1] = np.minimum.reduceat(sums[..., self.by_first], self.firsts, axis=-1)
        found: Floats = least[..., self.end - 1]
        return found

    def best_ends(self, values: Floats) -> Ints:
        """[S]: where the stages of the partition end that has the smallest sum of some values of its stages, [S, E]."""
        least, ends, there = self._least_to(values, np.add), np.zeros(len(values), dtype=np.int64), self.width
        for stage in reversed(range(len(values))):
            ends[stage] = stage + there
            rows = np.flatnonzero(self.end == there)
            there = int(self.first[rows[np.argmin(values[stage, rows] + least[stage, self.first[rows]])]]) + 1
        return ends

    def _least_to(self, values: Floats, combine: Combine) -> Floats:
        """[S + 1, ..., W]: the least of the stages before each one, by where it begins in its window."""
        least = np.full((len(values) + 1, *values.shape[1:-1], self.width), INFINITY)
        least[0, ..., 0] = 0.0
        for stage, own in enumerate(values):
            least[stage + 1] = np.minimum.reduceat(combine(own, least[stage][..., self.first]), self.ends, axis=-1)
        return least

    def index(self, first: Ints, end: Ints) -> Ints:
        """Where pairs of positions are among all pairs."""
        found: Ints = self.ends[end - 1] + np.minimum(end, self.most) - (end - first)
        return found


@lru_cache(maxsize=512)
def window(width: int, most: int) -> Window:
    """Pairs of positions from 0 to `width`, the first before the other by at most `most`."""
    every = np.arange(1, width + 1)
    numbers = np.minimum(every, most)  # of pairs that end at each position
    starts, end = np.cumsum(numbers) - numbers, np.repeat(every, numbers)
    first = end - np.repeat(numbers + starts, numbers) + np.arange(len(end))
    by_first = np.argsort(first, kind="stable")
    firsts = np.searchsorted(first[by_first], np.arange(width))
    return Window(first=first, end=end, by_first=by_first, firsts=firsts, ends=starts, most=most)


@dataclass(frozen=True)
class ChainStages:
    """What the memory of the stages of a chain is made of, for one micro-batch size; shared by many bounds."""

    costs: Costs

    def emptied_parts(self, first: Ints, end: Ints) -> StageBytes[Ints]:
        """[E]: the parts of stages that recompute all layers, with nothing kept of them."""
        return self._emptied.parts(first, end)

    @cached_property
    def _emptied(self) -> PartTable:
        return PartTable(
            self.costs.num_positions,
            lambda first, end: self.selector.emptied_parts(first, end, self.costs.parts(first, end)),
        )

    @cached_property
    def whole(self) -> StageBytes[Ints]:
        """What the memory of a stage with all layers is made of, [1]."""
        return self.costs.parts(*self.costs.all_layers)

    @cached_property
    def alike(self) -> AlikeLayers:
        """The layers that most of the time is in."""
        return AlikeLayers(self.costs)

    @cached_property
    def selector(self) -> RecomputeSelector:
        """Which layers to recompute."""
        return RecomputeSelector(self.costs)


def most_layers(sums: Floats, most: float) -> int:
    """The most layers that together have at most so much of something, given the sums before each position; at least 1."""
    ends = np.searchsorted(sums, sums[:-1] + most * (1 + _SLACK), side="right") - 1
    return max(1, int((ends - np.arange(len(ends))).max()))


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
    num_pending = min(in_flight, stage + 1) if is_halved else 0
    if is_halved:  # between the halves a recomputed micro-batch is there as a whole
        restored = min(again, num_pending)
        again, kept = again - restored, kept + restored
    last_is_first = schedule == "gpipe" and recompute == "except-last"  # on the way back
    num_recomputing = int(again > 0 and not is_halved and not last_is_first)
    full = replace(
        RESTING,
        num_stashes=kept,
        num_checkpoints=again - num_recomputing,
        num_recomputing=num_recomputing,
        num_pending=num_pending,
        num_done=done,
        has_gradients=done > 0,
        workspace="" if num_recomputing else "weight_workspace" if is_halved else "backward_workspace",
    )
    return full, replace(RESTING, num_done=num_microbatches, has_gradients=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ways:
    """Seconds that the candidates of all stages take, with the recompute that they need to fit."""

    own: Floats  # [S, paths, E]: of each path
    before: Floats  # [S, 3, E]: of what comes from the stages before: a forward; and beside it gradients back,
    # the last ones, or those of a micro-batch that is recomputed
    after: Floats  # [S, 2, E]: of a forward and its gradients, with a micro-batch kept, and recomputed
    crossing: Floats  # [S, E]: of both transfers over the cut after it
    fits: Bools  # [S, E]: whether there is such a candidate
    rounds: Floats  # [S, paths, 2]: as in `OrderPaths`
    returns: Ints  # [paths]: as in `OrderPaths`, the same for all stages


@dataclass(frozen=True)
class ChainBounds:
    """Bounds over the partitions of a chain into one stage for each of some equal devices."""

    problem: Problem
    stages: ChainStages
    enough_s: float = INFINITY  # above which bounds are not made better

    @staticmethod
    def apply_to(problem: Problem) -> bool:
        """Whether there are bounds for such a problem."""
        costs = problem.costs
        return (
            costs.is_short_chain
            and problem.num_stages * (costs.num_positions - problem.num_stages) ** 2 <= 2 * _MOST_CANDIDATES
            and not problem.has_chunks
            and not problem.machine_devices
            and not problem.links
            and _moments(problem, 0, problem.recompute) is not None
        )

    @cached_property
    def quick_s(self) -> float:
        """A weaker bound: of single stages, with the shortest ways through all others."""
        _, fits = self._recomputes
        if self._window.least_largest(np.where(fits, 0.0, INFINITY)) == INFINITY:
            return INFINITY if self._most_fitting <= self._window.most else self.enough_s
        longest_s = self._window.least_largest(self._longest_s(self._ways.fits)) * (1 - _SLACK)
        return min(longest_s, self.enough_s)

    @cached_property
    def step_s(self) -> float:
        """A lower bound of the step of every partition that fits the memory; infinite where none fits."""
        low_s = self.quick_s
        if low_s == INFINITY or low_s >= self.enough_s:
            return low_s
        left = self._ways.fits
        if self.enough_s < INFINITY:
            found = self._left_within(self.enough_s, left)
            if found is None:
                return self.enough_s
            left = found
        high_s, factor = low_s, 1 + _PRECISION
        while (found := self._left_within(high_s * factor, left)) is None:
            low_s, high_s, factor = high_s, high_s * factor, _RISE
        low_s, high_s, left = high_s, high_s * factor, found
        while high_s > low_s * (1 + _PRECISION):
            middle_s = 0.5 * (low_s + high_s)
            found = self._left_within(middle_s, left)
            low_s, high_s, left = (middle_s, high_s, left) if found is None else (low_s, middle_s, found)
        return min(low_s, self.enough_s)

    def promising_ends(self) -> list[Ints]:
        """[S] each: where the stages of some partitions end that are made of candidates with short paths."""
        step_s, found = self.step_s, dict[tuple[int, ...], Ints]()
        if step_s == INFINITY:
            return []
        for factor in _PROMISING:
            left = self._left_within(step_s * factor, self._ways.fits)
            if left is not None:
                shares = (self._longest_s(left) / (step_s * factor)) ** _STEEPNESS
                for values in (np.where(left, self._ways.after[:, 1], INFINITY), shares):
                    ends = self._window.best_ends(values)
                    found[tuple(ends.tolist())] = ends
        return list(found.values())

    def _left_within(self, limit_s: float, left: Bools) -> Bools | None:
        """[S, E]: the candidates left of some that a step up to a limit may have; None where it cannot have one of each."""
        for _ in range(_MOST_ROUNDS):
            kept = left & (self._longest_s(left) * (1 - _SLACK) <= limit_s)
            if not kept.any(axis=1).all():
                return None
            if (kept == left).all():
                break
            left = kept
        return left

    def _longest_s(self, left: Bools) -> Floats:
        """[S, E]: the longest path of each candidate, with the shortest ways through the others that are left."""
        ways, hidden = self._ways, np.where(left, 0.0, INFINITY)
        earlier = self._window.least_before(ways.before + hidden[:, None])
        later = self._window.least_after(ways.after + hidden[:, None])
        reached = left & np.isfinite(earlier).all(axis=1) & np.isfinite(later).all(axis=1)
        earlier, later = (np.where(reached[:, None], x, 0.0) for x in (earlier, later))
        rounds = np.einsum("spk,ske->spe", ways.rounds, later + ways.crossing[:, None])
        longest: Floats = (ways.own + earlier[:, ways.returns] + rounds).max(axis=1)
        return np.where(reached, longest, INFINITY)

    @cached_property
    def _window(self) -> Window:
        """The stages that are looked at: no longer than fits the memory, and than a step of interest takes."""
        problem = self.problem
        most = min(self._most_fitting, most_layers(compute_sums_s(problem), self.enough_s / problem.num_microbatches))
        return window(problem.costs.num_positions - problem.num_stages, most)

    @cached_property
    def _most_fitting(self) -> int:
        """The most layers of a stage whose weights, gradients and optimizer's state fit the memory."""
        limit = self.problem.memory_bytes
        return most_layers(
            self.stages.alike.lasting_sums, INFINITY if limit is None else limit + 1
        )  # bytes are rounded

    @cached_property
    def _ways(self) -> _Ways:
        """What the candidates of all stages add to paths."""
        problem = self.problem
        paths = order_paths(
            problem.schedule,
            num_devices=problem.num_devices,
            num_microbatches=problem.num_microbatches,
            recompute="always" if problem.recompute == "selected" else problem.recompute,  # of which all is recomputed
        )
        recompute_s, fits = self._recomputes
        times = replace(self._times.take(self._places), recompute_s=recompute_s)
        crosses = np.arange(problem.num_stages)[:, None] < problem.num_stages - 1
        there_s, here_s = times.forward_s + crosses * times.activation_s, crosses * times.gradient_s
        own_s = np.stack([_action_s_of_stages(kind, times, again=again) for kind, again in paths.kinds], axis=1)
        own = paths.counts @ own_s
        own[:, paths.returns == 0] += times.optimizer_s[:, None]
        kinds = {kind for kind, _ in paths.kinds if kind in INPUT_GRADIENT_KINDS}
        kept_s, again_s = (
            np.minimum.reduce([_action_s_of_stages(kind, times, again=again) for kind in kinds])
            for again in (False, True)
        )
        # on the first stage the gradients end: all of the backward, whose second half it is there, and the update follow
        kept_s[0] = times.backward_s[0] + times.optimizer_s[0]
        again_s[0] = kept_s[0] + recompute_s[0]
        back_s = np.where(paths.last_again[:, None], again_s, kept_s)
        before = [there_s, there_s + here_s + back_s, there_s + here_s + again_s]
        return _Ways(
            own=own,
            before=np.stack(before, axis=1),
            after=np.stack([there_s + here_s + kept_s, there_s + here_s + again_s], axis=1),
            crossing=crosses * (times.activation_s + times.gradient_s),
            fits=fits,
            rounds=paths.rounds,
            returns=paths.returns,
        )

    @cached_property
    def _recomputes(self) -> tuple[Floats, Bools]:
        """[S, E] each: seconds of recompute for a micro-batch that is recomputed, at least; whether candidates may fit."""
        if self.problem.recompute == "selected":
            seconds, fits = zip(*map(self._selected, range(self.problem.num_stages)), strict=True)
            return np.array(seconds), np.array(fits)
        return self._times.recompute_s[self._places] * (self.problem.recompute != "never"), self._fits_unselected

    @cached_property
    def _places(self) -> Ints:
        """[S, E]: where the candidates of each stage are among those of `_times`."""
        every = window(self.problem.costs.num_positions - 1, self._window.most)
        stages = np.arange(self.problem.num_stages)[:, None]
        return every.index(self._window.first + stages, self._window.end + stages)

    @cached_property
    def _fits_unselected(self) -> Bools:
        """[S, E]: whether candidates fit with the recompute mode; with mode "selected", without recompute."""
        problem, limit = self.problem, self.problem.memory_bytes
        mode: RecomputeMode = "never" if problem.recompute == "selected" else problem.recompute
        fits = np.ones((problem.num_stages, len(self._window.first)), dtype=np.bool_)
        if limit is None:
            return fits
        moments = [_known_moments(problem, stage, mode) for stage in range(problem.num_stages)]
        counts = np.array([[moment_bytes(x, _ONE_OF_EACH) for x in of_stage] for of_stage in moments])
        boundaries = [problem.boundaries(stage) for stage in range(problem.num_stages)]
        for each in dict.fromkeys(boundaries):
            alike = np.array([x == each for x in boundaries]).nonzero()[0]
            first, end = self._window.first + alike[:, None], self._window.end + alike[:, None]
            rows = part_bytes(problem.costs, first, end, each)
            fits[alike] = np.einsum("smp,pse->mse", counts[alike], rows).max(axis=0) <= limit
        return fits

    def _selected(self, stage: int) -> tuple[Floats, Bools]:
        """[E] each: as `_recomputes`, of a stage's candidates that recompute as few of their layers as they need to fit."""
        is_kept, limit = self._fits_unselected[stage], self.problem.memory_bytes
        if limit is None or is_kept.all():
            return np.zeros(len(is_kept)), is_kept
        first, end = self._window.first + stage, self._window.end + stage
        parts = self.problem.costs.parts(first, end, self.problem.boundaries(stage))
        keeping, selecting = (_known_moments(self.problem, stage, mode) for mode in ("never", "always"))
        need = self.stages.selector.least_saved_bytes(
            self.stages.emptied_parts(first, end),
            parts.stash,
            PeakMoments(keeping=keeping, selecting=selecting),
            limit_bytes=limit,
        )
        least_s = self.stages.selector.least_seconds(first, end, need)
        fits = is_kept | np.isfinite(least_s)
        return np.where(is_kept | ~fits, 0.0, least_s), fits

    @cached_property
    def _times(self) -> StageSeconds[Floats]:
        """Of every stage, wherever it is."""
        every = window(self.problem.costs.num_positions - 1, self._window.most)
        return stage_seconds(self.problem, 0, every.first, every.end)


def _action_s_of_stages(kind: ActionKind, times: StageSeconds[Floats], *, again: bool) -> Floats:
    """[S, E]: seconds of an action, given the times of all stages; `action_s` treats only the first one differently."""
    found = np.empty_like(times.forward_s)
    for stage, some in ((0, slice(1)), (1, slice(1, len(found)))):
        if len(found) > stage:
            found[some] = action_s(ActionKey(stage, kind, again), times.take(some))
    return found


def _moments(problem: Problem, stage: int, recompute: RecomputeMode) -> tuple[Moment, ...] | None:
    mode: RecomputeMode = "always" if recompute == "selected" else recompute
    return least_moments(
        problem.schedule,
        num_devices=problem.num_devices,
        num_microbatches=problem.num_microbatches,
        stage=stage,
        recompute=mode,
    )


def _known_moments(problem: Problem, stage: int, recompute: RecomputeMode) -> tuple[Moment, ...]:
    """Those of a problem that `ChainBounds.apply_to`."""
    moments = _moments(problem, stage, recompute)
    assert moments is not None
    return moments
