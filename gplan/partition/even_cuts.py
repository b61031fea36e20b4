"""Good partitions of a language model without a search: blocks counted out by rule, the best of them by simulation.

All devices get equally many blocks; the last gets fewer, as it also has the head. If that is more blocks than there are,
one is taken off each of some devices, in a few orders. With several stages a device, the stages of one round of interleaved
1F1B get equally many blocks on all devices, as all wait for the longest stage of a round. For blocks that differ there are
also cuts at equal shares of the time of all layers. Once the pipeline is full, a step grows by the same seconds with every K
micro-batches, so each partition is simulated with few of them, and its step extrapolated: by the growth between two such
steps, or what the fullest device computes, if that is more. A descent by moves of single layers betters a partition.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from gplan.core import StageSeconds
from gplan.graph.down_sets import Floats, Ints
from gplan.partition.batch_simulation import Delay, simulate_window
from gplan.partition.candidates import stage_seconds
from gplan.partition.problem import Problem, device_peaks

_MOST_ROUND_ORDERS = 8  # in which the rounds of a device's stages get one block more
_MOST_HELD = 3  # times K micro-batches: with more of them an order of 1F1B holds no more
_CHECKED_PLACES = (0.0, 0.3, 0.7, 1.0)  # in the pipeline, of the devices whose memory is computed for all partitions
_NUM_CHECKED = 4  # of the fastest partitions: their memory is computed on all devices
_EXACT = 60_000  # actions of a step: those of fewer are all simulated
_MOST_NEIGHBOURS = 400  # partitions with one layer moved that are tried at once
_NUM_MOVES = 16  # of the fastest of them: their memory is computed
_SLACK = 1e-4  # share of the step by which a move betters it at least
_SIMULATED = (2, 3)  # times K micro-batches: the steps that are simulated, to extrapolate from


@dataclass(frozen=True, slots=True, kw_only=True)
class EvenCut:
    """A partition with its predicted step and memory."""

    ends: Ints  # [S], where the stages end
    step_s: float
    peak_bytes: int  # the most that tensors take on a device

    def stages(self) -> tuple[tuple[int, ...], ...]:
        """The layers of each stage."""
        return tuple(tuple(range(first, end)) for first, end in pairwise([0, *self.ends.tolist()]))


def priced_cut(problem: Problem, ends: Ints) -> EvenCut:
    """A partition with its simulated step, extrapolated where there are very many actions."""
    columns = np.asarray(ends)[:, None]
    is_short = 2 * problem.num_stages * problem.num_microbatches <= _EXACT
    window = _window(problem, columns)
    steps_s = _steps_s(problem, window, problem.num_microbatches) if is_short else _estimates_s(problem, columns)
    step_s = float(steps_s[0])
    return EvenCut(ends=columns[:, 0], step_s=step_s, peak_bytes=int(_peaks(problem, columns)[0]))


def with_few_microbatches(problem: Problem) -> Problem:
    """The same problem with as few micro-batches as hold as much memory as all of them."""
    few = problem.costs.with_microbatches(min(problem.num_microbatches, _MOST_HELD * problem.num_devices))
    return replace(problem, costs=few)


def best_even_cut(problem: Problem, blocks: range, *, head: int) -> EvenCut | None:
    """The best of the partitions by rule that fit the memory; None where none does.

    The layers from `head` on are on the last stage. Nothing is proven.
    """
    ends = _possible(problem, [*_cuts_by_counts(problem, blocks, head), *_cuts_by_time(problem, blocks)])
    if not ends.size:
        return None
    limit = problem.memory_of(0)
    if limit is not None:
        ends = ends[:, _peaks(problem, ends, _CHECKED_PLACES) <= limit]
    steps_s = _estimates_s(problem, ends) if ends.size else np.zeros(0)
    for i in np.argsort(steps_s, kind="stable")[:_NUM_CHECKED]:
        peaks = _peaks(problem, ends[:, i : i + 1])
        if limit is None or peaks[0] <= limit:
            return EvenCut(ends=ends[:, i], step_s=float(steps_s[i]), peak_bytes=int(peaks[0]))
    return None


def least_even_peak(problem: Problem, blocks: range, *, head: int) -> float:
    """The least that the fullest device holds, of the partitions by rule; infinite where there are none."""
    ends = _possible(problem, [*_cuts_by_counts(problem, blocks, head), *_cuts_by_time(problem, blocks)])
    return float(_peaks(problem, ends).min()) if ends.size else math.inf


def bettered_cut(
    problem: Problem, blocks: range, *, head: int, start: EvenCut | None, deadline_s: float
) -> EvenCut | None:
    """A partition, or the one by rule that exceeds the memory least, bettered by moving single layers between stages.

    Until it fits, its largest peak is made smaller, then its step. A descent: it ends where no move that was tried helps;
    None where it does not fit then.
    """
    limit, ends = problem.memory_of(0), None if start is None else start.ends
    if ends is None:
        found = _possible(problem, [*_cuts_by_counts(problem, blocks, head), *_cuts_by_time(problem, blocks)])
        if not found.size:
            return None
        over = _over(_peaks(problem, found, _CHECKED_PLACES), limit)
        ends = found[:, int(np.lexsort((_estimates_s(problem, found), over))[0])]
    step_s, peak = float(_estimates_s(problem, ends[:, None])[0]), int(_peaks(problem, ends[:, None])[0])
    random = np.random.default_rng(0)
    while time.perf_counter() < deadline_s:
        near = _neighbours(problem, ends, random)
        if not near.size:
            break
        if _over(peak, limit):
            peaks = _peaks(problem, near)
            i = int(np.argmin(peaks))
            if peaks[i] >= peak:
                break
            ends, peak = near[:, i], int(peaks[i])
            step_s = float(_estimates_s(problem, ends[:, None])[0])
            continue
        steps_s = _estimates_s(problem, near)
        fast = [int(x) for x in np.argsort(steps_s, kind="stable")[:_NUM_MOVES] if steps_s[x] < step_s * (1 - _SLACK)]
        peaks = _peaks(problem, near[:, fast]) if fast else np.zeros(0, dtype=np.int64)
        fits = np.flatnonzero(_over(peaks, limit) == 0)
        if not fits.size:
            break
        i = fast[fits[0]]
        ends, step_s, peak = near[:, i], float(steps_s[i]), int(peaks[fits[0]])
    return None if _over(peak, limit) else priced_cut(problem, ends)


def _over(peaks: Any, limit: int | None) -> Any:
    """By how many bytes peaks are above the limit."""
    return np.maximum(0, np.asarray(peaks) - limit) if limit is not None else 0 * np.asarray(peaks)


def _neighbours(problem: Problem, ends: Ints, random: np.random.Generator) -> Ints:
    """[S, N]: partitions with one layer more on one stage and one less on another; some of them where there are many."""
    pairs = [(i, j) for i in range(len(ends)) for j in range(len(ends)) if i != j]
    if len(pairs) > _MOST_NEIGHBOURS:
        pairs = [pairs[x] for x in random.choice(len(pairs), _MOST_NEIGHBOURS, replace=False)]
    made = []
    for giver, taker in pairs:
        moved = ends.copy()
        if giver < taker:
            moved[giver:taker] -= 1
        else:
            moved[taker:giver] += 1
        made.append(moved.tolist())
    return _possible(problem, made)


def _first(ends: Ints) -> Ints:
    """[S, N]: where the stages begin."""
    return np.vstack([np.zeros((1, ends.shape[1]), dtype=np.int64), ends[:-1]])


def _peaks(problem: Problem, ends: Ints, shares: Sequence[float] = ()) -> Ints:
    """[N]: the most that a device holds; with `shares` of the pipeline's length only the devices at these places count."""
    places = sorted({round(x * (problem.num_devices - 1)) for x in shares}) or None
    peaks: Ints = device_peaks(with_few_microbatches(problem), _first(ends), ends, devices=places).max(axis=0)
    return peaks


