"""Many candidate pipelines simulated at once: the recurrence of the simulator on arrays, one entry per candidate.

A window of consecutive stages is simulated exactly, on the devices that hold them; what these do for other stages is
left out, the stages before the window do not exist and those after it are a pure delay that any number of micro-batches
may be in at once. With the window of all stages this is the simulator itself, to the last bit. With fewer it is a lower
bound of every pipeline that contains them, as removing what an action waits for never makes it later.

    stages 0 to 1 of 3      0  F0 F1 F2 .. .. .. B0 B1 B2
                            1     F0 F1 F2 .. B0 B1 B2
                          delay      ~~~~~~~          (each micro-batch comes back after `delay` seconds)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from gplan.core import ActionKind, RecomputeMode, is_recomputed
from gplan.graph.down_sets import Floats, Ints
from gplan.partition.candidates import Candidates, StageTimes
from gplan.partition.problem import Problem
from gplan.schedules.dependencies import INPUT_GRADIENT_KINDS, execution_order
from gplan.schedules.registry import make_schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay:
    """Seconds from the end of a forward on a window's last stage until its backward may begin there."""

    kept_s: Floats | float = 0.0  # for a micro-batch whose activations are kept
    recomputed_s: Floats | float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """When a window is done, in seconds since its first forward began; arrays over the candidates."""

    back_s: Floats  # the last backward of its first stage, or the last half that the stage before waits for
    optimizer_s: Floats  # the last optimizer of its stages


def steps_s(problem: Problem, candidates: Sequence[Candidates], paths: Ints) -> Floats:
    """[N]: the simulated step of each of N partitions, given which candidate each stage takes, [N, S]."""
    return simulate_window(problem, window_times(candidates, paths), first_stage=0, delay=Delay()).optimizer_s


def window_times(candidates: Sequence[Candidates], paths: Ints) -> list[StageTimes]:
    """The times of the first stages of N partitions, given which candidate each of them takes, [N, stages]."""
    return [candidates[stage].times.take(paths[:, stage]) for stage in range(paths.shape[1])]


def simulate_window(problem: Problem, window: Sequence[StageTimes], *, first_stage: int, delay: Delay) -> Ends:
    """When stages first_stage, first_stage + 1, ... with these times are done; O(M) array operations per stage."""
    last_stage = first_stage + len(window) - 1
    seen = _window(
        problem.schedule, problem.num_devices, problem.num_microbatches, problem.recompute, first_stage, last_stage
    )
    durations = [_duration_s(window[key.stage - first_stage], key) for key in seen.durations]
    hops = [_hop_s(window, delay, key, stages=(first_stage, last_stage)) for key in seen.hops]
    nothing = np.zeros(window[0].forward_s.shape)
    free, back_s = [nothing] * len(seen.stages), nothing
    arrived: list[Floats | None] = []
    for step in seen.steps:
        start = free[step.device]
        if step.need >= 0:
            arrival, arrived[step.need] = arrived[step.need], None
            assert arrival is not None, "an output is waited for once"
            start = np.maximum(start, arrival)
        end = free[step.device] = start + durations[step.duration]
        if step.is_back:
            back_s = end
        arrived.append(end + hops[step.hop] if step.hop >= 0 else None)
    for device, stages in enumerate(seen.stages):
        for stage in stages:
            free[device] = free[device] + window[stage - first_stage].optimizer_s
    return Ends(back_s=back_s, optimizer_s=np.maximum.reduce(free))


def _duration_s(times: StageTimes, key: _Key) -> Floats:
    """What an action takes, in the arithmetic of the simulator."""
    first_s, second_s = times.input_gradient_s, times.weight_gradient_s
    stage, kind, is_again = key
    seconds = times.backward_s
    if kind is ActionKind.FORWARD:
        return times.forward_s
    if kind is ActionKind.INPUT_GRADIENT:
        if stage == 0:
            return np.zeros_like(seconds)
        assert first_s is not None, "a schedule with halves is planned with their times"
        seconds = first_s
    elif kind is ActionKind.WEIGHT_GRADIENT and stage > 0:
        assert second_s is not None, "a schedule with halves is planned with their times"
        return second_s
    return seconds + times.recompute_s if is_again else seconds


def _hop_s(window: Sequence[StageTimes], delay: Delay, key: _Key, *, stages: tuple[int, int]) -> Floats | float:
    """From the end of an action until its output is where it is waited for."""
    (first_stage, last_stage), (stage, kind, is_again) = stages, key
    if kind is not ActionKind.FORWARD:
        return window[stage - 1 - first_stage].gradient_s
    if stage == last_stage:
        return delay.recomputed_s if is_again else delay.kept_s
    return window[stage - first_stage].activation_s


class _Key(NamedTuple):
    """What tells the durations and hops of actions apart."""

    stage: int
    kind: ActionKind
    is_again: bool  # whether the micro-batch is recomputed


class _Step(NamedTuple):
    """One action of a window; numbers are places in lists, below 0: none."""

    device: int
    need: int  # the step whose output it cannot start without
    duration: int
    hop: int  # where its output is waited for
    is_back: bool  # whether the stage before the window waits for its output, or is not there


class _Window(NamedTuple):
    """The actions of some stages in dependency order."""

    steps: tuple[_Step, ...]
    durations: tuple[_Key, ...]
    hops: tuple[_Key, ...]
    stages: tuple[tuple[int, ...], ...]  # of each device that has any in the window


@lru_cache(maxsize=256)
def _window(
    name: str, num_devices: int, num_microbatches: int, recompute: RecomputeMode, first_stage: int, last_stage: int
) -> _Window:
    schedule = make_schedule(name, num_devices=num_devices, num_microbatches=num_microbatches)
    stages = [tuple(x for x in schedule.stages_of(i) if first_stage <= x <= last_stage) for i in range(num_devices)]
    stages = [some for some in stages if some]
    device_of = {stage: i for i, some in enumerate(stages) for stage in some}
    again = [is_recomputed(m, num_microbatches=num_microbatches, recompute=recompute) for m in range(num_microbatches)]
    durations, hops = dict[_Key, int](), dict[_Key, int]()
    steps, places = list[_Step](), dict[tuple[int, bool, int], int]()
    for action in execution_order(schedule).actions:
        stage, kind, m = action.stage, action.kind, action.microbatch
        if stage not in device_of:
            continue
        key, is_forward, is_first_half = (
            _Key(stage, kind, again[m]),
            kind is ActionKind.FORWARD,
            kind in INPUT_GRADIENT_KINDS,
        )
        need, hop = -1, -1
        if is_forward and stage > first_stage:
            need = places[stage - 1, True, m]
        elif is_first_half:
            need = places[stage, True, m] if stage == last_stage else places[stage + 1, False, m]
        if is_forward or (is_first_half and stage > first_stage):
            hop = hops.setdefault(key, len(hops))
            places[stage, is_forward, m] = len(steps)
        duration = durations.setdefault(key, len(durations))
        steps.append(_Step(device_of[stage], need, duration, hop, is_first_half and stage == first_stage))
    return _Window(tuple(steps), tuple(durations), tuple(hops), tuple(stages))
