"""Which layers one row may stand for."""

from __future__ import annotations

from dataclasses import replace

from gplan.core import Profile
from gplan.core.profile import group_equal
from tests.made import make_profile


def alike(profile: Profile) -> tuple[tuple[int, ...], ...]:
    return group_equal([profile.cost_key(i) for i in range(len(profile.layers))])


def test_a_layer_that_was_not_measured_shares_its_key_with_the_one_it_is_like() -> None:
    made = make_profile([1.0, 2.0, 2.0])
    profile = replace(made, layers=(*made.layers[:2], replace(made.layers[2], same_as=1)))
    assert alike(profile) == ((0,), (1, 2))


def test_layers_of_two_kinds_are_not_alike_even_at_the_same_cost() -> None:
    made = make_profile([1.0, 1.0])
    profile = replace(made, layers=(made.layers[0], replace(made.layers[1], kind="Other")))
    assert profile.cost_key(0) != profile.cost_key(1)


def test_layers_whose_figures_differ_are_never_one_row_whatever_same_as_says() -> None:
    made = make_profile([1.0, 1.0, 2.0], weight_bytes=[4, 8, 8])
    layers = (made.layers[0], replace(made.layers[1], same_as=0), replace(made.layers[2], same_as=1))
    profile = replace(made, layers=layers)
    assert alike(profile) == ((0,), (1,), (2,))