def _possible(problem: Problem, found: Sequence[Sequence[int]]) -> Ints:
    """[S, N]: the different partitions whose stages have layers and keep together what must be."""
    names = [x.name for x in problem.costs.profile.layers]
    kept = [(names.index(a), names.index(b)) for a, b in problem.constraints.keep_together]
    free = np.array([not any(a < cut <= b for a, b in kept) for cut in range(len(names) + 1)])
    ends = np.array(sorted(set(map(tuple, found))), dtype=np.int64).T.reshape(problem.num_stages, -1)
    rises = np.diff(ends, axis=0, prepend=0).min(axis=0) > 0
    possible: Ints = ends[:, rises & free[ends].all(axis=0)]
    return possible


def _estimates_s(problem: Problem, ends: Ints) -> Floats:
    """[N]: the steps of partitions, exact where there are few micro-batches."""
    num, num_devices = problem.num_microbatches, problem.num_devices
    fewer, more = (x * num_devices for x in _SIMULATED)
    window = _window(problem, ends)
    if num <= more:
        return _steps_s(problem, window, num)
    more_s = _steps_s(problem, window, more)
    again = 1.0 if problem.recompute == "always" else 0.0
    loads_s = np.zeros((num_devices, ends.shape[1]))
    for device, stages in enumerate(problem.stages_by_device):
        for x in (window[stage] for stage in stages):
            loads_s[device] += x.forward_s + x.backward_s + again * x.recompute_s
    grows_s = np.maximum(num_devices * loads_s.max(axis=0), more_s - _steps_s(problem, window, fewer))
    steps_s: Floats = more_s + (num - more) / num_devices * grows_s
    return steps_s


