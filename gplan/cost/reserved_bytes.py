"""What the allocator of a GPU reserves for a plan: the tensors of each device's stages replayed in its order, for two steps.

Weights and gradients are there from the start, each as one buffer, and a third of the optimizer's state, by parameter;
the first update makes the rest. What an update needs for a moment is allocated by parameter too. A stage receives the
input of a micro-batch before its forward. Layers that are recomputed together keep the result of the last one alone, and
allocate before their backward what their forward did. Only for profiles that have the tensors of layers
(`LayerCost.tensors`), which are those computed from a language model's sizes; expandable segments are not assumed.

Steady micro-batches repeat: a few more than fill the pipeline are replayed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias

from gplan.core import ActionKind, Plan, Profile, is_recomputed
from gplan.core.layer_cost import LayerCost
from gplan.cost.caching_allocator import Block, CachingAllocator
from gplan.schedules.registry import make_schedule

RESERVED_SHARE = 0.93
"""Of what the allocator reserves, tensors have so much where nothing was replayed: 0.961 on B200 and 0.908 on A100, medians of published runs."""
CONTEXT_BYTES = 1_500_000_000
"""Of a device that the driver and NCCL take outside the allocator; assumed."""

_MORE = 4  # micro-batches than devices are replayed


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTensors:
    """What a stage allocates, in bytes."""

    layers: tuple[LayerCost, ...]
    buffers: tuple[int, ...]  # there from the start
    states: tuple[int, ...] = ()  # that the first update makes
    update: tuple[int, ...] = ()  # that each update needs for a moment
    received: int = 0  # of a micro-batch, from another device
    recomputed: tuple[range, ...] = ()  # the layers, by place, that are recomputed together


def with_reserved(plan: Plan, profile: Profile) -> Plan:
    """The plan with what its devices reserve and what is taken beside that; the plan itself where that is not known."""
    reserved = device_reserved_bytes(plan, profile)
    return replace(plan, reserved_bytes=reserved, context_bytes=CONTEXT_BYTES) if reserved else plan


def device_reserved_bytes(plan: Plan, profile: Profile) -> tuple[int, ...]:
    """[K]: what the allocator of each device reserves at most; () where the layers' tensors are not known.

    Beyond the predicted peak of allocated bytes, a device reserves what its replay does beyond that of its tensors.
    """
    pairs = zip(plan.device_peak_bytes, replayed(plan, profile), strict=False)
    return tuple(peak + x.reserved_bytes - x.most_allocated_bytes for peak, x in pairs)


def replayed(plan: Plan, profile: Profile) -> tuple[CachingAllocator, ...]:
    """[K]: the allocator of each device after two steps of a plan; () where the layers' tensors are not known."""
    sizes = profile.microbatch_sizes
    if plan.microbatch_size not in sizes:
        return ()
    names = [x.name for x in profile.layers]
    costs = dict(zip(names, profile.costs_at(sizes.index(plan.microbatch_size)), strict=False))
    if not all(x.tensors for x in costs.values()):
        return ()
    layers = {x.name: x for x in profile.layers}
    num_microbatches, num_devices = plan.num_microbatches, plan.num_devices
    made = make_schedule(plan.schedule, num_devices=num_devices, num_microbatches=num_microbatches)
    few = 2 * num_devices if plan.has_chunks else num_devices + _MORE
    if num_microbatches > few and not plan.schedule.startswith("custom"):
        made = make_schedule(plan.schedule, num_devices=num_devices, num_microbatches=few)
    count = made.num_microbatches
    again = [is_recomputed(m, num_microbatches=count, recompute=plan.recompute) for m in range(count)]
    found = []
    for device in range(plan.num_devices):
        stages = {}
        for index in made.stages_of(device):
            stage = plan.stages[index]
            parts = stage.parts
            if parts is None:
                return ()
            own = [y.num_bytes for x in stage.layer_names for y in layers[x].parameters if y.is_trained]
            shares = [x / (sum(own) or 1) for x in own]
            state = [round(x * parts.optimizer / 3) for x in shares]
            stages[index] = StageTensors(
                layers=tuple(costs[x] for x in stage.layer_names),
                buffers=(parts.weight, parts.gradient, *state),
                states=tuple(y for x in state for y in (x, x)),
                update=tuple(round(x * max(0, parts.optimizer_workspace)) for x in shares),
                received=plan.stages[index - 1].cost.activation_bytes if index else 0,
                recomputed=tuple(
                    range(i, i + 1) for i, x in enumerate(stage.layer_names) if x in stage.recompute_layers
                )
                if plan.recompute == "selected"
                else (range(len(stage.layer_names)),),
            )
        allocator = CachingAllocator()
        replay(allocator, stages, [(x.stage, x.kind, x.microbatch) for x in made.orders[device]], again=again)
        found.append(allocator)
    return tuple(found)


