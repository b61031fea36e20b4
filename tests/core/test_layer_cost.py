"""Costs that cannot be are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gplan.core import StepCost, Timing


@pytest.mark.parametrize("field", ["contention", "update_contention"])
@pytest.mark.parametrize("factor", [0.9, float("inf"), float("nan")])
def test_no_update_is_faster_beside_other_work(field: str, factor: float) -> None:
    with pytest.raises(ValueError, match=f"{field} is {factor}; expected a finite factor of 1 or more"):
        replace(StepCost.none(), **{field: factor})


def test_a_longer_step_keeps_the_part_that_its_layers_share() -> None:
    """Also where the measured fixed part is longer than the whole, as it can be by noise."""
    step = replace(StepCost.none(), optimizer=Timing.exactly(3.0), zero_grad=Timing.exactly(1.0), fixed_s=5.0)
    found = step.plus(fixed_s=2.0, spread_s=7.0)
    assert (found.update_s, found.fixed_part_s, found.spread_s) == (13.0, 6.0, 7.0)
