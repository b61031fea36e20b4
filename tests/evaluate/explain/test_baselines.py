"""The rules of others, priced like the plan."""

from __future__ import annotations

import pytest

from gplan.core import Profile, SharedWeight
from gplan.evaluate.explain.explain import THIS_PLAN, baseline_outcomes, largest_load_s, num_parameters
from gplan.evaluate.explain.explanation import BaselineOutcome
from gplan.evaluate.replanning import problem_of
from tests.evaluate.explain.settings import plan_of, setting
from tests.made import make_profile


def rules_of(profile: Profile, **given: object) -> dict[str, BaselineOutcome]:
    return {x.rule: x for x in baseline_outcomes(plan_of(profile, **given), profile)}


def test_equal_counts_are_priced_by_the_same_functions_as_the_plan() -> None:
    found = rules_of(make_profile([3.0, 1.0, 1.0, 1.0]))
    own, equal = found[THIS_PLAN], found["equal layer counts"]
    assert (own.cuts, own.step_s, own.largest_s) == ((1,), 3 * (6 + 3 * 3), 9.0)
    assert (equal.cuts, equal.step_s, equal.largest_s) == ((2,), 3 * (6 + 3 * 4), 12.0)


def test_the_plan_is_first_and_no_rule_beats_a_proven_plan() -> None:
    profile = make_profile([1.0, 5.0, 2.0, 2.0, 4.0, 1.0], weight_bytes=[64, 4, 4, 4, 4, 64])
    own, *others = baseline_outcomes(plan_of(profile), profile)
    assert own.rule == THIS_PLAN
    assert len(others) >= 3
    assert all(x.step_s is None or x.step_s >= (own.step_s or 0.0) - 1e-9 for x in others)


def test_a_rule_that_leaves_a_stage_empty_says_so() -> None:
    empty = [x for x in rules_of(make_profile([8.0, 1.0, 1.0]), num_stages=3).values() if x.cuts is None]
    assert empty
    assert all("empty" in x.reason and x.step_s is None for x in empty)


def test_a_rule_that_does_not_fit_the_memory_is_marked() -> None:
    found = rules_of(make_profile([3.0, 1.0, 1.0, 1.0], weight_bytes=[10, 10, 0, 0]), memory_bytes=60)
    assert found[THIS_PLAN].fits
    assert found[THIS_PLAN].reason == ""
    assert not found["equal layer counts"].fits
    assert found["equal layer counts"].reason == "stage 0 needs 80 B; expected at most 60 B"


def test_a_shared_parameter_counts_for_every_layer_that_uses_it() -> None:
    shared = SharedWeight(name="tied", layers=(0, 2), num_parameters=5, weight_bytes=20, gradient_bytes=20)
    profile = make_profile([1.0, 1.0, 1.0], weight_bytes=[0, 8, 4], shared_weights=(shared,))
    assert num_parameters(profile) == [5, 2, 6]


@pytest.mark.parametrize(("recompute", "seconds"), [("never", 6.0), ("always", 8.0), ("except-last", 7.5)])
def test_the_largest_stage_has_its_recompute_averaged_over_the_step(recompute: str, seconds: float) -> None:
    profile = make_profile([1.0, 2.0])
    plan = plan_of(profile, recompute=recompute)
    assert largest_load_s(plan.stages, problem_of(profile, setting(recompute=recompute))) == pytest.approx(seconds)
