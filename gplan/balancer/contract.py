"""Layers that take no time and have one neighbour only stay with it: how dnn-partitioning's planner prepares a graph.

It does so whatever the memory, and before it looks at any: a plan that would need such a layer elsewhere is none to it.
`max-device-load` is that planner's objective, so it comes with that planner's rule, that answers can be compared
(msr-fiddle/dnn-partitioning, throughput-dp/dp.cpp, performTrivialNodeOptimizations).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gplan.balancer.problem import Problem, Solution
from gplan.nouns import Profile, Value

_NO_TIME_S = 1e-9


def contracted(problem: Problem) -> tuple[Problem, tuple[tuple[int, ...], ...]]:
    """The problem without such layers, their weights at the neighbour; and which layers each layer left stands for."""
    profile = problem.costs.profile
    if not profile.values:
        return problem, tuple((i,) for i in range(problem.num_layers))
    stands_for = {i: [i] for i in range(problem.num_layers)}
    neighbours = _neighbours(profile)
    while (lone := _lone(problem, stands_for, neighbours)) is not None:
        (other,) = neighbours.pop(lone)
        stands_for[other] += stands_for.pop(lone)
        neighbours[other].discard(lone)
    groups = tuple(tuple(sorted(members)) for members in stands_for.values())
    costs = replace(problem.costs, profile=_merged(profile, list(stands_for), groups), given_downsets=None)
    return replace(problem, costs=costs), groups


def expanded(solution: Solution, groups: Sequence[tuple[int, ...]]) -> Solution:
    """The same partition of the layers that were there before."""
    stages = tuple(tuple(sorted(x for layer in stage for x in groups[layer])) for stage in solution.stages)
    return replace(solution, stages=stages)


def _neighbours(profile: Profile) -> dict[int, set[int]]:
    neighbours: dict[int, set[int]] = {i: set() for i in range(len(profile.layers))}
    for before, after in profile.precedence:
        neighbours[before].add(after)
        neighbours[after].add(before)
    return neighbours


def _lone(problem: Problem, stands_for: dict[int, list[int]], neighbours: dict[int, set[int]]) -> int | None:
    seconds = problem.costs.layer_compute_s
    for layer, members in stands_for.items():
        if sum(seconds[x] for x in members) < _NO_TIME_S and len(neighbours[layer]) == 1:
            return layer
    return None


def _merged(profile: Profile, kept: Sequence[int], groups: Sequence[tuple[int, ...]]) -> Profile:
    """The profile with the kept layers alone; members of a group take no time but one, so only bytes add up."""
    place = {x: index for index, members in enumerate(groups) for x in members}
    place[len(profile.layers)] = len(kept)
    layers = [
        replace(
            profile.layers[layer],
            weight_bytes=sum(profile.layers[x].weight_bytes for x in members),
            gradient_bytes=sum(profile.layers[x].gradient_bytes for x in members),
            num_trained=sum(profile.layers[x].num_trained for x in members),
            costs=tuple(replace(x, waiting=()) for x in profile.layers[layer].costs),  # which is no part of a load
            same_as=None,
        )
        for layer, members in zip(kept, groups, strict=True)
    ]
    shared = [(x, tuple(sorted({place[i] for i in x.layers}))) for x in profile.shared_weights]
    return replace(
        profile,
        layers=tuple(layers),
        values=tuple(moved for value in profile.values if (moved := _moved(value, place)) is not None),
        shared_weights=tuple(replace(x, layers=users) for x, users in shared if len(users) > 1),
    )


def _moved(value: Value, place: dict[int, int]) -> Value | None:
    """The value between the layers that are left; None where both ends are one now."""
    producer = None if value.producer is None else place[value.producer]
    consumers = tuple(sorted({place[x] for x in value.consumers} - {producer}))
    return replace(value, producer=producer, consumers=consumers) if consumers else None
