"""What the allocator of a GPU reserves for a plan: the tensors of each device's stages replayed in its order, for two steps.

Weights, gradients and master weights are there from the start; the first update makes the rest of the optimizer's state.
What an update needs for a moment is allocated by parameter. A stage receives the input of a micro-batch before its
forward. Layers that are recomputed together keep the result of the last one alone, and allocate before their backward
what their forward did. Only for profiles that have the tensors of layers (`LayerCost.tensors`), which are those of GPUs;
expandable segments are not assumed.

Steady micro-batches repeat: a few more than fill the pipeline are replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias, TypeVar

from gplan.core import ActionKind, Plan, Profile, is_recomputed
from gplan.core.errors import UsageError
from gplan.core.layer_cost import LayerCost
from gplan.corrections.microbatch_size import at_microbatch_size
from gplan.cost.caching_allocator import Block, CachingAllocator
from gplan.schedules.registry import make_schedule

RESERVED_SHARE = 0.93
"""Of what the allocator reserves, tensors have so much where nothing was replayed: 0.961 on B200 and 0.908 on A100, medians of published runs."""
NCCL_BYTES = 1_000_000_000
"""Of a device that NCCL takes outside the allocator; assumed."""
CONTEXT_BYTES = 500_000_000 + NCCL_BYTES
"""The same with CUDA's context, which a measured profile's memory is without; assumed."""

WORKSPACE_BYTES = 32 * 2**20
"""That PyTorch allocates for cuBLAS once a process and keeps: so much from Hopper on, 8.1 MiB before."""

Allocator = TypeVar("Allocator", bound=CachingAllocator)

_MOST_EXCESS = 2  # times the largest excess of other devices: a device is taken to reserve no more beyond its peak
_ALWAYS = 3  # devices are replayed at least
_MORE = 4  # micro-batches than devices are replayed


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTensors:
    """What a stage allocates, in bytes."""

    layers: tuple[LayerCost, ...]
    names: tuple[str, ...] = ()  # of the layers, for a record
    buffers: tuple[int, ...]  # there from the start
    states: tuple[int, ...] = ()  # that the first update makes
    update: tuple[int, ...] = ()  # that each update needs for a moment
    received: int = 0  # of a micro-batch, from another device
    handed_on: int = 0  # of a micro-batch: what no layer keeps of what is sent, there until the backward
    handed_on_again: int = 0  # the same where all layers are recomputed together
    recomputed: tuple[range, ...] = ()  # the layers, by place, that are recomputed together


def with_reserved(plan: Plan, profile: Profile) -> Plan:
    """The plan with what its devices reserve and what is taken beside that; the plan itself where that is not known."""
    reserved = device_reserved_bytes(plan, profile)
    return replace(plan, reserved_bytes=reserved, context_bytes=beside_bytes(profile)) if reserved else plan


def beside_bytes(profile: Profile) -> int:
    """What of a device is taken outside its allocator; 0 where the layers' tensors are not known."""
    if not all(x.costs[0].num_forward_times for x in profile.layers):
        return 0
    return CONTEXT_BYTES if profile.origin == "computed" else NCCL_BYTES


def bytes_over(plan: Plan, profile: Profile, limit: int) -> int:
    """How much too little memory devices of so many bytes have for a plan; 0 or less where it fits.

    Replays the first device, the last and the fullest, then others by falling peak, and stops when the next peak plus twice the
    largest excess so far is below the limit, or the largest reservation. The factor of two is assumed, so this is no bound. Negative
    where the tensors of layers are not known.
    """
    peaks, beside = plan.device_peak_bytes, beside_bytes(profile)
    most = excess = 0
    by_peak = sorted(range(len(peaks)), key=lambda x: -peaks[x])
    for number, device in enumerate(dict.fromkeys([0, len(peaks) - 1, *by_peak])):
        if number < _ALWAYS or peaks[device] + _MOST_EXCESS * excess > max(most, limit - beside):
            reserved = sum(device_reserved_bytes(plan, profile, [device]))
            most, excess = max(most, reserved), max(excess, reserved - peaks[device])
    return most + beside - limit


