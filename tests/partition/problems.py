"""Small random problems and brute force: every partition, priced by the cost model and the simulator.

Times and sizes are small integers and counts of micro-batches powers of two, so that many plans tie and sums are exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from random import Random
from typing import Any, TypeVar

import numpy as np
from hypothesis import strategies as st

from gplan.core import Layer, LayerCost, Leftover, Link, Profile, SharedWeight, Stage, Timing
from gplan.core.checks import SHARDINGS
from gplan.corrections import planned
from gplan.cost.memory_moments import device_memory
from gplan.cost.stage_table import StageTable
from gplan.graph.down_sets import Ints
from gplan.partition.branch_and_bound import path_of
from gplan.partition.candidates import CandidateLimit, Candidates, candidates_within
from gplan.partition.plan_evaluation import device_loads_s, objective_s, stages_of
from gplan.partition.problem import Problem
from gplan.schedules.registry import every_schedule, num_stages_of, schedule_info
from tests.made import FREE_LINK, SLOW_ENGINE, make_profile
from tests.scheduled import OWN

_Held = TypeVar("_Held", Layer, SharedWeight)

Cuts = tuple[int, ...]

ALL_BOUNDARIES = tuple(x for x in every_schedule() if schedule_info(x).num_chunks == 1)
"""Schedules with a device for each stage."""

SHARED = (*(x for x in every_schedule() if schedule_info(x).num_chunks > 1), "interleaved-1f1b:3", OWN)
"""Schedules with several stages on each device."""

EVERY = ALL_BOUNDARIES + SHARED


def make_problem(
    forward_s: Sequence[float],
    backward_s: Sequence[float] | None = None,
    *,
    num_stages: int,
    num_microbatches: int = 4,
    schedule: str = "gpipe",
    recompute: str = "never",
    minimize: str = "max-stage",
    memory_bytes: int | None = None,
    **profile: object,
) -> Problem:
    """A problem over a made profile; backwards take twice the forwards unless given."""
    made = make_profile(forward_s, backward_s, **profile)
    return Problem(
        costs=StageTable(made, num_microbatches),
        num_stages=num_stages,
        schedule=schedule,
        recompute=recompute,
        minimize=minimize,
        memory_bytes=memory_bytes,
    )


def all_cuts(problem: Problem) -> list[Cuts]:
    """The cuts of every partition into K stages, none empty."""
    return list(combinations(range(1, problem.num_layers), problem.num_stages - 1))


def every_candidate(problem: Problem) -> list[Candidates]:
    """The candidates of every partition, whether or not it fits the memory."""
    candidates = candidates_within(
        replace(problem, memory_bytes=None), CandidateLimit.of_load(float("inf"), num_stages=problem.num_stages)
    )
    assert candidates is not None
    return candidates


def paths(problem: Problem, candidates: Sequence[Candidates], cuts: Sequence[Cuts]) -> Ints:
    """[N, K]: the candidates that partitions of a chain take."""
    found = [path_of(candidates, [*x, problem.num_layers]) for x in cuts]
    assert all(path is not None for path in found), "a plan is made of candidates that are not there"
    return np.array(found)


def plans(problem: Problem) -> Iterator[tuple[Cuts, tuple[Stage, ...]]]:
    """Every partition that fits the memory."""
    for cuts in all_cuts(problem):
        stages = stages_of(problem, cuts)
        if problem.memory_bytes is None or peak_bytes(problem, stages) <= problem.memory_bytes:
            yield cuts, stages


def best_objective_s(problem: Problem) -> float | None:
    """The smallest objective by brute force; None where no partition fits the memory."""
    return min((objective_s(problem, stages) for _, stages in plans(problem)), default=None)


def tie_key(problem: Problem, stages: Sequence[Stage]) -> tuple[float, float, int]:
    """Largest load of a device, second-largest load, bytes across cuts."""
    largest, second, *_ = [*sorted(device_loads_s(problem, stages), reverse=True), 0.0]
    return largest, second, sum(x.cost.activation_bytes + x.cost.gradient_bytes for x in stages)


def peak_bytes(problem: Problem, stages: Sequence[Stage]) -> int:
    """The largest peak of any device, by the replay of its order."""
    schedule, parts = problem.made_schedule, [stage.parts for stage in stages]
    peaks = []
    for device in range(schedule.num_devices):
        own = {stage: parts[stage] for stage in schedule.stages_of(device)}
        held = device_memory(schedule, device, own, recompute=problem.recompute)
        peaks.append(sum(x.peak_bytes for x in held.values()))
    return max(peaks)


@st.composite
def problems(
    draw: st.DrawFn,
    *,
    max_layers: int = 7,
    max_stages: int = 7,
    minimize: Sequence[str] = ("step-time", "max-stage"),
    schedules: Sequence[str] = ALL_BOUNDARIES,
) -> Problem:
    """A problem with or without transfers, overhead, loss, optimizer, shared weights, recompute and memory limit."""
    schedule = draw(st.sampled_from(list(schedules)))
    said = schedule_info(schedule)
    profile = draw(profiles(max_layers, min_layers=num_stages_of(schedule, said.num_devices or 1)))
    num_layers = len(profile.layers)
    num_devices = said.num_devices or draw(st.integers(1, min(num_layers, max_stages) // said.num_chunks))
    num_microbatches = [m for m in (1, 2, 4, 8) if m <= (said.num_microbatches or m)]
    problem = Problem(
        costs=replica_costs(draw, profile, draw(st.sampled_from(num_microbatches)), num_devices=num_devices),
        num_stages=num_stages_of(schedule, num_devices),
        schedule=schedule,
        recompute=draw(st.sampled_from(["never", "always", "except-last"])),
        minimize=draw(st.sampled_from(list(minimize))),
    )
    if not draw(st.booleans()):
        return problem
    peak = peak_bytes(problem, stages_of(problem, draw(st.sampled_from(all_cuts(problem)))))
    return replace(problem, memory_bytes=max(1, peak - draw(st.integers(0, 3))))


def replica_costs(draw: st.DrawFn, profile: Profile, num_microbatches: int, *, num_devices: int) -> StageTable:
    """The costs of one of several replicas, which may divide each stage among them, or of the only one."""
    num_replicas, sharding = draw(st.sampled_from([(1, "none"), *((r, x) for r in (2, 3) for x in SHARDINGS)]))
    plain = planned(profile, num_devices=num_devices, num_replicas=num_replicas, sharding=sharding)
    return StageTable(plain, num_microbatches, num_replicas=num_replicas, sharding=sharding)


@st.composite
def profiles(draw: st.DrawFn, max_layers: int, min_layers: int = 1) -> Profile:
    """A chain of up to that many layers, whose backwards are measured in halves too."""
    num_layers = draw(st.integers(min_layers, max_layers))

    def numbers(high: int) -> list[int]:
        return draw(st.lists(st.integers(0, high), min_size=num_layers, max_size=num_layers))

    forward_s = [1 + x for x in numbers(9)]
    profile = make_profile(
        forward_s,
        numbers(12),
        weight_bytes=numbers(20),
        stash_bytes=numbers(20),
        output_bytes=numbers(4),
        workspace_bytes=numbers(20),
        link=draw(st.sampled_from([FREE_LINK, Link(latency_s=1.0, bytes_per_s=2.0)])),
        optimizer_s=draw(st.sampled_from([0.0, 8.0, 64.0])),
        fixed_s=draw(st.sampled_from([0.0, 2.0])),
        overhead_s=draw(st.sampled_from([0.0, 2.0])),
        engine=draw(st.sampled_from([None, SLOW_ENGINE])),
        shared_weights=draw(shared_weights(num_layers)),
    )
    if draw(st.booleans()):  # a recompute ends before the end of its last layer
        profile = with_costs_by_layer(profile, [{"last_recompute": Timing.exactly(x)} for x in numbers(9)])
        profile = with_costs_by_layer(profile, [{"output_saved_later_bytes": x} for x in numbers(4)])
    frees = draw(st.booleans())
    pending = [
        x - draw(st.integers(0, frees * y.costs[0].stash_bytes))
        for x, y in zip(numbers(9), profile.layers, strict=True)
    ]
    layers = zip(profile.layers, numbers(6), numbers(6), pending, numbers(20), strict=True)
    profile = replace(
        profile,
        layers=tuple(replace(_in_halves(*x), largest_trained_bytes=x[0].gradient_bytes // 2) for x in layers),
        step=replace(
            profile.step,
            largest_workspace=draw(st.sampled_from([0.0, 1.0, 2.0])),
            slow_down=draw(st.sampled_from([1.0, 1.25])),
            update_slow_down=draw(st.sampled_from([1.0, 1.5, 2.0])),
        ),
        num_neighbours=draw(st.integers(0, 2)),
    )
    if draw(st.booleans()):
        profile = replace(
            profile,
            layers=tuple(replace(x, update_s=draw(st.sampled_from([0.0, 1.0, 6.0]))) for x in profile.layers),
            shared_weights=tuple(replace(x, update_s=4.0) for x in profile.shared_weights),
        )
    if draw(st.booleans()):
        profile = replace(
            profile, layers=tuple(_with_waiting(draw, x, i, num_layers) for i, x in enumerate(profile.layers))
        )
    if draw(st.booleans()):
        profile = replace(profile, loss=(_loss(draw),))
    return on_two_clocks(profile, draw(st.randoms(use_true_random=False))) if draw(st.booleans()) else profile


def on_two_clocks(profile: Profile, random: Random) -> Profile:
    """The profile with random seconds of the host beside the device's."""
    passes = ("forward", "backward", "recompute", "input_gradient", "weight_gradient")
    return profile.with_costs(
        lambda cost: replace(cost, **{f"host_{x}": Timing.exactly(random.randint(0, 12)) for x in passes})
    )


