"""The memory of devices that hold several stages: the moments at which one may peak, as sums over its stages.

At a moment of its order a device holds of each stage so many stashes, checkpoints, and so on: bytes are linear in the
stages' parts, with whole numbers that the schedule alone says. The peak of a device is the largest of these sums.
Moments that can never be the largest are left out: those that hold nothing more than another does, and those halfway
between two others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

from gplan.core import Action, RecomputeMode, is_recomputed
from gplan.cost.memory_moments import change_of
from gplan.cost.part_table import PARTS, rows_of
from gplan.cost.stage_table import DeviceBoundaries, StageTable
from gplan.graph.down_sets import Bools, Ints
from gplan.partition.pareto import undominated
from gplan.partition.problem import Problem
from gplan.schedules.registry import make_schedule

_NUM_STEPS = 16  # from one moment to another that are looked at


def device_peaks(problem: Problem, first: Ints, end: Ints) -> Ints:
    """[K, N]: the peaks of the devices of N partitions, to the byte, given where their stages begin and end, [S, N]."""
    peaks = []
    for device, stages in enumerate(problem.stages_by_device):
        parts = [part_bytes(problem.costs, first[k], end[k], problem.boundaries(k)) for k in stages]
        peaks.append(peaks_of(counts_of(problem, device), parts))
    return np.array(peaks)


def part_bytes(costs: StageTable, first: Ints, end: Ints, boundaries: DeviceBoundaries) -> Ints:
    """[parts, E]: what the memory of stages is made of."""
    return rows_of(costs.parts(first, end, boundaries), first.shape)


def peaks_of(counts: Ints, parts: Sequence[Ints]) -> Ints:
    """[N]: the most that a device holds, given the parts of each of its stages, [parts, N] each."""
    held = np.zeros((len(counts), 1), dtype=np.int64)
    for k, some in enumerate(parts):
        held = held + counts[:, k] @ some
    peaks: Ints = held.max(axis=0)
    return peaks


def counts_of(problem: Problem, device: int) -> Ints:
    """[moments, stages, parts]: how many of each part a device holds of each of its stages when it may hold most."""
    return _counts(problem.schedule, problem.num_devices, problem.num_microbatches, device, problem.recompute)


@lru_cache(maxsize=4096)
def _counts(schedule: str, num_devices: int, num_microbatches: int, device: int, recompute: RecomputeMode) -> Ints:
    made = make_schedule(schedule, num_devices=num_devices, num_microbatches=num_microbatches)
    rows = np.concatenate(list(_rows(made.orders[device], made.stages_of(device), num_microbatches, recompute)))
    rows = rows.reshape(len(rows), -1)
    varying = np.flatnonzero(rows.max(axis=0) > rows.min(axis=0))
    corners = _line_ends(np.unique(rows[:, varying], axis=0))
    found = np.tile(rows[0], (len(corners), 1))
    found[:, varying] = corners
    counts = found.reshape(len(found), -1, len(PARTS))
    apart = counts.copy()  # pending bytes may be negative, but not those of a pending micro-batch with its stash
    apart[:, :, PARTS.index("stash")] -= counts[:, :, PARTS.index("pending")]
    flat = apart.reshape(found.shape)
    return counts[undominated(-flat[:, flat.max(axis=0) > flat.min(axis=0)])]


def _rows(
    order: Sequence[Action], stages: Sequence[int], num_microbatches: int, recompute: RecomputeMode
) -> Iterator[Ints]:
    """[moments, stages, parts]: what a device holds during each action, after each action, and when all is updated."""
    again = [is_recomputed(x.microbatch, num_microbatches=num_microbatches, recompute=recompute) for x in order]
    changes = [change_of(x.kind, is_first=x.stage == 0, again=y) for x, y in zip(order, again, strict=True)]
    own, every = np.searchsorted(stages, [x.stage for x in order]), np.arange(len(order))
    after = np.zeros((len(order) + 1, len(stages), len(_HELD)), dtype=np.int64)
    after[every + 1, own] = np.array([x.after for x in changes])
    after = np.cumsum(after, axis=0)
    yield _parts_of(after)
    for workspace in sorted({name for x in changes for name in x.workspaces}):
        there = np.flatnonzero([workspace in x.workspaces for x in changes])
        held = after[there]
        held[np.arange(len(there)), own[there]] += np.array([changes[i].at_work for i in there])
        rows = _parts_of(held)
        rows[np.arange(len(there)), own[there], PARTS.index(workspace)] = 1
        yield rows
    update = _parts_of(np.zeros((1, len(stages), len(_HELD)), dtype=np.int64))
    update[:, :, [PARTS.index("gradient"), PARTS.index("optimizer_workspace")]] = 1
    yield update


_HELD = ("stash", "checkpoint", "pending", "sent", "recomputed_stash")
"""The parts of which a stage holds some, in the order of `Change`."""


def _parts_of(held: Ints) -> Ints:
    """[..., parts], given how many of `_HELD` stages hold."""
    found = np.zeros((*held.shape[:-1], len(PARTS)), dtype=np.int64)
    found[..., [PARTS.index(name) for name in ("weight", "optimizer", "buffer")]] = 1
    found[..., [PARTS.index(name) for name in _HELD]] = held
    found[..., PARTS.index("gradient")] = held[..., _HELD.index("sent")] > 0
    return found


def _line_ends(rows: Ints) -> Ints:
    """The rows, each there once and sorted, without those halfway between two others, as far as these are common steps
    away."""
    steps, counts = np.unique(np.diff(rows, axis=0), axis=0, return_counts=True)
    factors = np.random.default_rng(0).integers(1, 2**31, rows.shape[1])  # they tell rows apart, but for coincidences
    keys = rows @ factors
    order = np.argsort(keys)
    ordered, is_between = keys[order], np.zeros(len(rows), dtype=np.bool_)

    def are_among(offset: Ints) -> Bools:
        """Whether each row is one of the others after such a step."""
        places = np.searchsorted(ordered, keys + offset @ factors).clip(max=len(rows) - 1)
        among: Bools = (rows[order[places]] == rows + offset).all(axis=1)
        return among

    for step in steps[np.argsort(-counts, kind="stable")[:_NUM_STEPS]]:
        is_between |= are_among(step) & are_among(-step)
    return rows[~is_between]