def device_reserved_bytes(plan: Plan, profile: Profile, devices: Sequence[int] | None = None) -> tuple[int, ...]:
    """[K]: what the allocator of each device, or of some, reserves at most; () where the layers' tensors are not known.

    Beyond the predicted peak of allocated bytes, a device reserves what its replay does beyond that of its tensors, and cuBLAS's
    workspace.
    """
    peaks = plan.device_peak_bytes
    devices = range(len(peaks)) if devices is None else devices
    pairs = zip(devices, replayed(plan, profile, CachingAllocator, devices), strict=False)
    return tuple(WORKSPACE_BYTES + peaks[device] + x.reserved_bytes - x.most_allocated_bytes for device, x in pairs)


def replayed(
    plan: Plan, profile: Profile, new: Callable[[], Allocator], devices: Sequence[int] | None = None
) -> tuple[Allocator, ...]:
    """[K]: the allocator of each device, or of some, made by `new`, after two steps of a plan.

    () where the layers' tensors are not known.
    """
    if not beside_bytes(profile):
        return ()
    try:
        at_size = at_microbatch_size(profile, plan.microbatch_size)
    except UsageError:  # a plan of another profile
        return ()
    if not beside_bytes(at_size):
        return ()
    num_microbatches, num_devices = plan.num_microbatches, plan.num_devices
    made = make_schedule(plan.schedule, num_devices=num_devices, num_microbatches=num_microbatches)
    few = 2 * num_devices if plan.has_chunks else num_devices + _MORE
    if num_microbatches > few and not plan.schedule.startswith("custom"):
        made = make_schedule(plan.schedule, num_devices=num_devices, num_microbatches=few)
    count = made.num_microbatches
    again = [is_recomputed(m, num_microbatches=count, recompute=plan.recompute) for m in range(count)]
    found = list[Allocator]()
    for device in range(num_devices) if devices is None else devices:
        stages = {index: _stage_tensors(plan, at_size, index) for index in made.stages_of(device)}
        known = {index: x for index, x in stages.items() if x is not None}
        if len(known) < len(stages):
            return ()
        order = [(x.stage, x.kind, x.microbatch) for x in made.orders[device]]
        found.append(new())
        replay(found[-1], known, order, again=again)
    return tuple(found)


def _stage_tensors(plan: Plan, profile: Profile, index: int) -> StageTensors | None:
    """What a stage allocates, by the profile at the plan's micro-batch size; None where the plan has no parts of memory.

    torch's own modules have a tensor for each parameter, trainers of language models one for all.
    """
    stage = plan.stages[index]
    if (parts := stage.parts) is None:
        return None
    of_name = {x.name: x for x in profile.layers}
    layers = [of_name[x] for x in stage.layer_names]
    every = [y for x in layers for y in x.parameters]
    trained = [x.num_bytes for x in every if x.is_trained]

    def divided(num_bytes: float, sizes: Sequence[int]) -> list[int]:
        return [round(num_bytes * x / sum(sizes)) for x in sizes] if any(sizes) else [round(num_bytes)]

    has_own, masters = "torch" in dict(profile.versions), profile.step.master_bytes
    first = (masters / profile.step.state_bytes if masters else 0.0) if has_own else 1 / 3
    later = (1 - first) * parts.optimizer
    num_moments = max(1, round(later / ((2 if masters else 1) * sum(trained) or 1))) if has_own else 2
    is_last, is_selected = stage.end_layer == len(profile.layers), plan.recompute == "selected"
    costs = (*(x.costs[0] for x in layers), *(profile.loss if is_last else ()))
    stash = sum(y.num_bytes for x in costs for y in x.tensors if y.made < x.num_forward_times <= y.freed)
    last = costs[len(layers) - 1]
    result = sum(x.num_bytes for i, x in enumerate(last.tensors) if i == _result(last))
    return StageTensors(
        layers=costs,
        names=(*stage.layer_names, *(("loss",) if is_last and profile.loss else ())),
        buffers=(
            *(divided(parts.weight, [x.num_bytes for x in every]) if has_own else [parts.weight]),
            *(divided(parts.gradient, trained) if has_own else [parts.gradient]),
            *(divided(first * parts.optimizer, trained) if first else []),
        ),
        states=tuple(y for x in divided(later / num_moments, trained) for y in num_moments * (x,)),
        update=tuple(divided(max(0, parts.optimizer_workspace), trained)),
        received=parts.received_activation,
        handed_on=0 if is_selected else max(0, parts.stash - stash),
        handed_on_again=0 if is_selected else max(0, parts.checkpoint - result),
        recomputed=tuple(range(i, i + 1) for i, x in enumerate(stage.layer_names) if x in stage.recompute_layers)
        if is_selected
        else (range(len(layers)),),
    )


