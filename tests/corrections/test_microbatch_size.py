"""Costs between two profiled micro-batch sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gplan.core import LayerCost, Leftover, Timing
from gplan.core.errors import UsageError
from gplan.corrections.microbatch_size import cost_at


def cost(size: int, *, pending_bytes: int = 0, half_s: float | None = None) -> LayerCost:
    half = None if half_s is None else Timing.exactly(half_s)
    return LayerCost(
        microbatch_size=size, forward=Timing.exactly(1.0), backward=Timing.exactly(2.0), stash_bytes=0,
        forward_workspace_bytes=0, backward_workspace_bytes=0, output_bytes=0, output_gradient_bytes=0,
        output_unsaved_bytes=0, pending_bytes=pending_bytes, input_gradient=half, weight_gradient=half,
    )  # fmt: skip


def test_halves_and_what_waits_between_them_lie_between_those_of_the_sizes() -> None:
    found = cost_at((cost(2, pending_bytes=20, half_s=1.0), cost(6, pending_bytes=40, half_s=3.0)), 3)
    assert found.pending_bytes == 25
    assert found.weight_gradient is not None and found.weight_gradient.median_s == 1.5
    assert found.weight_gradient.origin == "computed"


def test_halves_known_at_one_size_only_are_not_known_between() -> None:
    assert not cost_at((cost(2, half_s=1.0), cost(6)), 3).has_halves


def test_nothing_is_known_beyond_the_sizes() -> None:
    with pytest.raises(UsageError, match="has micro-batch sizes 2, 6; asked for 7"):
        cost_at((cost(2), cost(6)), 7)


def test_a_first_half_frees_no_more_than_the_stash() -> None:
    some = replace(cost(2), stash_bytes=8, pending_bytes=-8)
    assert cost_at((some, replace(cost(6), stash_bytes=3, pending_bytes=-3)), 5).pending_bytes == -4
    with pytest.raises(ValueError, match="pending_bytes is -8; expected at least -7"):
        replace(some, stash_bytes=7)


def test_what_only_one_size_has_of_later_layers_is_nothing_at_the_other() -> None:
    few, many = ([Leftover(num_later=n, num_bytes=x) for n, x in pairs] for pairs in ([(1, 8)], [(1, 16), (3, -4)]))
    found = cost_at((replace(cost(2), leftovers=tuple(few)), replace(cost(6), leftovers=tuple(many))), 4)
    assert [(x.num_later, x.num_bytes) for x in found.leftovers] == [(1, 12), (3, -2)]