def _window(problem: Problem, ends: Ints) -> list[StageSeconds[Floats]]:
    """The times of the stages."""
    first = _first(ends)
    return [stage_seconds(problem, stage, first[stage], ends[stage]) for stage in range(problem.num_stages)]


def _steps_s(problem: Problem, window: Sequence[StageSeconds[Floats]], num_microbatches: int) -> Floats:
    """[N]: the simulated steps with so many micro-batches of stages with these times."""
    few = replace(problem, costs=problem.costs.with_microbatches(num_microbatches))
    return simulate_window(few, window, first_stage=0, delay=Delay()).optimizer_s


def _cuts_by_counts(problem: Problem, blocks: range, head: int) -> Iterator[list[int]]:
    """Where the stages end, by numbers of blocks; multi-token prediction with the head, or before it."""
    for counts in _counts(problem, blocks):
        ends = (blocks.start + np.cumsum(counts)).tolist()
        for tail in {blocks.stop, head} if counts[-1] == 0 else {blocks.stop}:
            before = [max(x, tail) if i == len(ends) - 2 and counts[-1] == 0 else x for i, x in enumerate(ends)]
            yield [*before[:-1], problem.num_layers]


def _counts(problem: Problem, blocks: range) -> Iterator[list[int]]:
    """Numbers of blocks of each stage."""
    num_devices, num_blocks = problem.num_devices, len(blocks)
    num_chunks = problem.num_stages // num_devices
    seconds = _layer_s(problem)
    block_s = max(seconds[list(blocks)].mean(), 1e-12)
    head = seconds[blocks.stop :].sum() / block_s  # as a number of blocks
    lighter = {0, int(head), math.ceil(head), max(0, round(head) - 1)}
    fullest = {math.ceil(num_blocks / num_devices), math.ceil((num_blocks + head) / num_devices)}
    for most in {y for x in fullest for y in (x, x + 1)}:
        for less in lighter:
            for loads in _loads(num_devices, num_blocks, most, less):
                for rounds in _rounds(num_chunks):
                    yield _spread(loads, rounds)


def _loads(num_devices: int, num_blocks: int, most: int, less: int) -> Iterator[list[int]]:
    """Blocks of each device: at most so many, the last device `less` fewer, and what is over off some in turn."""
    start = [most] * num_devices
    start[-1] = max(0, most - less)
    over = sum(start) - num_blocks
    if over < 0:
        return
    forward, backward = list(range(num_devices)), list(range(num_devices))[::-1]
    inner = [x for x in backward if x != num_devices - 1]
    both = [x for pair in zip(forward, backward, strict=True) for x in pair][:num_devices]
    for order in (forward, backward, inner, both):
        loads, left = list(start), over
        while left and order:
            taken = [x for x in order if loads[x]][:left]
            if not taken:
                break
            for device in taken:
                loads[device] -= 1
            left -= len(taken)
        if not left:
            yield loads


def _rounds(num_chunks: int) -> Iterator[tuple[int, ...]]:
    """The order in which the rounds of stages get one block more than others."""
    every = tuple(range(num_chunks))
    for start in sorted({round(x) for x in np.linspace(0, num_chunks - 1, min(num_chunks, _MOST_ROUND_ORDERS))}):
        yield every[start:] + every[:start]


def _spread(loads: Sequence[int], rounds: Sequence[int]) -> list[int]:
    """The blocks of each stage; the first stage and the last get theirs last, as they have an end beside."""
    num_devices, num_chunks = len(loads), len(rounds)
    counts = [0] * (num_devices * num_chunks)
    for device, load in enumerate(loads):
        own_last = [0] * (device == 0) + [num_chunks - 1] * (device == num_devices - 1)
        order = [x for x in rounds if x not in own_last] + [x for x in rounds if x in own_last]
        each, more = divmod(load, num_chunks)
        for place, chunk in enumerate(order):
            counts[chunk * num_devices + device] = each + (place < more)
    return counts


def _cuts_by_time(problem: Problem, blocks: range) -> Iterator[list[int]]:
    """Cuts at equal shares of the seconds of all layers, rounded in a few ways."""
    before_s = np.cumsum(_layer_s(problem))
    shares = np.arange(1, problem.num_stages) / problem.num_stages * before_s[-1]
    first, last = blocks.start, blocks.stop
    for part in (0.3, 0.5, 0.7):
        middle_s = before_s - part * np.diff(before_s, prepend=0.0)
        ends = np.clip(np.searchsorted(middle_s, shares), first, last)
        yield [*ends.tolist(), problem.num_layers]


def _layer_s(problem: Problem) -> Floats:
    """[L]: forward and backward of each layer."""
    every = np.arange(problem.num_layers)
    times = stage_seconds(problem, 0, every, every + 1)
    again_s = times.recompute_s if problem.recompute == "always" else 0.0
    return times.forward_s + times.backward_s + again_s