def replay(
    allocator: CachingAllocator,
    stages: Mapping[int, StageTensors],
    order: Sequence[tuple[int, ActionKind, int]],
    *,
    again: Sequence[bool] = (),
    num_steps: int = 2,
) -> None:
    """Allocate and free what a device's stages do in some steps; `order` has the stage, kind and micro-batch of actions.

    `again` has whether each micro-batch is recomputed; without it none is. The first half of a split backward, which on the
    first stage does nothing, leaves what the second needs, and that frees it.
    """
    allocator.doing = "weights, gradients and master weights"
    for num_bytes in [y for x in stages.values() for y in x.buffers]:
        allocator.allocate(num_bytes)
    events = {index: [_events(layer) for layer in x.layers] for index, x in stages.items()}
    crossing, passes = dict[tuple[int, int], list[Block]](), dict[tuple[int, int], list[_Blocks]]()
    for step in range(num_steps):
        for stage, kind, microbatch in order:
            own, key = stages[stage], (stage, microbatch)
            groups = {i: x for x in own.recomputed for i in x} if again and again[microbatch] else {}
            doing = [
                f"{x}, {kind.name.lower().replace('_', ' ')} of micro-batch {microbatch}"
                for x in own.names or [""] * len(own.layers)
            ]
            if kind is ActionKind.FORWARD:
                allocator.doing = f"received by stage {stage} for micro-batch {microbatch}"
                crossing[key] = [allocator.allocate(own.received)] if own.received else []
                held = passes[key] = [{} for _ in own.layers]
                for i, (forward, _) in enumerate(events[stage]):
                    allocator.doing = doing[i]
                    _run(allocator, forward, held[i])
                    if i in groups:
                        _free(allocator, held[i], but=_result(own.layers[i]))
                        if i > groups[i].start:
                            _free(allocator, held[i - 1])
                allocator.doing = f"handed on by stage {stage} for micro-batch {microbatch}"
                handed_on = own.handed_on_again if groups else own.handed_on
                crossing[key] += [allocator.allocate(handed_on)] if handed_on else []
                continue
            is_half = kind is ActionKind.INPUT_GRADIENT
            begins, held = kind is ActionKind.BACKWARD or is_half == (stage > 0), passes[key]
            for i, (_, backward) in reversed(list(enumerate(events[stage]))):
                if begins and i in groups and i == groups[i].stop - 1:
                    for j in groups[i]:
                        allocator.doing = f"{doing[j]}, recomputed"
                        _free(allocator, held[j])
                        _run(allocator, events[stage][j][0], held[j])
                if begins:
                    allocator.doing = doing[i]
                    _run(allocator, backward, held[i])
                    if is_half and own.layers[i].between_bytes:
                        held[i] = {0: allocator.allocate(own.layers[i].between_bytes)}
                elif not is_half:
                    _free(allocator, held[i])
            for block in [] if is_half else crossing.pop(key):
                allocator.free(block)
        allocator.doing = "optimizer"
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