def with_costs_by_layer(profile: Profile, changes: Sequence[Mapping[str, Any]]) -> Profile:
    """The profile with other fields in each layer's costs."""
    layers = zip(profile.layers, changes, strict=True)
    return replace(
        profile, layers=tuple(replace(x, costs=tuple(replace(cost, **of) for cost in x.costs)) for x, of in layers)
    )


def in_halves(profile: Profile) -> Profile:
    """The same with backwards that were measured in two halves too, each half as long."""

    def halved(cost: LayerCost) -> LayerCost:
        half = Timing.exactly(cost.backward.median_s / 2)
        return replace(cost, input_gradient=half, weight_gradient=half, pending_bytes=cost.output_bytes)

    layers = tuple(replace(layer, costs=tuple(halved(x) for x in layer.costs)) for layer in profile.layers)
    return replace(profile, layers=layers)


def _in_halves(layer: Layer, input_s: float, weight_s: float, pending_bytes: int, workspace_bytes: int) -> Layer:
    """With the workspace of the second half unknown where it would be 0."""
    costs = [
        replace(
            cost,
            input_gradient=Timing.exactly(input_s),
            weight_gradient=Timing.exactly(weight_s),
            pending_bytes=pending_bytes,
            input_workspace_bytes=workspace_bytes or None,
            grown_bytes=workspace_bytes // 2,
            weight_workspace_bytes=workspace_bytes or None,
        )
        for cost in layer.costs
    ]
    return replace(layer, costs=tuple(costs))


