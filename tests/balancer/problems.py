"""Small random problems and brute force: every partition, priced by the cost model and the simulator.

Times and sizes are small integers and counts of micro-batches powers of two, so that many plans tie and sums are exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
from hypothesis import strategies as st

from gplan.balancer.arcs import Arcs, Cap, arcs_within
from gplan.balancer.branch import path_of
from gplan.balancer.price import objective_s, stage_loads_s, stages_of
from gplan.balancer.problem import Problem
from gplan.costs import Costs
from gplan.downsets import Ints
from gplan.nouns import LayerCost, Link, Profile, SharedWeight, Stage, Timing
from tests.made import FREE_LINK, make_profile

Cuts = tuple[int, ...]


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
        costs=Costs(made, 1, num_microbatches),
        num_stages=num_stages,
        schedule=schedule,
        recompute=recompute,
        minimize=minimize,
        memory_bytes=memory_bytes,
    )


def all_cuts(problem: Problem) -> list[Cuts]:
    """The cuts of every partition into K stages, none empty."""
    return list(combinations(range(1, problem.num_layers), problem.num_stages - 1))


def every_arc(problem: Problem) -> list[Arcs]:
    """The arcs of every partition, whether or not it fits the memory."""
    arcs = arcs_within(replace(problem, memory_bytes=None), Cap.of_load(float("inf"), num_stages=problem.num_stages))
    assert arcs is not None
    return arcs


def paths(problem: Problem, arcs: Sequence[Arcs], cuts: Sequence[Cuts]) -> Ints:
    """[N, K]: the arcs that partitions of a chain take."""
    found = [path_of(arcs, [*x, problem.num_layers]) for x in cuts]
    assert all(path is not None for path in found), "a plan is made of arcs that are not there"
    return np.array(found)


def plans(problem: Problem) -> Iterator[tuple[Cuts, tuple[Stage, ...]]]:
    """Every partition that fits the memory."""
    for cuts in all_cuts(problem):
        stages = stages_of(problem, cuts)
        if problem.memory_bytes is None or peak_bytes(stages) <= problem.memory_bytes:
            yield cuts, stages


def best_objective_s(problem: Problem) -> float | None:
    """The smallest objective by brute force; None where no partition fits the memory."""
    return min((objective_s(problem, stages) for _, stages in plans(problem)), default=None)


def tie_key(problem: Problem, stages: Sequence[Stage]) -> tuple[float, float, int]:
    """Largest load, second-largest load, bytes across cuts."""
    largest, second, *_ = [*sorted(stage_loads_s(problem, stages), reverse=True), 0.0]
    return largest, second, sum(x.cost.activation_bytes + x.cost.gradient_bytes for x in stages)


def peak_bytes(stages: Sequence[Stage]) -> int:
    """The largest peak of any stage."""
    return max(stage.memory.peak_bytes for stage in stages)


@st.composite
def problems(
    draw: st.DrawFn,
    *,
    max_layers: int = 7,
    max_stages: int = 7,
    minimize: Sequence[str] = ("step-time", "max-stage"),
    schedules: Sequence[str] = ("gpipe", "1f1b"),
) -> Problem:
    """A problem with or without transfers, overhead, loss, optimizer, shared weights, recompute and memory limit."""
    profile = draw(profiles(max_layers))
    num_layers = len(profile.layers)
    problem = Problem(
        costs=Costs(profile, 1, draw(st.sampled_from([1, 2, 4, 8]))),
        num_stages=draw(st.integers(1, min(num_layers, max_stages))),
        schedule=draw(st.sampled_from(list(schedules))),
        recompute=draw(st.sampled_from(["never", "always", "except-last"])),
        minimize=draw(st.sampled_from(list(minimize))),
    )
    if not draw(st.booleans()):
        return problem
    peak = peak_bytes(stages_of(problem, draw(st.sampled_from(all_cuts(problem)))))
    return replace(problem, memory_bytes=max(1, peak - draw(st.integers(0, 3))))


@st.composite
def profiles(draw: st.DrawFn, max_layers: int) -> Profile:
    """A chain of up to that many layers."""
    num_layers = draw(st.integers(1, max_layers))

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
        overhead_s=draw(st.sampled_from([0.0, 2.0])),
        shared_weights=draw(shared_weights(num_layers)),
    )
    return replace(profile, loss=(_loss(draw),)) if draw(st.booleans()) else profile


@st.composite
def shared_weights(draw: st.DrawFn, num_layers: int) -> tuple[SharedWeight, ...]:
    """None, or one or two, of any two layers each."""
    if num_layers < 2:
        return ()
    pairs = draw(st.lists(st.sampled_from(list(combinations(range(num_layers), 2))), max_size=2, unique=True))
    return tuple(
        SharedWeight(name=f"w{i}", layers=pair, num_parameters=5, weight_bytes=20, gradient_bytes=20)
        for i, pair in enumerate(pairs)
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
    )
