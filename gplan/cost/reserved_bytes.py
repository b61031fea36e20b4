"""What the allocator of a GPU reserves for a device's stages: their tensors replayed in the schedule's order, for two steps.

"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from gplan.core import Action, ActionKind
from gplan.core.layer_cost import LayerCost
from gplan.cost.caching_allocator import Block, CachingAllocator


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTensors:
    """What a stage allocates."""

    layers: tuple[LayerCost, ...]
    weights: tuple[int, ...]  # bytes of tensors that are there from the start
    states: tuple[int, ...]  # of those that the first update makes
    received: int = 0  # of a micro-batch's input, from another device
    transients: tuple[int, ...] = ()  # of the update, all at once


def replay(allocator: CachingAllocator, stages: dict[int, StageTensors], order: Sequence[Action], *, num_steps: int = 2) -> None:
    held = defaultdict(list)
    for stage in stages.values():
        for x in stage.weights:
            allocator.allocate(x)
    passed: dict[tuple[int, int], list[list[tuple[Block, int]]]] = {}
    inputs: dict[tuple[int, int], Block] = {}
    for step in range(num_steps):
        for action in order:
            stage, key = stages[action.stage], (action.stage, action.microbatch)
            if action.kind is ActionKind.FORWARD:
                if stage.received:
                    inputs[key] = allocator.allocate(stage.received)
                passed[key] = [_walk(allocator, x, [], is_forward=True) for x in stage.layers]
            elif action.kind is not ActionKind.INPUT_GRADIENT:
                kept = passed.pop(key)
                for layer, own in zip(reversed(stage.layers), reversed(kept)):
                    _walk(allocator, layer, own, is_forward=False)
                if key in inputs:
                    allocator.free(inputs.pop(key))
        temporary = [allocator.allocate(x) for stage in stages.values() for x in stage.transients]
        if not step:
            for stage in stages.values():
                for x in stage.states:
                    allocator.allocate(x)
        for x in temporary:
            allocator.free(x)


def _walk(allocator, layer: LayerCost, kept, *, is_forward: bool):
    n = layer.num_forward_times
    times = range(n) if is_forward else range(n, 1 + max((x.freed for x in layer.tensors), default=n))
    made_at, live = defaultdict(list), list(kept)
    for x in layer.tensors:
        made_at[x.made].append(x)
    for time in times:
        for x in made_at[time]:
            live.append((allocator.allocate(x.num_bytes), x.freed))
        rest = []
        for block, freed in live:
            if freed <= time:
                allocator.free(block)
            else:
                rest.append((block, freed))
        live = rest
    return live
