"""Why nothing fits, and the nearest limits that would do: the smallest memory, the smallest K, recomputing.

All three are exact. The smallest memory minimises the largest peak over the stages, by the dynamic program that
otherwise minimises the largest load. The smallest K is found by asking each K in turn whether any partition fits it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from gplan.balancer.price import Problem, moments_of, stage_of, stages_of
from gplan.balancer.segments import (
    INFINITY,
    Bools,
    Demand,
    Segments,
    all_segments,
    best_cuts,
    demand_of,
    fitting,
    parts_at,
    peak_of,
    suffix_tables,
)
from gplan.costs import Floats
from gplan.errors import NoPlanError
from gplan.nouns import Stage
from gplan.units import bytes_text

_SEARCH_S = 5.0  # for the smallest K; only chains of several hundred layers come near it


def no_plan_error(problem: Problem) -> NoPlanError:
    """The error for a problem that no partition fits, naming the memory and the K that would do."""
    assert problem.memory_bytes is not None, "without a limit every partition fits"
    tightest = tightest_stage(problem)
    return NoPlanError(
        f"no partition of {problem.num_layers} layers into {problem.num_stages} stages fits "
        f"{_size_text(problem.memory_bytes)} per device; the smallest memory that does is {_peak_text(tightest)}, "
        f"for stage {tightest.index} ({_layers_text(tightest)}, at {tightest.memory.moment}); {_ways_out(problem)}"
    )


def tightest_stage(problem: Problem) -> Stage:
    """The stage with the largest peak in a partition whose largest peak is the smallest of all."""
    segments = all_segments(replace(problem, memory_bytes=None))

    def peaks(stage: int) -> Floats:
        return np.where(segments.exists, segments.peak_bytes(stage), INFINITY)

    tables = suffix_tables(segments, peaks, np.maximum)
    stages = stages_of(problem, best_cuts(segments, tables, peaks, np.maximum))
    return max(stages, key=lambda stage: stage.memory.peak_bytes)


def fits(problem: Problem) -> bool:
    """Whether any partition fits the memory."""
    segments = all_segments(problem)
    tables = suffix_tables(segments, fitting(segments, np.zeros(segments.exists.shape)), np.maximum)
    return float(tables[0, 0, 0]) < INFINITY


def numbers_of_stages_that_fit(problem: Problem) -> Iterator[bool]:
    """For K = 1, 2, ..., L, whether any partition into K stages fits the memory.

    Exact. Stages from the end of a pipeline are mostly alike for every K, so each K extends what was reached before.
    """
    every = Segments(replace(problem, num_stages=1), problem.num_layers)
    parts, last = parts_at(problem, every.first, every.end), _Reached.nothing(problem.num_layers)
    fitting_as: dict[Demand, Bools] = {}
    for num_stages in range(1, problem.num_layers + 1):
        reached, asked = last, replace(problem, num_stages=num_stages)
        for stage in reversed(range(num_stages)):
            moments = moments_of(asked, stage)
            demand = demand_of(moments)
            if demand not in fitting_as:
                fitting_as[demand] = every.exists & (peak_of(moments, parts) <= (problem.memory_bytes or 0))
            if demand not in reached.before:
                starts: Bools = np.any(fitting_as[demand] & reached.starts[every.end], axis=1)
                reached.before[demand] = _Reached(starts=starts)
            reached = reached.before[demand]
        yield bool(reached.starts[0])


@dataclass(frozen=True)
class _Reached:
    """From which layers some last stages can hold the rest of the chain; with one more stage before them, too."""

    starts: Bools
    before: dict[Demand, _Reached] = field(default_factory=dict)

    @classmethod
    def nothing(cls, num_layers: int) -> _Reached:
        return cls(starts=np.arange(num_layers + 1) == num_layers)


def _ways_out(problem: Problem) -> str:
    ways = [_stages_text(problem)]
    if problem.recompute != "always" and fits(replace(problem, recompute="always")):
        ways.append("with --recompute always it would fit as it is")
    return "; ".join(ways)


def _stages_text(problem: Problem) -> str:
    lone = _largest_lone_layer(problem)
    if lone.memory.peak_bytes > (problem.memory_bytes or 0):
        return f"no number of stages fits this memory: {_layers_text(lone)} alone needs {_peak_text(lone)}"
    deadline_s = time.perf_counter() + _SEARCH_S
    for num_stages, does_fit in enumerate(numbers_of_stages_that_fit(problem), start=1):
        if does_fit:
            return f"with this memory the smallest number of stages that fits is {num_stages} (try --k {num_stages})"
        if time.perf_counter() > deadline_s:
            return f"no number of stages up to {num_stages} fits this memory (larger ones were not tried)"
    stage = tightest_stage(replace(problem, num_stages=problem.num_layers))
    return (
        "no number of stages fits this memory: with one layer per stage, "
        f"stage {stage.index} ({_layers_text(stage)}) needs {_peak_text(stage)}"
    )


def _largest_lone_layer(problem: Problem) -> Stage:
    """The layer that needs most by itself, as in a pipeline of one stage: no stage of any keeps fewer micro-batches."""
    lenient = replace(problem, num_stages=1)
    worst = int(Segments(lenient, 1).peak_bytes(0)[: problem.num_layers, 0].argmax())
    return stage_of(lenient, 0, worst, worst + 1)


def _layers_text(stage: Stage) -> str:
    first, last = stage.layer_names[0], stage.layer_names[-1]
    return f"layer {first}" if stage.num_layers == 1 else f"layers {first} to {last}"


def _peak_text(stage: Stage) -> str:
    return _size_text(stage.memory.peak_bytes)


def _size_text(num_bytes: int) -> str:
    return f"{bytes_text(num_bytes)} ({num_bytes} bytes)" if num_bytes >= 1000 else bytes_text(num_bytes)
