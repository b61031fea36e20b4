"""Small random models with branches, and brute force over every chain of down-sets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from hypothesis import strategies as st

from gplan.balancer.price import Problem, laid_out, objective_s, stages_of
from gplan.costs import Costs
from gplan.nouns import Link, Pin, Place, Profile, Stage, Value, ValueCost, Wishes
from gplan.schedules import SCHEDULES
from tests.balancer.problems import profiles

Stages = tuple[tuple[int, ...], ...]


@st.composite
def branched_profiles(draw: st.DrawFn, max_layers: int = 6) -> Profile:
    """A profile whose values skip layers, branch and join; the model's input and output among them."""
    profile = draw(profiles(max_layers))
    num_layers = len(profile.layers)
    values = []
    for producer in [None, *range(num_layers)]:
        later = range(0 if producer is None else producer + 1, num_layers + 1)
        consumers = draw(st.sets(st.sampled_from(list(later)), max_size=2))
        if consumers:
            values.append(_value(draw, producer, sorted(consumers)))
    if draw(st.booleans()) and num_layers > 2:
        values.append(replace(_value(draw, num_layers - 1, [0]), is_gradient=True))
    return replace(profile, values=tuple(values)) if values else profile


def _value(draw: st.DrawFn, producer: int | None, consumers: Sequence[int]) -> Value:
    num_bytes = draw(st.integers(0, 6))
    cost = ValueCost(
        microbatch_size=1,
        num_bytes=num_bytes,
        gradient_bytes=draw(st.integers(0, num_bytes)),
        unsaved_bytes=draw(st.integers(0, num_bytes)),
    )
    given_s = draw(st.sampled_from([None, None, 1.0, 3.0]))
    return Value(producer=producer, consumers=tuple(consumers), costs=(cost,), transfer_s=given_s)


@st.composite
def branched_problems(
    draw: st.DrawFn,
    *,
    max_layers: int = 6,
    minimize: Sequence[str] = ("step-time", "max-stage", "max-compute"),
    with_wishes: bool = True,
) -> Problem:
    """A problem over such a profile: memory, wishes, replicas, and devices and links that differ."""
    profile = draw(branched_profiles(max_layers))
    num_layers = len(profile.layers)
    num_stages = draw(st.integers(1, min(num_layers, 4)))
    unequal = draw(st.booleans())
    problem = Problem(
        costs=Costs(profile, 1, draw(st.sampled_from([1, 2, 4]))),
        num_stages=num_stages,
        schedule=draw(st.sampled_from(list(SCHEDULES))),
        recompute=draw(st.sampled_from(["never", "always", "except-last"])),
        minimize=draw(st.sampled_from(list(minimize))),
        places=tuple(_place(draw, i) for i in range(num_stages)) if unequal else (),
        links=tuple(draw(st.sampled_from(_LINKS)) for _ in range(num_stages - 1)) if unequal else (),
        wishes=draw(wishes(profile, num_stages)) if with_wishes else Wishes(),
        num_replicas=draw(st.sampled_from([1, 1, 4])),
    )
    every = list(chains(problem))
    if not draw(st.booleans()) or not every:
        return problem
    peak = max(x.memory.peak_bytes for x in priced(problem, draw(st.sampled_from(every))))
    return replace(problem, memory_bytes=max(1, peak - draw(st.integers(0, 3))))


_LINKS = (Link(latency_s=0.0, bytes_per_s=1.0), Link(latency_s=2.0, bytes_per_s=4.0))


def _place(draw: st.DrawFn, index: int) -> Place:
    return Place(name=f"device{index}", host="a", speed=draw(st.sampled_from([1.0, 0.5, 2.0])))


@st.composite
def wishes(draw: st.DrawFn, profile: Profile, num_stages: int) -> Wishes:
    """None, or a few."""
    names = [layer.name for layer in profile.layers]
    if len(names) < 2 or draw(st.booleans()):
        return Wishes()
    one, other = sorted(draw(st.lists(st.sampled_from(range(len(names))), min_size=2, max_size=2)))
    kind = draw(st.sampled_from(["cut", "together", "pin"]))
    if kind == "cut":
        return Wishes(cut_after=(names[one if one < len(names) - 1 else 0],))
    if kind == "together":
        return Wishes(keep_together=((names[one], names[other]),))
    return Wishes(pins=(Pin(layer=names[one], stage=draw(st.integers(0, num_stages - 1))),))


def chains(problem: Problem) -> Iterator[Stages]:
    """Every way to put the layers on K stages, none empty, each after what it needs, that grants the wishes."""
    num_layers, precedence = problem.num_layers, problem.costs.profile.precedence
    for stage_of in product(range(problem.num_stages), repeat=num_layers):
        is_chain = len(set(stage_of)) == problem.num_stages and all(stage_of[a] <= stage_of[b] for a, b in precedence)
        if is_chain and grants(problem, stage_of):
            yield tuple(tuple(x for x in range(num_layers) if stage_of[x] == k) for k in range(problem.num_stages))


def grants(problem: Problem, stage_of: Sequence[int]) -> bool:
    """Whether a partition does what the user wishes."""
    names = [layer.name for layer in problem.costs.profile.layers]
    for name in problem.wishes.cut_after:
        cut = names.index(name) + 1
        if not max(stage_of[:cut]) < min(stage_of[cut:], default=problem.num_stages):
            return False
    for one, other in problem.wishes.keep_together:
        if len(set(stage_of[names.index(one) : names.index(other) + 1])) > 1:
            return False
    return all(stage_of[names.index(pin.layer)] == pin.stage for pin in problem.wishes.pins)


def priced(problem: Problem, stages: Stages) -> tuple[Stage, ...]:
    """The stages of a partition with their costs."""
    return stages_of(*laid_out(problem, stages))


def goal_s(problem: Problem, stages: Stages) -> float:
    """The objective of a partition."""
    return objective_s(laid_out(problem, stages)[0], priced(problem, stages))


def best_s(problem: Problem) -> float | None:
    """The smallest objective by brute force; None where no partition fits and grants the wishes."""
    fitting = (x for x in chains(problem) if fits(problem, x))
    return min((goal_s(problem, x) for x in fitting), default=None)


def fits(problem: Problem, stages: Stages) -> bool:
    """Whether every stage fits its device."""
    limits = [problem.memory_of(i) for i in range(len(stages))]
    peaks = [x.memory.peak_bytes for x in priced(problem, stages)]
    return all(limit is None or peak <= limit for limit, peak in zip(limits, peaks, strict=True))