def replay(
    allocator: CachingAllocator,
    stages: Mapping[int, StageTensors],
    order: Sequence[tuple[int, ActionKind, int]],
    *,
    again: Sequence[bool] = (),
    num_steps: int = 2,
) -> None:
    """Allocate and free what a device's stages do in some steps; `order` has the stage, kind and micro-batch of actions.

    `again` has whether each micro-batch is recomputed; without it none is. A split backward frees with its second half, and
    recomputes with its first, which on the first stage does nothing.
    """
    for num_bytes in [y for x in stages.values() for y in x.buffers]:
        allocator.allocate(num_bytes)
    events = {index: [_events(layer) for layer in x.layers] for index, x in stages.items()}
    inputs, passes = dict[tuple[int, int], Block](), dict[tuple[int, int], list[_Blocks]]()
    for step in range(num_steps):
        for stage, kind, microbatch in order:
            own, key = stages[stage], (stage, microbatch)
            groups = {i: x for x in own.recomputed for i in x} if again and again[microbatch] else {}
            if kind is ActionKind.FORWARD:
                if own.received:
                    inputs[key] = allocator.allocate(own.received)
                held = passes[key] = [{} for _ in own.layers]
                for i, (forward, _) in enumerate(events[stage]):
                    _run(allocator, forward, held[i])
                    if i in groups:
                        _free(allocator, held[i], but=_result(own.layers[i]))
                        if i > groups[i].start:
                            _free(allocator, held[i - 1])
                continue
            is_half = kind is ActionKind.INPUT_GRADIENT
            begins, held = kind is ActionKind.BACKWARD or is_half == (stage > 0), passes[key]
            for i, (_, backward) in reversed(list(enumerate(events[stage]))):
                if begins and i in groups and i == groups[i].stop - 1:
                    for j in groups[i]:
                        _free(allocator, held[j])
                        _run(allocator, events[stage][j][0], held[j])
                if not is_half:
                    _run(allocator, backward, held[i])
            if not is_half and key in inputs:
                allocator.free(inputs.pop(key))
        needed = [allocator.allocate(y) for x in stages.values() for y in x.update]
        for num_bytes in [y for x in stages.values() for y in x.states] if step == 0 else []:
            allocator.allocate(num_bytes)
        for block in needed:
            allocator.free(block)


_Events: TypeAlias = tuple[tuple[int, int], ...]
_Blocks: TypeAlias = dict[int, Block]
"""The blocks in use of a layer's pass, by the numbers of their tensors."""


@lru_cache(maxsize=1024)
def _events(layer: LayerCost) -> tuple[_Events, _Events]:
    """The events of a forward, then of a backward: a tensor's number with its bytes where it is made, with 0 where freed.

    What is made at a time comes before what is freed at it.
    """
    events = list[tuple[int, bool, int, int]]()
    for number, x in enumerate(layer.tensors):
        events += [(x.made, False, number, x.num_bytes), (x.freed, True, number, 0)]
    ways = ([x for x in events if (x[0] >= layer.num_forward_times) is way] for way in (False, True))
    forward, backward = (tuple(x[2:] for x in sorted(way)) for way in ways)
    return forward, backward


def _run(allocator: CachingAllocator, events: Sequence[tuple[int, int]], blocks: _Blocks) -> None:
    for number, num_bytes in events:
        if num_bytes:
            blocks[number] = allocator.allocate(num_bytes)
        else:
            allocator.free(blocks.pop(number))


def _free(allocator: CachingAllocator, blocks: _Blocks, *, but: int | None = None) -> None:
    for number in [x for x in blocks if x != but]:
        allocator.free(blocks.pop(number))


def _result(layer: LayerCost) -> int | None:
    """The number of the tensor that a layer's forward hands on; None where it hands on nothing."""
    kept = [
        number
        for number, x in enumerate(layer.tensors)
        if x.made < layer.num_forward_times <= x.freed and x.num_bytes == layer.output_bytes
    ]
    return kept[-1] if kept else None
