"""Many candidate pipelines simulated at once: the recurrence of the simulator on arrays, one entry per candidate.

A window of consecutive stages is simulated exactly; the stages before it do not exist and those after it are a pure
delay that any number of micro-batches may be in at once. With the window of all stages this is the simulator itself,
to the last bit. With fewer it is a lower bound of every pipeline that contains them, as removing what an action waits
for never makes it later.

    stages 0 to 1 of 3      0  F0 F1 F2 .. .. .. B0 B1 B2
                            1     F0 F1 F2 .. B0 B1 B2
                          delay      ~~~~~~~          (each micro-batch comes back after `delay` seconds)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from gplan.balancer.arcs import Arcs, StageTimes
from gplan.balancer.problem import Problem
from gplan.downsets import Floats, Ints
from gplan.nouns import Action, ActionKind, RecomputeMode
from gplan.schedules import flow_of, make_schedule
from gplan.simulator import is_recomputed


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay:
    """Seconds from the end of a forward on a window's last stage until its backward may begin there."""

    kept_s: Floats | float = 0.0  # for a micro-batch whose activations are kept
    recomputed_s: Floats | float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """When a window is done, in seconds since its first forward began; arrays over the candidates."""

    loop_s: Floats  # the last backward of its first stage
    optimizer_s: Floats  # the last optimizer of its stages


def steps_s(problem: Problem, arcs: Sequence[Arcs], paths: Ints) -> Floats:
    """[N]: the simulated step of each of N partitions, given which arc each stage takes, [N, K]."""
    return simulate_window(problem, window_times(arcs, paths), first_stage=0, delay=Delay()).optimizer_s


def window_times(arcs: Sequence[Arcs], paths: Ints) -> list[StageTimes]:
    """The times of the first stages of N partitions, given which arc each of them takes, [N, stages]."""
    return [arcs[stage].times.take(paths[:, stage]) for stage in range(paths.shape[1])]


def simulate_window(problem: Problem, window: Sequence[StageTimes], *, first_stage: int, delay: Delay) -> Ends:
    """When stages first_stage, first_stage + 1, ... with these times are done; O(M) array operations per stage."""
    last_stage = first_stage + len(window) - 1
    actions = _actions_of_window(
        problem.schedule, problem.num_devices, problem.num_microbatches, problem.recompute, first_stage, last_stage
    )
    free: list[Floats] = [np.zeros(window[0].forward_s.shape)] * len(window)
    arrived: dict[Action, Floats] = {}
    recomputing = [times.backward_s + times.recompute_s for times in window]
    for action, needed, is_again in actions:
        i = action.stage - first_stage
        times = window[i]
        start = free[i] if needed is None else np.maximum(free[i], arrived.pop(needed))
        if action.kind is ActionKind.FORWARD:
            free[i] = start + times.forward_s
            is_last = action.stage == last_stage
            back_s = delay.recomputed_s if is_again else delay.kept_s
            arrived[action] = free[i] + (back_s if is_last else times.activation_s)
        else:
            free[i] = start + (recomputing[i] if is_again else times.backward_s)
            arrived[action] = free[i] + (window[i - 1].gradient_s if i > 0 else 0.0)
    updated = [end + times.optimizer_s for end, times in zip(free, window, strict=True)]
    return Ends(loop_s=free[0], optimizer_s=np.maximum.reduce(updated))


@lru_cache(maxsize=256)
def _actions_of_window(
    schedule: str, num_devices: int, num_microbatches: int, recompute: RecomputeMode, first_stage: int, last_stage: int
) -> tuple[tuple[Action, Action | None, bool], ...]:
    """The window's actions, each after what it needs within the window, and whether it is or will be recomputed."""
    steps = []
    flow = flow_of(make_schedule(schedule, num_devices=num_devices, num_microbatches=num_microbatches))
    for action, need in zip(flow.actions, flow.needs, strict=True):
        if first_stage <= action.stage <= last_stage:
            needed = None if need < 0 else flow.actions[need]
            if action.kind is ActionKind.BACKWARD and action.stage == last_stage:
                needed = Action(last_stage, ActionKind.FORWARD, action.microbatch)
            elif needed is not None and needed.stage < first_stage:
                needed = None
            again = is_recomputed(action.microbatch, num_microbatches=num_microbatches, recompute=recompute)
            steps.append((action, needed, again))
    return tuple(steps)
