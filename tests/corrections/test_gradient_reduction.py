"""Backwards that take longer while gradients are reduced: of a profile, and of the plan made from it."""

from __future__ import annotations

import pytest

from gplan.core.errors import UsageError
from gplan.corrections.gradient_reduction import beside_reduction
from gplan.strategy_search.planner import balance
from tests.made import make_profile
from tests.partition.problems import in_halves

PROFILE = in_halves(make_profile([2.0, 3.0, 4.0], [4.0, 6.0, 8.0]))


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_every_backward_of_a_plan_is_longer_and_no_forward(schedule: str) -> None:
    asked = {"num_devices": 2, "num_microbatches": 4, "schedule": schedule, "recompute": "always"}
    before, after = (balance(x, **asked) for x in (PROFILE, beside_reduction(PROFILE, 1.15)))
    assert before.cuts == after.cuts
    for one, other in zip(before.stage_costs, after.stage_costs, strict=True):
        assert (one.forward_s, one.recompute_s) == (other.forward_s, other.recompute_s)
        assert other.backward_s == pytest.approx(1.15 * one.backward_s)
        assert other.weight_gradient_s == pytest.approx(1.15 * (one.weight_gradient_s or 0))
    assert before.prediction.step_s < after.prediction.step_s < 1.15 * before.prediction.step_s
    assert "1.15 times as long" in after.notes[0]


@pytest.mark.parametrize("factor", [0.9, 0.0, -1.0, float("nan"), float("inf")])
def test_a_factor_that_is_none_is_refused(factor: float) -> None:
    with pytest.raises(UsageError, match="expected a factor of at least 1, such as 1.15"):
        beside_reduction(PROFILE, factor)
