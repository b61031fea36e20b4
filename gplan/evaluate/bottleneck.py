"""What limits the step, from the simulated timeline.

The bottleneck is the device with the most compute. Its time is computing, idle by cause, and what follows the last
backward. A transfer is exposed by as much as the step is shorter if the transfer is free. The largest of these losses
that reaches its threshold binds the step; if none does, compute binds:

    memory     the best plan without a limit is 1 % shorter
    cut        the step without transfers is 5 % shorter
    filling    filling and draining take half as long as the compute: v M < 2 (K-1) with v equal stages per device, whole
               backwards and free transfers
    optimizer  what follows the loop takes half as long as the compute
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from gplan.core import IdleCause, Plan, Stage
from gplan.simulation.bubble import idle_by_device
from gplan.simulation.simulator import simulate

MEMORY_SHARE = 0.01
CUT_SHARE = 0.05
FILLING_SHARE = OPTIMIZER_SHARE = 0.5
_TOLERANCE = 0.01
_HALF = 0.5
_MOST_LAYERS = 5
_MOST_CUTS = 8


Binding: TypeAlias = Literal["compute", "memory", "cut", "filling", "optimizer"]
"""What limits the step: one device's compute, memory, the transfers over the cuts, filling and draining the pipeline,
or the optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShare:
    """The share of one layer in its device's compute."""

    layer: str
    time_s: float  # forward and backward of one micro-batch, without recompute
    share: float  # of all layers of the device


@dataclass(frozen=True, slots=True, kw_only=True)
class CutCost:
    """What the transfers over one cut between devices cost."""

    stage: int  # the cut is after it
    layer: str  # the last one before the cut
    transfer_s: float  # of one micro-batch, both ways
    exposed_s: float  # by how much the step is shorter where these transfers take no time


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """The device that computes longest, and where its time goes. The six times add up to the step."""

    device: int
    stages: tuple[int, ...]  # that the device holds
    equals: tuple[int, ...]  # other devices whose compute is within one percent
    layers: tuple[LayerShare, ...]  # the slowest first, up to half of the device's compute and their equals
    num_layers: int  # of all its stages
    busy_s: float  # computing
    filling_s: float  # while the pipeline fills and drains: idle, transfers, and an update while others compute
    imbalance_s: float  # idle because another device was slower
    communication_s: float  # idle during a transfer
    engine_s: float  # idle during the engine's own work
    tail_s: float  # after the last backward of the pipeline
    cuts: tuple[CutCost, ...]  # of many, those with the longest transfers
    exposed_s: float  # by how much the step is shorter where all transfers take no time
    memory_gain_s: float | None  # of the step without a memory limit; None: not known
    binds: Binding


def find_bottleneck(plan: Plan, *, memory_gain_s: float | None) -> Bottleneck:
    """The device with the most compute (of ties the first) and what binds the plan; O(K^2 M)."""
    timeline = simulate(plan)
    busy = [timeline.busy_s(i) for i in range(plan.num_devices)]
    busy_s = max(busy)
    device = busy.index(busy_s)
    stages, idle = plan.stages_of(device), idle_by_device(timeline)[device]
    tail_s = timeline.step_s - timeline.loop_end_s
    early_update_s = timeline.update_s(device) + idle[IdleCause.OPTIMIZER] - tail_s
    filling_s = idle[IdleCause.WARM_UP] + idle[IdleCause.DRAIN] + early_update_s
    cuts, exposed_s = exposed_cuts(plan)
    losses: dict[Binding, tuple[float, float]] = {  # seconds, and from which on they bind the step
        "memory": (memory_gain_s or 0.0, MEMORY_SHARE * timeline.step_s),
        "cut": (exposed_s, CUT_SHARE * timeline.step_s),
        "filling": (filling_s, FILLING_SHARE * busy_s),
        "optimizer": (tail_s, OPTIMIZER_SHARE * busy_s),
    }
    binding: list[Binding] = [name for name, (loss_s, least_s) in losses.items() if loss_s > 0 and loss_s >= least_s]
    return Bottleneck(
        device=device,
        stages=tuple(stage.index for stage in stages),
        equals=tuple(i for i, x in enumerate(busy) if i != device and x >= busy_s * (1 - _TOLERANCE)),
        layers=tuple(_slowest_layers(stages)),
        num_layers=sum(stage.num_layers for stage in stages),
        busy_s=busy_s,
        filling_s=filling_s,
        imbalance_s=idle[IdleCause.IMBALANCE],
        communication_s=idle[IdleCause.COMMUNICATION],
        engine_s=idle[IdleCause.ENGINE],
        tail_s=tail_s,
        cuts=cuts,
        exposed_s=exposed_s,
        memory_gain_s=memory_gain_s,
        binds=max(binding, key=lambda name: losses[name][0], default="compute"),
    )


def exposed_cuts(plan: Plan) -> tuple[tuple[CutCost, ...], float]:
    """The step time added by the transfers of each cut, and of all cuts together, which may be more than the sum.

    Of many cuts between devices only the eight with the longest transfers, as each is a simulation.
    """
    between = [x for x in plan.stages[:-1] if plan.devices[x.index] != plan.devices[x.index + 1]]
    longest = sorted(between, key=lambda x: x.cost.activation_s + x.cost.gradient_s, reverse=True)[:_MOST_CUTS]
    step_s = simulate(plan).step_s

    def gain_s(free: Sequence[Stage]) -> float:
        """How much shorter the step is where the transfers after these stages take no time."""
        costs = {x.index: replace(x.cost, activation_s=0.0, gradient_s=0.0) for x in free}
        stages = tuple(replace(x, cost=costs.get(x.index, x.cost)) for x in plan.stages)
        return max(0.0, step_s - simulate(replace(plan, stages=stages)).step_s)

    cuts = tuple(
        CutCost(
            stage=x.index,
            layer=x.layer_names[-1],
            transfer_s=x.cost.activation_s + x.cost.gradient_s,
            exposed_s=gain_s([x]),
        )
        for x in sorted(longest, key=lambda x: x.index)
    )
    return cuts, gain_s(between)


def _slowest_layers(stages: Sequence[Stage]) -> Iterator[LayerShare]:
    """The slowest layers, up to half of the device's compute and at most five; none where no layer takes time.

    Layers that take as long as the last one, within 1 %, are included too.
    """
    times = {x: sum(y) for stage in stages for x, y in zip(stage.layer_names, stage.layer_times_s, strict=True)}
    total_s, seen_s, last_s = sum(times.values()), 0.0, math.inf
    for number, name in enumerate(sorted(times, key=lambda x: times[x], reverse=True)):
        is_enough = number >= _MOST_LAYERS or seen_s >= _HALF * total_s
        if not total_s or (is_enough and times[name] < last_s * (1 - _TOLERANCE)):
            return
        seen_s, last_s = seen_s + times[name], times[name]
        yield LayerShare(layer=name, time_s=times[name], share=times[name] / total_s)
