"""The memory of devices that hold several stages: the moments at which one may peak, as sums over its stages.

At a moment of its order a device holds of each stage so many stashes, checkpoints, and so on: bytes are linear in the
stages' parts, with whole numbers that the schedule alone says. The peak of a device is the largest of these sums.
Moments that can never be the largest are left out: those that hold nothing more than another does, and those halfway
between two others.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from gplan.core import RecomputeMode, StageBytes
from gplan.cost.memory_moments import Moment, device_moments
from gplan.cost.stage_costs import Costs, DeviceBoundaries
from gplan.graph.down_sets import Bools, Ints
from gplan.partition.pareto import undominated
from gplan.partition.problem import Problem
from gplan.schedules.registry import make_schedule

PARTS = StageBytes.__struct_fields__
"""The parts of a stage's memory, in the order in which arrays hold them."""

_NUM_STEPS = 16  # from one moment to another that are looked at


def device_peaks(problem: Problem, first: Ints, end: Ints) -> Ints:
    """[K, N]: the peaks of the devices of N partitions, to the byte, given where their stages begin and end, [S, N]."""
    peaks = []
    for device, stages in enumerate(problem.stages_by_device):
        parts = [part_bytes(problem.costs, first[k], end[k], problem.boundaries(k)) for k in stages]
        peaks.append(peaks_of(counts_of(problem, device), parts))
    return np.array(peaks)


def part_bytes(costs: Costs, first: Ints, end: Ints, boundaries: DeviceBoundaries) -> Ints:
    """[parts, E]: what the memory of stages is made of."""
    parts = costs.parts(first, end, boundaries)
    return np.stack([np.broadcast_to(getattr(parts, name), first.shape) for name in PARTS]).astype(np.int64)


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


@lru_cache(maxsize=256)
def _counts(schedule: str, num_devices: int, num_microbatches: int, device: int, recompute: RecomputeMode) -> Ints:
    made = make_schedule(schedule, num_devices=num_devices, num_microbatches=num_microbatches)
    nothing = StageBytes(**dict.fromkeys(PARTS, 0))
    parts = dict.fromkeys(made.stages_of(device), nothing)
    moments = [x.moments for x in device_moments(made, device, parts, recompute=recompute)]
    every = {
        id(x): x for by_stage in moments for x in by_stage.values()
    }  # of most moments a device has one that is new
    counts = {key: counts_at(moment) for key, moment in every.items()}
    rows = [[count for x in by_stage.values() for count in counts[id(x)]] for by_stage in moments]
    ends = _line_ends(np.unique(np.array(rows, dtype=np.int64), axis=0))
    return ends[undominated(-ends)].reshape(-1, len(parts), len(PARTS))


def counts_at(moment: Moment) -> list[int]:
    """[parts]: how many of each part a stage holds at a moment."""
    held = {
        "weight": 1,
        "optimizer": 1,
        "buffer": 1,
        "gradient": int(moment.has_gradients),
        "stash": moment.num_stashes,
        "checkpoint": moment.num_checkpoints,
        "recomputed_stash": moment.num_recomputing,
        "pending": moment.num_pending,
        "sent": moment.num_done,
    }
    return [held.get(name, int(moment.workspace == name)) for name in PARTS]


def _line_ends(rows: Ints) -> Ints:
    """The rows, each there once and sorted, without those halfway between two others, as far as these are common steps
    away."""
    steps, counts = np.unique(np.diff(rows, axis=0), axis=0, return_counts=True)
    is_between = np.zeros(len(rows), dtype=np.bool_)
    for step in steps[np.argsort(-counts, kind="stable")[:_NUM_STEPS]]:
        is_between |= _are_among(rows - step, rows) & _are_among(rows + step, rows)
    return rows[~is_between]


def _are_among(some: Ints, rows: Ints) -> Bools:
    """Whether each of some rows is one of the others."""
    factors = np.random.default_rng(0).integers(1, 2**31, rows.shape[1])  # they tell rows apart, but for coincidences
    keys, order = some @ factors, np.argsort(rows @ factors)
    places = np.searchsorted((rows @ factors)[order], keys).clip(max=len(rows) - 1)
    among: Bools = (rows[order[places]] == some).all(axis=1)
    return among
