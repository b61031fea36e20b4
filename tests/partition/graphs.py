"""Small random profiles with branches, problems over them, and brute force: every chain of down-sets, priced.

Layers are numbered in an order in which they can run. Values have one or several readers, are inputs or outputs of the
model, gradients, or come with seconds of their own; sizes and times are small whole numbers, so that many plans tie.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

from gplan.core import Constraints, Link, LinkPoint, MachineDevice, Pin, Profile, Value, ValueCost
from gplan.partition.plan_evaluation import in_stage_order, objective_s, stages_of
from gplan.partition.problem import Problem
from gplan.schedules.registry import num_stages_of, schedule_info
from tests.graphs import Graph
from tests.made import FREE_LINK
from tests.partition.problems import ALL_BOUNDARIES, peak_bytes, profiles, replica_costs

Stages = tuple[tuple[int, ...], ...]

MOST_PARTITIONS = 200
"""Of a random problem: all are priced, and six layers without connections have 1560 into four stages."""

OBJECTIVES = ("step-time", "max-stage")

LINKS = (
    FREE_LINK,
    Link(latency_s=1.0, bytes_per_s=2.0),
    Link(latency_s=0.0, bytes_per_s=1.0, points=(LinkPoint(num_bytes=2, seconds=1.0), LinkPoint(num_bytes=6, seconds=2.0))),
    Link(latency_s=0.0, bytes_per_s=8.0, points=(LinkPoint(num_bytes=1, seconds=1.0), LinkPoint(num_bytes=3, seconds=5.0))),
)  # fmt: skip
"""Nothing, a latency and a rate, and measured ones: the seconds of the third rise ever faster,
those of the last do not."""


def every_partition(problem: Problem) -> Iterator[Stages]:
    """The layers of the stages of every partition."""
    yield from Graph(problem.num_layers, list(problem.costs.profile.precedence)).chains(problem.num_stages)


def is_allowed(problem: Problem, stages: Stages) -> bool:
    """Whether the stages fit their devices and satisfy the constraints."""
    return peak_excess_bytes(problem, stages) <= 0 and satisfies(problem, stages)


def best_goal_s(problem: Problem) -> float | None:
    """The smallest objective by brute force; None where nothing is allowed."""
    orders, found = dict[tuple[int, ...], Problem](), list[float]()
    for stages in every_partition(problem):
        laid, cuts = in_stage_order(problem, stages)
        laid = orders.setdefault(tuple(chain.from_iterable(stages)), laid)  # whose table of stages is there already
        if satisfies(problem, stages) and _excess_bytes(problem, laid, cuts) <= 0:
            found.append(objective_s(laid, stages_of(laid, cuts)))
    return min(found, default=None)


def peak_excess_bytes(problem: Problem, stages: Stages) -> int:
    """By how much the device with the least room misses its memory; negative where all fit, 0 without a limit."""
    return _excess_bytes(problem, *in_stage_order(problem, stages))


def _excess_bytes(problem: Problem, laid: Problem, cuts: tuple[int, ...]) -> int:
    if problem.has_chunks:
        return 0 if problem.memory_bytes is None else peak_bytes(laid, stages_of(laid, cuts)) - problem.memory_bytes
    bounds = np.array([0, *cuts, laid.num_layers])
    peaks = [int(laid.peak_bytes(k, bounds[k : k + 1], bounds[k + 1 : k + 2])[0]) for k in range(len(cuts) + 1)]
    limits = [problem.memory_of(k) for k in range(len(peaks))]
    return max((peak - limit for peak, limit in zip(peaks, limits, strict=True) if limit is not None), default=0)


def satisfies(problem: Problem, stages: Stages) -> bool:
    """Whether the stages satisfy the constraints, read off their names."""
    names = [layer.name for layer in problem.costs.profile.layers]
    stage_of = {names[v]: k for k, stage in enumerate(stages) for v in stage}
    cuts = [set().union(*stages[:k]) for k in range(1, len(stages))]
    together = [
        {stage_of[x] for x in names[names.index(a) : names.index(b) + 1]} for a, b in problem.constraints.keep_together
    ]
    return (
        all(set(range(names.index(x) + 1)) in cuts for x in problem.constraints.cut_after)
        and all(len(x) == 1 for x in together)
        and all(stage_of[pin.layer] == pin.stage for pin in problem.constraints.pins)
    )


@st.composite
def graph_problems(
    draw: st.DrawFn,
    *,
    max_layers: int = 6,
    max_stages: int = 4,
    minimize: Sequence[str] = OBJECTIVES,
    is_limited: bool = False,
    schedules: Sequence[str] = ALL_BOUNDARIES,
) -> Problem:
    """A problem over a graph, on equal or unequal devices, with or without constraints and replicas; `is_limited`: surely
    with a memory limit.
    """
    schedule = draw(st.sampled_from(list(schedules)))
    said = schedule_info(schedule)
    profile = draw(graph_profiles(max_layers, num_stages_of(schedule, said.num_devices or 1)))
    num_devices = said.num_devices or draw(st.integers(1, min(len(profile.layers), max_stages) // said.num_chunks))
    num_stages = num_stages_of(schedule, num_devices)
    num_microbatches = draw(st.sampled_from([m for m in (1, 2, 4) if m <= (said.num_microbatches or m)]))
    problem = Problem(
        costs=replica_costs(draw, profile, num_microbatches, num_devices=draw(st.sampled_from([1, num_devices]))),
        num_stages=num_stages,
        schedule=schedule,
        recompute=draw(st.sampled_from(["never", "always", "except-last"])),
        minimize=draw(st.sampled_from(list(minimize))),
        machine_devices=draw(st.sampled_from([(), _places(draw, num_stages)])) if said.num_chunks == 1 else (),
        links=tuple(draw(st.sampled_from(LINKS)) for _ in range(num_stages - 1))
        if said.num_chunks == 1 and draw(st.booleans())
        else (),
        constraints=_constraints(draw, profile, num_stages) if draw(st.booleans()) else Constraints(),
    )
    assume(sum(1 for _ in islice(every_partition(problem), MOST_PARTITIONS + 1)) <= MOST_PARTITIONS)
    return _with_limit(draw, problem) if is_limited or draw(st.booleans()) else problem


@st.composite
def graph_profiles(draw: st.DrawFn, max_layers: int, min_layers: int = 1) -> Profile:
    """A profile whose values make a graph; with few of them, a chain or layers without any connection."""
    profile = draw(profiles(max_layers, min_layers))
    num_layers = len(profile.layers)
    values = [
        _value(draw, producer, num_layers)
        for producer in [None, *range(num_layers)]
        for _ in range(draw(st.integers(0, 2)))
    ]
    values = _with_views(draw, values or [_value(draw, None, num_layers)])
    return replace(profile, values=values, link=draw(st.sampled_from(LINKS)))


def _value(draw: st.DrawFn, producer: int | None, num_layers: int) -> Value:
    later = range(0 if producer is None else producer + 1, num_layers + 1)
    consumers = draw(st.lists(st.sampled_from(list(later)), min_size=1, max_size=3, unique=True))
    return Value(
        producer=producer,
        consumers=tuple(sorted(consumers)),
        costs=(_value_cost(draw),),
    )


def _with_views(draw: st.DrawFn, values: Sequence[Value]) -> tuple[Value, ...]:
    """Some values are views of one that only their producer reads."""
    found = list(values)
    for place, value in enumerate(found):
        free = {i for i, x in enumerate(found) if x.consumers == (value.producer,)} - {x.view_of for x in found}
        if free and draw(st.booleans()):
            viewed = draw(st.sampled_from(sorted(free)))
            found[place] = replace(value, costs=found[viewed].costs, view_of=viewed)
    return tuple(found)


def _value_cost(draw: st.DrawFn) -> ValueCost:
    num_bytes = draw(st.integers(0, 4))
    gradient_bytes, unsaved_bytes = draw(st.sampled_from([0, num_bytes])), draw(st.integers(0, num_bytes))
    return ValueCost(
        microbatch_size=1,
        num_bytes=num_bytes,
        gradient_bytes=gradient_bytes,
        viewed_bytes=draw(st.integers(0, gradient_bytes)),
        unsaved_bytes=unsaved_bytes,
        saved_later_bytes=draw(st.integers(0, num_bytes - unsaved_bytes)),
    )


def _places(draw: st.DrawFn, num_stages: int) -> tuple[MachineDevice, ...]:
    speeds = draw(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=num_stages, max_size=num_stages))
    return tuple(MachineDevice(name=f"d{k}", host="h", speed=speed) for k, speed in enumerate(speeds))


def _constraints(draw: st.DrawFn, profile: Profile, num_stages: int) -> Constraints:
    """One constraint of a kind; it may be impossible."""
    names = [layer.name for layer in profile.layers]
    one, other = sorted(draw(st.lists(st.sampled_from(range(len(names))), min_size=2, max_size=2)))
    kind = draw(st.sampled_from(["cut", "together", "pin"] if len(names) > 1 else ["together", "pin"]))
    if kind == "cut":
        return Constraints(cut_after=(names[min(one, len(names) - 2)],))
    if kind == "together":
        return Constraints(keep_together=((names[one], names[other]),))
    return Constraints(pins=(Pin(layer=names[one], stage=draw(st.integers(0, num_stages - 1))),))


def _with_limit(draw: st.DrawFn, problem: Problem) -> Problem:
    """With a limit that one of the partitions just meets, or misses by a few bytes; on one device, or on all."""
    some = draw(st.sampled_from(list(every_partition(problem))))
    peak = peak_excess_bytes(replace(problem, memory_bytes=1), some) + 1
    limit = max(1, peak - draw(st.integers(0, 3)))
    if not problem.machine_devices or draw(st.booleans()):
        return replace(problem, memory_bytes=limit)
    return replace(
        problem, machine_devices=(replace(problem.machine_devices[0], memory_bytes=limit), *problem.machine_devices[1:])
    )