def _with_waiting(draw: st.DrawFn, layer: Layer, index: int, num_layers: int) -> Layer:
    """What later layers, or the loss, leave to a layer's backward."""
    leftovers = st.builds(Leftover, num_later=st.integers(1, num_layers - index), num_bytes=st.integers(-12, 12))
    drawn = tuple(draw(st.lists(leftovers, max_size=2, unique_by=lambda x: x.num_later)))
    return replace(layer, costs=tuple(replace(cost, leftovers=drawn) for cost in layer.costs))


@st.composite
def shared_weights(draw: st.DrawFn, num_layers: int) -> tuple[SharedWeight, ...]:
    """None, or one or two, of any two or three layers each, trained or frozen."""
    users = [x for number in (2, 3) for x in combinations(range(num_layers), number)]
    if not users:
        return ()
    drawn = draw(st.lists(st.tuples(st.sampled_from(users), st.sampled_from([0, 8, 20])), max_size=2))
    return tuple(
        SharedWeight(name=f"w{i}", layers=layers, num_parameters=5, weight_bytes=20, gradient_bytes=num_bytes)
        for i, (layers, num_bytes) in enumerate(drawn)
    )


def _loss(draw: st.DrawFn) -> LayerCost:
    seconds, num_bytes = st.integers(0, 5), st.integers(0, 20)
    return LayerCost(
        microbatch_size=1,
        forward=Timing.exactly(draw(seconds)),
        backward=Timing.exactly(draw(seconds)),
        stash_bytes=draw(num_bytes),
        forward_workspace_bytes=draw(num_bytes),
        backward_workspace_bytes=draw(num_bytes),
        output_bytes=0,
        output_gradient_bytes=0,
        output_unsaved_bytes=0,
        unkept_output_bytes=draw(st.integers(0, 4)),
    )
