"""Recompute "selected": which layers of a stage to recompute so that it fits its memory in the least time.

For a micro-batch a stage keeps the stash of all its layers, less what each recomputed layer v saves:
    saved_v = stash_v - made_v - read_v        (bytes)
made_v are its outputs that later layers keep; read_v its inputs that no layer keeps, which become its checkpoint, except
inputs from before the stage, which are in the receive buffers. While a recomputed layer runs, it needs
t_v = stash_v + max(forward, backward workspace), in a backward beside gradients that wait or pass. The search takes the
largest t_v as the workspace of the stage, beside all that it keeps. Once a choice fits, its memory is computed layer by
layer, and is never more. A stage that recomputes nothing is as with "never".

For each bound on t_v this is a knapsack, solved by Pareto fronts (`ParetoFront`): exact, unless a front exceeds
`MOST_LABELS`; `RecomputeSelector.inflation` then bounds the error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from msgspec import structs

from gplan.core.plan import StageBytes
from gplan.cost.memory_moments import Moments
from gplan.cost.part_table import PartTable, rows_of
from gplan.cost.stage_table import StageTable
from gplan.cost.workspaces import DIRECTIONS
from gplan.graph.boundary import values_of
from gplan.graph.down_sets import Floats, Ints

MOST_LABELS = 512
"""The longest front; in longer ones, choices with nearly equal seconds are merged."""


@dataclass(eq=False, slots=True, kw_only=True)
class ParetoFront:
    """The Pareto front of a knapsack over a sequence of layers: bytes saved and seconds added, both strictly rising.

    Fronts of equal sequences are shared, so models of equal layers have few.
    """

    saved_bytes: Ints
    seconds: Floats
    error_s: float = 0.0  # by which the seconds of a choice may exceed the minimum
    before: ParetoFront | None = None  # without the last layer
    last: tuple[int, float] = (0, 0.0)  # bytes that the last layer saves, and seconds that it adds
    longer: dict[tuple[int, float], ParetoFront] = field(default_factory=dict)

    def grown(self, last: tuple[int, float]) -> ParetoFront:
        """The front with one more layer, computed once."""
        if last not in self.longer:
            own_bytes, own_s = last
            saved = np.concatenate([self.saved_bytes, self.saved_bytes + own_bytes])
            seconds = np.concatenate([self.seconds, self.seconds + own_s])
            order = np.lexsort((-saved, seconds))
            saved, seconds = saved[order], seconds[order]
            most_before = np.concatenate([[-1], np.maximum.accumulate(saved)[:-1]])
            useful = saved > most_before
            saved, seconds, error_s = _merged(saved[useful], seconds[useful])
            self.longer[last] = ParetoFront(
                saved_bytes=saved, seconds=seconds, error_s=self.error_s + error_s, before=self, last=last
            )
        return self.longer[last]

    def index(self, need_bytes: int) -> int:
        """The index of the cheapest choice that saves at least so many bytes; the length of the front if none does."""
        return int(np.searchsorted(self.saved_bytes, need_bytes))

    def taken(self, index: int) -> list[bool]:
        """For each layer of the sequence, whether the choice with this index recomputes it."""
        found, front = [], self
        while front.before is not None:
            saved, seconds = front.saved_bytes[index], front.seconds[index]
            front, (own_bytes, own_s) = front.before, front.last
            same = front.index(saved)
            is_kept = same < len(front.seconds) and (front.saved_bytes[same], front.seconds[same]) == (saved, seconds)
            index = same if is_kept else front.index(saved - own_bytes)
            assert is_kept or front.seconds[index] + own_s == seconds, "a label comes from the front before"
            found.append(not is_kept)
        return found[::-1]


def _merged(saved: Ints, seconds: Floats) -> tuple[Ints, Floats, float]:
    """At most about MOST_LABELS of the choices, the last of each bucket of seconds, and the largest error of that."""
    if len(seconds) <= MOST_LABELS:
        return saved, seconds, 0.0
    buckets = np.ceil(seconds / seconds[-1] * (MOST_LABELS - 1))
    is_last = np.concatenate([buckets[1:] != buckets[:-1], [True]])
    into = np.flatnonzero(is_last)[np.cumsum(is_last) - is_last]
    return saved[is_last], seconds[is_last], float((seconds[into] - seconds).max())


_IMPOSSIBLE = np.iinfo(np.int64).max // 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMoments:
    """The moments at which the memory of a stage can peak: without recompute, and with selected layers."""

    keeping: Moments
    selecting: Moments

    @property
    def key(self) -> tuple[bytes, bytes]:
        """Equal for stages that hold the same at their moments."""
        return self.keeping.key, self.selecting.key


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeChoice:
    """The layers that a stage recomputes, rising, the seconds they add, and the parts of its memory."""

    layers: tuple[int, ...]
    recompute_s: float
    moments: Moments
    parts: StageBytes[Ints]  # of one stage, [1]


@dataclass(frozen=True)
class RecomputeSelector:
    """Selects the layers to recompute for candidate stages, at one micro-batch size."""

    costs: StageTable

    def seconds(self, first: Ints, end: Ints, peak_moments: PeakMoments, *, limit_bytes: int) -> Floats:
        """[E]: the least seconds of recompute with which each stage fits; infinite if it cannot."""
        parts = self.costs.parts(first, end)
        found = np.where(_peak_of(peak_moments.keeping, parts) <= limit_bytes, 0.0, np.inf)
        left = np.flatnonzero(found > 0)
        if not len(left) or not len(self._levels):
            return found
        needs = self._needs(self._base(first, end, parts), parts.stash, peak_moments, limit_bytes)
        for i in left:
            level, index = self._cheapest(int(first[i]), int(end[i]), [int(need[i]) for need in needs])
            if level is not None:
                front = self._front(int(first[i]), int(end[i]), level)
                found[i] = front.seconds[index]
                if front.error_s:
                    whole_s = float(self.costs.sums.seconds("backward", first[i : i + 1], end[i : i + 1])[0] + found[i])
                    rest_s = whole_s - front.error_s
                    self._inflations.append(whole_s / rest_s if rest_s > 0 else math.inf)
        return found

    def choice(self, first: int, end: int, peak_moments: PeakMoments, *, limit_bytes: int | None) -> RecomputeChoice:
        """The layers to recompute of one stage: the cheapest that fit, or the least memory if none fit."""
        one, other = np.array([first]), np.array([end])
        parts = self.costs.parts(one, other)
        kept = RecomputeChoice(layers=(), recompute_s=0.0, moments=peak_moments.keeping, parts=parts)
        if limit_bytes is None or _peak_of(peak_moments.keeping, parts)[0] <= limit_bytes or not len(self._levels):
            return kept
        base = self._base(one, other, parts)
        needs = self._needs(base, parts.stash, peak_moments, limit_bytes)
        level, index = self._cheapest(first, end, [int(need[0]) for need in needs])
        fits = level is not None
        if level is None:
            level, index = int(np.argmin(self._least_peaks(one, other, parts, peak_moments))) - 1, -1
        if level < 0:
            return kept
        front, sequence = self._front(first, end, level), self._sequence(first, end, level)
        index %= len(front.seconds)
        saved = {v: x for (v, (x, _)), is_taken in zip(sequence, front.taken(index), strict=True) if is_taken}
        running = max((self._running_bytes[v] for v in saved), default=0)
        searched = _at_level(base, running, kept_bytes=parts.stash - sum(saved.values()))
        return RecomputeChoice(
            layers=tuple(saved),
            recompute_s=float(front.seconds[index]),
            moments=peak_moments.selecting,
            parts=self._layer_by_layer(first, end, searched, saved) if fits else searched,
        )

    def least_peak_bytes(self, first: Ints, end: Ints, peak_moments: PeakMoments) -> Ints:
        """[E]: the least peak memory of each stage over all selections."""
        peaks: Ints = np.minimum.reduce(self._least_peaks(first, end, self.costs.parts(first, end), peak_moments))
        return peaks

    @property
    def inflation(self) -> float:
        """The largest factor by which a computed backward may exceed the optimal one; 1: exact."""
        return max(self._inflations, default=1.0)

    @cached_property
    def _inflations(self) -> list[float]:
        return []

    @cached_property
    def _nothing(self) -> ParetoFront:
        return ParetoFront(saved_bytes=np.zeros(1, dtype=np.int64), seconds=np.zeros(1))

    @cached_property
    def _fronts(self) -> dict[tuple[int, int, int], ParetoFront]:
        return {}

    @cached_property
    def _seconds(self) -> list[float]:
        """[L]: of a single layer, by its slower clock."""
        return [float(x) for x in np.maximum.reduce(self.costs.sums.clocks_s("last_recompute"))]

    @cached_property
    def _running_bytes(self) -> list[int]:
        """[L]: t_v."""
        costs = self.costs.sums.costs
        return [x.stash_bytes + max(x.forward_workspace_bytes, x.last_backward_workspace_bytes) for x in costs]

    @cached_property
    def _levels(self) -> list[int]:
        """All different t_v of layers that can save memory, rising; a level bounds the t_v of recomputed layers."""
        able = [v for v in range(self.costs.num_layers) if self.saved_at_most[v] > 0]
        return sorted({self._running_bytes[v] for v in able})

    @cached_property
    def saved_at_most(self) -> list[int]:
        """[L]: saved_v, bytes of the stash of a micro-batch that recomputing the layer saves, if all inputs of the layer come from before the stage."""
        saved = [x.stash_bytes for x in self.costs.sums.costs]
        for value in values_of(self.costs.profile):
            if value.producer is None:
                continue
            cost = value.costs[0]
            saved[value.producer] -= cost.num_bytes - cost.unsaved_bytes
        if not self.costs.profile.values:  # the outputs of a chain are not among its values
            saved[-1] -= int(self.costs.crossing.kept_bytes[-1])
        return saved

    @cached_property
    def _reads(self) -> dict[int, list[tuple[int, int]]]:
        """For each layer the producers of its inputs, with the bytes that no layer keeps."""
        reads: dict[int, list[tuple[int, int]]] = {}
        for (producer, readers), num_bytes in self.costs.workspaces.unsaved:
            if producer is not None:
                for reader in readers:
                    reads.setdefault(reader, []).append((producer, num_bytes))
        return reads

    def _sequence(self, first: int, end: int, level: int) -> list[tuple[int, tuple[int, float]]]:
        """The layers of a stage that can save memory within a level, with the bytes they save and the seconds they add."""
        layers = self.costs.downsets.layers(first, end)
        inside, found = set(layers) if self._reads else set[int](), []
        for v in layers:
            saved = self.saved_at_most[v] - sum(x for made, x in self._reads.get(v, ()) if made in inside)
            if saved > 0 and self._running_bytes[v] <= self._levels[level]:
                found.append((v, (saved, self._seconds[v])))
        return found

    def _front(self, first: int, end: int, level: int) -> ParetoFront:
        key = (first, end, level)
        if key not in self._fronts:
            front = self._nothing
            for _, last in self._sequence(first, end, level):
                front = front.grown(last)
            self._fronts[key] = front
        return self._fronts[key]

    def _needs(self, base: _Base, stash: Ints, peak_moments: PeakMoments, limit_bytes: int) -> list[Ints]:
        """For each level, [E]: the bytes to save so that a stage fits."""
        emptied = (_at_level(base, level_bytes) for level_bytes in self._levels)
        return [_saved_bytes(empty, stash, peak_moments, limit_bytes) for empty in emptied]

    def _cheapest(self, first: int, end: int, needs: Sequence[int]) -> tuple[int | None, int]:
        """The level and index of its front with the least seconds; None as the level if nothing fits."""
        best: tuple[int | None, int] = (None, 0)
        highest = self._front(first, end, len(needs) - 1)
        least = highest.index(needs[0])
        if least == len(highest.seconds):
            return best
        least_s, best_s = highest.seconds[least], np.inf
        for level in reversed(range(len(needs))):
            front = self._front(first, end, level)
            index = front.index(needs[level])
            if index < len(front.seconds) and front.seconds[index] < best_s:
                best, best_s = (level, index), front.seconds[index]
            if best_s <= least_s:
                break
        return best

    def _layer_by_layer(
        self, first: int, end: int, parts: StageBytes[Ints], saved: Mapping[int, int]
    ) -> StageBytes[Ints]:
        """The parts of a stage whose layers `saved` save so many bytes, with its workspaces layer by layer."""
        costs = list(self.costs.sums.costs)
        for v, saved_bytes in saved.items():
            kept_bytes, cost = costs[v].stash_bytes - saved_bytes, costs[v]
            costs[v] = replace(
                cost,
                stash_bytes=kept_bytes,
                pending_bytes=0,
                forward_workspace_bytes=saved_bytes + cost.forward_workspace_bytes,
                backward_workspace_bytes=self._running_bytes[v] - kept_bytes,
                gathering_bytes=0,
                leftovers=(),
            )
        workspaces, one, other = replace(self.costs.workspaces, layer_costs=costs), np.array([first]), np.array([end])
        _, passing_unsaved = self.costs.pass_through.activation_bytes(one, other)
        unsaved_sent = self.costs.unsaved_sent(other, passing_unsaved)
        forward = workspaces.above_stash("forward", one, other, unsaved_sent=unsaved_sent)
        backward = workspaces.above_stash("backward", one, other)
        return _selecting(parts, forward=forward, backward=backward, kept_bytes=parts.checkpoint)

    def _least_peaks(self, first: Ints, end: Ints, parts: StageBytes[Ints], peak_moments: PeakMoments) -> list[Ints]:
        """The peaks, [E] each: without recompute, and with all layers of each level recomputed."""
        peaks, base = [_peak_of(peak_moments.keeping, parts)], self._base(first, end, parts)
        pairs = list(zip(first.tolist(), end.tolist(), strict=True))
        for level, level_bytes in enumerate(self._levels):
            saved = np.array([self._front(i, j, level).saved_bytes[-1] for i, j in pairs], dtype=np.int64)
            peaks.append(_peak_of(peak_moments.selecting, _at_level(base, level_bytes, kept_bytes=parts.stash - saved)))
        return peaks

    def _base(self, first: Ints, end: Ints, parts: StageBytes[Ints]) -> _Base:
        rows = self._workspace_table.rows if self.costs.is_short_chain else self._workspaces
        forward, backward, beside = rows(first, end)
        emptied = _selecting(parts, forward=forward, backward=backward, kept_bytes=np.zeros_like(parts.stash))
        return _Base(emptied, beside)

    def _workspaces(self, first: Ints, end: Ints) -> Ints:
        """[3, E]: the largest workspaces of a layer, forward and backward, and what is there beside in a backward."""
        workspaces = self.costs.workspaces
        largest = (workspaces.largest(x, first, end) for x in DIRECTIONS)
        return np.array([*largest, workspaces.beside_backward(first, end)])

    @cached_property
    def _workspace_table(self) -> PartTable:
        return PartTable(self.costs.num_positions, self._workspaces)


def _peak_of(moments: Moments, parts: StageBytes[Ints]) -> Ints:
    return moments.peak([rows_of(parts, parts.stash.shape)])


def _saved_bytes(emptied: StageBytes[Ints], stash: Ints, peak_moments: PeakMoments, limit_bytes: int) -> Ints:
    """[E]: the bytes of their stash that stages must save so that they fit, given their parts with nothing kept."""
    need, moments = np.zeros_like(stash), peak_moments.selecting
    kept = moments.of("checkpoint") + moments.of("recomputed_stash")
    for num_kept, held in zip(kept.tolist(), moments.held([rows_of(emptied, stash.shape)]), strict=True):
        available = limit_bytes - held
        if num_kept:
            need = np.maximum(need, stash - available // num_kept)
        need = np.where(available < 0, _IMPOSSIBLE, need)
    return need


def _selecting(parts: StageBytes[Ints], *, forward: Ints, backward: Ints, kept_bytes: Ints) -> StageBytes[Ints]:
    """The parts of stages that recompute selected layers: they keep so many bytes, and have these workspaces."""
    return structs.replace(
        parts,
        stash=np.zeros_like(kept_bytes),
        checkpoint=kept_bytes,
        recomputed_stash=kept_bytes,
        forward_workspace=forward,
        recompute_workspace=forward,
        recomputing_workspace=backward,
        backward_workspace=backward,
    )


class _Base(NamedTuple):
    """Stages that keep nothing, before it is known which layers they recompute."""

    parts: StageBytes[Ints]  # with the largest workspaces of a single layer or the loss
    beside: Ints  # [E]: what is there in a backward beside a layer that is recomputed


def _at_level(base: _Base, level_bytes: int, *, kept_bytes: Ints | None = None) -> StageBytes[Ints]:
    """The parts of stages that recompute layers of at most this t_v, which is there beside all that is kept."""
    return _selecting(
        base.parts,
        forward=np.maximum(base.parts.recompute_workspace, level_bytes),
        backward=np.maximum(base.parts.recomputing_workspace, level_bytes + base.beside),
        kept_bytes=base.parts.checkpoint if kept_bytes is None else kept_bytes,
    )
