"""Candidate stages: for every place in the pipeline the pairs of positions that could be its stage, with their times.

A partition into K stages is a path of K candidates from position 0 to the last one. Only candidates within a cap are made, and only
those that lie on such a path, fit the memory of their device and satisfy the constraints; so with a cap near the optimum few
are left, however long the chain or however many the down-sets.

    stage 0      stage 1      stage 2
    0 ----> 3    3 ----> 5    5 ----> 7
      \\--> 4    4 ----> 5               (all paths: 0 3 5 7 and 0 4 5 7)

Dynamic programs over these paths give the least cost from each position to the end, and from the beginning to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from gplan.core import StageSeconds
from gplan.graph.down_sets import Bools, DownSets, Floats, Ints
from gplan.partition.plan_evaluation import load_s, passes_s
from gplan.partition.problem import Problem, compute_sums_s, moments_of, peak_moments_of
from gplan.partition.validation import ConstraintCheck
from gplan.simulation.kernel import occupied

Combine: TypeAlias = Callable[[Floats, Floats], Floats]
"""How the costs of the stages add up: np.maximum or np.add."""

INFINITY = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePairs:
    """The candidates of one stage, [E] each, by rising first position."""

    first: Ints
    end: Ints


def suffix_tables(
    candidates: Sequence[StagePairs],
    values: Sequence[Floats],
    combine: Combine,
    *,
    num_positions: int,
    exempt: Sequence[Floats] | None = None,
) -> Floats:
    """[K+1, 2, P]: the least cost of stages s, ..., K-1 from each position on, `values[s]` being those of the candidates.

    With [:, 1] at most one of these stages may be costed by `exempt` instead. Exact; O(candidates).
    """
    num_stages = len(candidates)
    tables = np.full((num_stages + 1, 2, num_positions), INFINITY)
    tables[num_stages, :, -1] = 0.0
    for stage in reversed(range(num_stages)):
        some, (after, after_with_exempt) = candidates[stage], tables[stage + 1]
        _write_least(tables[stage, 0], some.first, combine(values[stage], after[some.end]))
        if exempt is None:
            tables[stage, 1] = tables[stage, 0]
            continue
        costs = combine(values[stage], after_with_exempt[some.end])
        costs = np.minimum(costs, combine(exempt[stage], after[some.end]))
        _write_least(tables[stage, 1], some.first, costs)
    return tables


def prefix_tables(
    candidates: Sequence[StagePairs], values: Sequence[Floats], combine: Combine, *, num_positions: int
) -> Floats:
    """[K+1, P]: the least cost of stages 0, ..., s-1 up to each position. Exact; O(candidates log candidates)."""
    tables = np.full((len(candidates) + 1, num_positions), INFINITY)
    tables[0, 0] = 0.0
    for stage, some in enumerate(candidates):
        by_end = np.argsort(some.end, kind="stable")
        costs = combine(values[stage], tables[stage][some.first])
        _write_least(tables[stage + 1], some.end[by_end], costs[by_end])
    return tables


def best_path(
    candidates: Sequence[StagePairs],
    tables: Floats,
    values: Sequence[Floats],
    combine: Combine,
    *,
    exempt: Sequence[Floats] | None = None,
) -> Ints:
    """[K]: which candidate of each stage one path takes that attains `tables[0, 1, 0]` (of `suffix_tables`), if finite."""
    path, first, may_exempt = [], 0, 1
    for stage, some in enumerate(candidates):
        rows = rows_from(some, first)
        after = tables[stage + 1][:, some.end[rows]]
        row = combine(values[stage][rows], after[may_exempt])
        if exempt is not None and may_exempt:
            exempt_row = combine(exempt[stage][rows], after[0])
            if exempt_row.min() < row.min():
                row, may_exempt = exempt_row, 0
        path.append(rows.start + int(row.argmin()))
        first = int(some.end[path[-1]])
    return np.array(path, dtype=np.int64)


def rows_from(candidates: StagePairs, first: int) -> slice:
    """Where the candidates from one position are."""
    return slice(
        int(np.searchsorted(candidates.first, first)), int(np.searchsorted(candidates.first, first, side="right"))
    )


def _write_least(table: Floats, positions: Ints, costs: Floats) -> None:
    """Write the least of the costs at each position; positions are sorted."""
    starts = np.flatnonzero(np.concatenate([[True], positions[1:] != positions[:-1]]))
    table[positions[starts]] = np.minimum.reduceat(costs, starts)


MOST_CANDIDATES = 12_000_000
"""More than these are not held at once; other methods serve then."""

_CHUNK = 2_000_000  # pairs looked at at once
_SLACK = 1e-9  # share by which sums may be off before they are looked at exactly


class TooManyCandidates(Exception):
    """There are more candidate stages than are held at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates(StagePairs):
    """Candidates with their times, also by rising end."""

    times: StageSeconds[Floats]
    load_s: Floats

    def __len__(self) -> int:
        return len(self.first)

    def take(self, index: Ints | Bools) -> Candidates:
        """Some of them, in the same order."""
        return Candidates(
            first=self.first[index], end=self.end[index], times=self.times.take(index), load_s=self.load_s[index]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateLimit:
    """Which stages are looked at: those within seconds of one micro-batch, by their load or by computing alone."""

    by_load: bool
    most_s: Sequence[float]  # [K]: the most of each stage, wherever it begins
    most_from_s: Callable[[Ints], Floats] | None = None  # [E]: the most of a stage that begins at these positions
    transfers_s: float = float("inf")  # the most that both transfers over one cut may take

    @classmethod
    def of_load(cls, limit_s: float, *, num_stages: int) -> CandidateLimit:
        """Loads up to a limit."""
        return cls(by_load=True, most_s=[limit_s] * num_stages)

    def seconds_of(self, stage: int, first: Ints) -> Floats:
        """[E]: the most of the stage from each of these positions."""
        most = np.full(len(first), self.most_s[stage])
        return most if self.most_from_s is None else np.minimum(most, self.most_from_s(first))


def candidates_within(problem: Problem, cap: CandidateLimit, *, most: int = MOST_CANDIDATES) -> list[Candidates] | None:
    """The candidates of every stage that are within the cap and on a path; None where there is no path.

    Raises TooManyCandidates where there are more than `most`, rather than filling the memory.
    """
    constraints, candidates, starts = ConstraintCheck(problem), list[Candidates](), np.array([0])
    for stage in range(problem.num_stages):
        left = most - sum(len(x) for x in candidates)
        made = _candidates_from(problem, cap, constraints, stage, starts, most=left)
        if not len(made):
            return None
        candidates.append(made)
        starts = np.unique(made.end)
    return on_paths(candidates, problem.costs.num_positions)


def on_paths(candidates: list[Candidates], num_positions: int) -> list[Candidates] | None:
    """Without the candidates that lie on no path from the first position to the last; None where there is no path."""
    kept: list[Candidates] = []
    reaches = np.zeros(num_positions, dtype=np.bool_)
    reaches[-1] = True
    for some in reversed(candidates):
        some = some.take(reaches[some.end])
        reaches = np.zeros(num_positions, dtype=np.bool_)
        reaches[some.first] = True
        kept.append(some)
    if not reaches[0]:
        return None
    reached, forward = np.zeros(num_positions, dtype=np.bool_), []
    reached[0] = True
    for some in reversed(kept):
        some = some.take(reached[some.first])
        reached = np.zeros(num_positions, dtype=np.bool_)
        reached[some.end] = True
        forward.append(some)
    return forward


def ends_of(candidates: Sequence[Candidates], path: Ints) -> Ints:
    """[S]: at which positions the stages of a partition end, given the candidates that it takes."""
    return np.array([some.end[i] for some, i in zip(candidates, path, strict=True)], dtype=np.int64)


def path_of(candidates: Sequence[Candidates], ends: Sequence[int] | Ints) -> Ints | None:
    """[S]: the candidates that a partition takes, given at which positions its stages end; None where one is not there."""
    path, first = [], 0
    for some, end in zip(candidates, ends, strict=True):
        rows = rows_from(some, first)
        index = rows.start + int(np.searchsorted(some.end[rows], end))
        if index >= rows.stop or some.end[index] != end:
            return None
        path.append(index)
        first = int(end)
    return np.array(path, dtype=np.int64)


def fitting(problem: Problem, stage: int, candidates: Candidates) -> Candidates:
    """The candidates of a stage that fit the memory of its device, with the layers recomputed that must be for that."""
    limit, first, end = problem.memory_of(stage), candidates.first, candidates.end
    if limit is None or not len(candidates):
        return candidates
    if problem.recompute == "selected":
        peak_moments = peak_moments_of(problem, stage)
        seconds = problem.selector.seconds(first, end, peak_moments, limit_bytes=limit) / problem.speed(stage)
        times = replace(candidates.times, recompute_s=seconds)
        selected = replace(candidates, times=times, load_s=loads_s(problem, stage, first, times))
        return selected.take(np.isfinite(seconds))
    if problem.has_chunks:  # the most that the device holds of this stage alone
        stages = problem.stages_by_device[problem.devices[stage]]
        counts = moments_of(problem, *stages).counts[:, stages.index(stage)]
        parts = problem.costs.part_rows(first, end, problem.boundaries(stage))
        return candidates.take((counts @ parts).max(axis=0) <= limit)
    return candidates.take(problem.peak_bytes(stage, first, end) <= limit)


def pairs_within(
    downsets: DownSets, sums: Floats, starts: Ints, ends: Ints, *, most: Floats, low: float, high: float
) -> Iterator[tuple[Ints, Ints]]:
    """Pairs of positions from each of `starts` to those of `ends` it lies within whose sum is at most that much larger.

    `sums` must not fall from a position to one that contains it; only ends with sums from `low` to `high` are looked
    at. In chunks, by rising first, then by rising end.
    """
    by_sum = ends[np.argsort(sums[ends], kind="stable")]
    ordered = sums[by_sum]
    begin = np.searchsorted(ordered, np.maximum(sums[starts], low), side="left")
    beyond = np.searchsorted(ordered, np.minimum(sums[starts] + most, high), side="right")
    counts = np.maximum(beyond - begin, 0)
    totals = np.cumsum(counts)
    lower = 0
    while lower < len(starts):
        done = totals[lower - 1] if lower else 0
        upper = max(lower + 1, int(np.searchsorted(totals, done + _CHUNK, side="right")))
        some = counts[lower:upper]
        offsets = np.arange(some.sum()) - np.repeat(np.cumsum(some) - some, some)
        first, end = np.repeat(starts[lower:upper], some), by_sum[np.repeat(begin[lower:upper], some) + offsets]
        inside = downsets.are_stages(first, end)
        first, end = first[inside], end[inside]
        order = np.lexsort((end, first))
        yield first[order], end[order]
        lower = upper


def stage_seconds(problem: Problem, stage: int, first: Ints, end: Ints) -> StageSeconds[Floats]:
    """[E] each: for how long candidates keep the device of a stage; for selected layers, see `fitting`."""
    columns = problem.costs.seconds(
        first,
        end,
        problem.stage_places[stage],
        halves=problem.splits_backward,
        recomputes=problem.recompute != "selected",
    )
    return occupied(columns)


def loads_s(problem: Problem, stage: int, first: Ints, times: StageSeconds[Floats]) -> Floats:
    """[E]: the loads of candidates."""
    return load_s(problem, stage, times, problem.activation_s(stage - 1)[first])


def _candidates_from(
    problem: Problem, cap: CandidateLimit, constraints: ConstraintCheck, stage: int, starts: Ints, *, most: int
) -> Candidates:
    """The candidates of a stage from these positions that are within the cap, fit the memory and satisfy the constraints."""
    downsets, sums = problem.costs.downsets, compute_sums_s(problem)
    total, slack = float(sums[-1]), _SLACK * float(sums[-1])
    if stage == problem.num_stages - 1:
        ends, low, high = np.array([problem.costs.num_positions - 1]), total - slack, total + slack
    else:  # the stages before and after it are within the cap too, and so is what crosses the cut after it
        limits = [most_s * problem.speed(s) for s, most_s in enumerate(cap.most_s)]
        low, high = total - sum(limits[stage + 1 :]) - slack, sum(limits[: stage + 1]) + slack
        there_s, back_s = problem.activation_s(stage), problem.gradient_s(stage)
        usable = there_s + back_s <= cap.transfers_s
        if cap.by_load:
            usable &= (back_s <= cap.most_s[stage]) & (there_s <= cap.most_s[stage + 1])
        usable[[0, -1]] = False
        ends = np.flatnonzero(usable)
    longest_s, num_after = cap.seconds_of(stage, starts), problem.num_stages - 1 - stage
    span = np.maximum(longest_s * problem.speed(stage) * (1 + _SLACK), 0.0)
    parts, count = list[Candidates](), 0
    for first, end in pairs_within(downsets, sums, starts, ends, most=span, low=low, high=high):
        enough = problem.num_layers - downsets.num_before[end] >= num_after
        if num_after == 0:
            enough = end == downsets.size - 1
        enough &= constraints.allows(stage, first, end)
        first, end = first[enough], end[enough]
        most_s, times = longest_s[np.searchsorted(starts, first)], stage_seconds(problem, stage, first, end)
        load = loads_s(problem, stage, first, times)
        within = load <= most_s if cap.by_load else passes_s(problem, stage, times) <= most_s * (1 + _SLACK)
        some = fitting(problem, stage, Candidates(first=first, end=end, times=times, load_s=load).take(within))
        if problem.recompute == "selected" and cap.by_load:
            some = some.take(some.load_s <= cap.seconds_of(stage, some.first))
        parts.append(some)
        count += len(some)
        if count > most:
            raise TooManyCandidates
    return Candidates(
        first=np.concatenate([x.first for x in parts]),
        end=np.concatenate([x.end for x in parts]),
        times=StageSeconds.joined([x.times for x in parts]),
        load_s=np.concatenate([x.load_s for x in parts]),
    )
