"""Wishes as rows: a down-set that must lie before one of the cuts, layers on one stage, layers on a given stage."""

from __future__ import annotations

from collections.abc import Sequence

from gplan.balancer.milp.choices import Choices
from gplan.balancer.milp.program import Program, total, weighted
from gplan.nouns import Profile, Wishes


def add_wishes(program: Program, choices: Choices, *, profile: Profile, wishes: Wishes) -> None:
    """Rows that grant all wishes; "up to" and "between" are in the profile's order."""
    index = {layer.name: i for i, layer in enumerate(profile.layers)}
    for name in dict.fromkeys(wishes.cut_after):
        _add_cut(program, choices, index[name] + 1)
    for one, other in wishes.keep_together:
        for v in range(index[one], index[other]):
            for k in choices.stages[:-1]:
                program.require_equal(choices.up_to(v, k), choices.up_to(v + 1, k))
    for pin in wishes.pins:
        program.require(choices.is_on(index[pin.layer], pin.stage), at_least=1)


def are_granted(wishes: Wishes, *, profile: Profile, stages: Sequence[Sequence[int]]) -> bool:
    """Whether some stages grant all wishes."""
    index = {layer.name: i for i, layer in enumerate(profile.layers)}
    stage_of = {v: k for k, layers in enumerate(stages) for v in layers}
    cuts = [set[int]().union(*stages[:k]) for k in range(1, len(stages))]
    return (
        all(set(range(index[name] + 1)) in cuts for name in wishes.cut_after)
        and all(len({stage_of[v] for v in range(index[a], index[b] + 1)}) == 1 for a, b in wishes.keep_together)
        and all(stage_of[index[pin.layer]] == pin.stage for pin in wishes.pins)
    )


def _add_cut(program: Program, choices: Choices, num_before: int) -> None:
    """One of the cuts lies right after the first layers.

    Its indicators need not be binary: where one is above 0, whole numbers y are those of that cut.
    """
    is_here = [program.variable(f"cut_{num_before}_{k}", high=1) for k in choices.stages[:-1]]
    program.require(total(is_here), at_least=1)
    for k, here in enumerate(is_here):
        for v in choices.layers:
            if v < num_before:
                program.require(choices.up_to(v, k), at_least=here)
            else:
                program.require(weighted([(1.0, 1), (-1.0, choices.up_to(v, k))]), at_least=here)
