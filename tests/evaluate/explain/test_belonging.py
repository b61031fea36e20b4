"""A plan is explained by the profile that it was made from, and by no other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gplan.core import Plan, Profile
from gplan.core.errors import FileError
from gplan.evaluate.explain.alternatives import setting_of
from gplan.evaluate.explain.bottleneck import notes_on, profile_in_plan_order
from tests.evaluate.explain.settings import plan_of
from tests.made import make_profile
from tests.reporting.subjects import named

PROFILE = make_profile([1.0, 2.0, 3.0], microbatch_sizes=(2, 4))
PLAN = plan_of(PROFILE, microbatch_size=4)


@pytest.mark.parametrize(
    ("plan", "profile", "told"),
    [
        (PLAN, replace(PROFILE, model=replace(PROFILE.model, digest="else")), "digest made.*digest else"),
        (named(PLAN, ("a", "b", "z")), PROFILE, "a layer z, which the profile does not have"),
        (plan_of(make_profile([1.0, 2.0])), PROFILE, "the plan has 2 layers, the profile 3"),
        (replace(PLAN, microbatch_size=8), PROFILE, "micro-batches of 8, the profile was made at 2 to 4"),
    ],
)
def test_another_profile_is_refused_with_what_differs(plan: Plan, profile: Profile, told: str) -> None:
    with pytest.raises(FileError, match=told + ".*expected the profile that the plan was made from"):
        profile_in_plan_order(plan, profile)


def test_the_profile_comes_in_the_order_of_the_plan() -> None:
    other = PROFILE.reordered([2, 0, 1])
    assert [x.name for x in other.layers] == ["c", "a", "b"]
    assert profile_in_plan_order(PLAN, other) == PROFILE


def test_a_profile_that_was_measured_again_is_noted_with_both_steps() -> None:
    assert notes_on(PLAN, PROFILE, setting_of(PLAN)) == ()
    again = make_profile([1.0, 2.0, 3.3], microbatch_sizes=(2, 4))
    (note,) = notes_on(PLAN, again, setting_of(PLAN))
    assert "194 s, not 180 s" in note
