"""Many candidate pipelines simulated at once, whole or as a window of consecutive stages (a lower bound)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from gplan.core import ActionKind, RecomputeMode, StageSeconds
from gplan.graph.down_sets import Floats, Ints
from gplan.partition.candidates import Candidates, loads_s, stage_seconds
from gplan.partition.plan_evaluation import in_stage_order, recomputed
from gplan.partition.problem import Problem, device_sums
from gplan.schedules.registry import make_schedule
from gplan.simulation.kernel import ActionProgram, action_times, program_of, tied_devices, when_updates_begin

_CHUNK_FLOATS = 4_000_000  # arrival times held at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay:
    """Seconds from the end of a forward on a window's last stage until its backward may begin there."""

    kept_s: Floats | float = 0.0  # for a micro-batch whose activations are kept
    recomputed_s: Floats | float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowEnds:
    """When a window is done, in seconds since its first forward began; arrays over the candidates."""

    back_s: Floats  # the last backward of its first stage, or the last half that the stage before waits for
    optimizer_s: Floats  # the last optimizer of its stages


def goal_s(problem: Problem, stages: Sequence[Sequence[int]]) -> float:
    """What the problem minimises, of stages given as layers in the profile's numbering; without pricing them."""
    laid, cuts = in_stage_order(problem, stages)
    bounds, window, loads = np.array([0, *cuts, laid.num_layers]), list[StageSeconds[Floats]](), list[float]()
    for stage in range(len(stages)):
        first, end = bounds[stage : stage + 1], bounds[stage + 1 : stage + 2]
        times = stage_seconds(laid, stage, first, end)
        if laid.recompute == "selected":
            again_s = recomputed(laid, stage, int(first[0]), int(end[0])).recompute_s / laid.speed(stage)
            times = replace(times, recompute_s=np.array([again_s]))
        window.append(times)
        loads.append(float(loads_s(laid, stage, first, times)[0]))
    if laid.minimize == "step-time":
        return float(simulate_window(laid, window, first_stage=0, delay=Delay()).optimizer_s[0])
    return max(device_sums(laid, loads))


def num_at_once(problem: Problem) -> int:
    """How many pipelines to simulate at once, so that their times fit in little memory."""
    return max(256, _CHUNK_FLOATS // (problem.num_stages * problem.num_microbatches))


def steps_s(problem: Problem, candidates: Sequence[Candidates], paths: Ints) -> Floats:
    """[N]: the simulated step of each of N partitions, given which candidate each stage takes, [N, S]."""
    size = num_at_once(problem)
    windows = (window_times(candidates, paths[i : i + size]) for i in range(0, len(paths), size))
    found = [simulate_window(problem, x, first_stage=0, delay=Delay()).optimizer_s for x in windows]
    return np.concatenate(found or [np.zeros(0)])


def window_times(candidates: Sequence[Candidates], paths: Ints) -> list[StageSeconds[Floats]]:
    """The times of the first stages of N partitions, given which candidate each of them takes, [N, stages]."""
    return [candidates[stage].times.take(paths[:, stage]) for stage in range(paths.shape[1])]


def simulate_window(
    problem: Problem, window: Sequence[StageSeconds[Floats]], *, first_stage: int, delay: Delay
) -> WindowEnds:
    """When stages first_stage, first_stage + 1, ... with these times are done; O(M) array operations per stage."""
    program = window_program(problem, first_stage, first_stage + len(window) - 1)
    zero = np.zeros(window[0].forward_s.shape)
    leaving = ActionKind.FORWARD, program.last_stage
    hops = [
        zero + (delay.recomputed_s if key.recomputes else delay.kept_s) if (key.kind, key.stage) == leaving else hop
        for key, hop in zip(program.hops, program.hops_s(window), strict=True)
    ]
    free, back_s = [zero] * len(program.stages), zero
    rows = action_times(program, program.durations_s(window), hops, zero=zero)
    for i, (entry, (_, end, _)) in enumerate(zip(program.entries, rows, strict=True)):
        free[entry.device] = end
        if i == program.last_backward:
            back_s = end
    own = [[stage - first_stage for stage in stages] for stages in program.stages]
    free = when_updates_begin(tied_devices(own, window), free)
    for device, stages in enumerate(own):
        for stage in stages:
            free[device] = free[device] + window[stage].optimizer_s
    return WindowEnds(back_s=back_s, optimizer_s=np.maximum.reduce(free))


def window_program(problem: Problem, first_stage: int, last_stage: int) -> ActionProgram:
    """The program of some of a problem's stages."""
    return _program(
        problem.schedule, problem.num_devices, problem.num_microbatches, problem.recompute, first_stage, last_stage
    )


@lru_cache(maxsize=256)
def _program(
    schedule: str, num_devices: int, num_microbatches: int, recompute: RecomputeMode, first_stage: int, last_stage: int
) -> ActionProgram:
    made = make_schedule(schedule, num_devices=num_devices, num_microbatches=num_microbatches)
    return program_of(made, recompute, first_stage=first_stage, last_stage=last_stage)
